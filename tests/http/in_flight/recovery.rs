//! The log line about a storage that works again.

use std::time::Duration;

use common::fake_cas_store::FakeCasStore;
use common::{ask, status};
use http::Request;
use tokio::runtime::Builder;
use tokio::time::sleep;
use tower_ratelimit::OnError;
use tower_ratelimit::extract::Head;

use super::shared::{cas, settle};
use super::{layer, of, streams};
use crate::log::log_of;

fn costs(slots: u32) -> Request<()> {
    let mut request = of("a");
    *request.uri_mut() = format!("/{slots}").parse().unwrap();
    request
}

/// After a failure, requests are decided without the storage. Then it fails again.
#[test]
fn recovery_is_logged_by_a_request_that_the_storage_has_answered() {
    let cost = |head: &Head<'_>| head.uri().path()[1..].parse::<u32>().unwrap();
    for has_observer in [false, true] {
        let work = async {
            let store = FakeCasStore::default();
            let layer = layer(2).cost(cost).storage(cas(&store), OnError::Refuse);
            let layer = if has_observer { layer.observer(|_| {}) } else { layer };
            let service = streams(&layer);
            let mut held = vec![ask(&service, costs(1)).await, ask(&service, costs(1)).await];
            store.fail(true);
            for _ in 0..2 {
                assert_eq!(status(&service, costs(1)).await, 503);
                sleep(Duration::from_secs(2)).await;
                assert_eq!(status(&service, costs(0)).await, 200);
                assert_eq!(status(&service, costs(3)).await, 429, "no claim can suffice");
                held.pop();
                // The slot cannot be given back, so the process can use it again.
                settle().await;
                held.push(ask(&service, costs(1)).await);
                assert_eq!(held[1].status(), 200);
            }
            store.fail(false);
            held.pop();
            settle().await;
            assert_eq!(status(&service, costs(1)).await, 200);
        };
        let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let lines = log_of(|| runtime.block_on(work));
        let failed = |line: &String| line.contains("rate limit storage failed");
        assert_eq!(lines.iter().filter(|line| failed(line)).count(), 2, "{lines:#?}");
        let recovered: Vec<_> = lines.iter().filter(|line| line.contains("storage recovered")).collect();
        assert_eq!(recovered.len(), 1, "{lines:#?}");
        assert!(recovered[0].contains("failed=2"), "{lines:#?}");
    }
}
