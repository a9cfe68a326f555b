//! The golden vectors, on the storages that need no server.

use std::time::Duration;

use common::fake_cas_store::FakeCasStore;
use common::vectors::{ReplayTarget, STEPS, assert_all_agree, documents, replay};
use tokio::runtime::Runtime;
use tower_ratelimit::storage::Cas;

#[test]
fn memory_agrees_with_every_vector() {
    assert_all_agree("memory://");
}

/// States are written as text and read back, and every write is a swap.
#[test]
fn compare_and_swap_storage_agrees_with_every_vector() {
    let (mut steps, runtime) = (0, Runtime::new().unwrap());
    for document in documents() {
        let make = |clock| Ok(Cas::new(FakeCasStore::default()).timeout(Duration::from_secs(20)).clock(clock));
        let (replayed, mismatches) = replay(&document, &runtime, make).unwrap();
        assert_eq!(mismatches, Vec::<String>::new());
        steps += replayed;
    }
    assert_eq!(steps, STEPS, "every step was replayed");
}

#[test]
fn wrong_expectation_is_reported() {
    let document = documents().find(|document| document.contains("\"strategy\": \"fixed-window\"")).unwrap();
    let wrong = document.replacen("\"remaining\":2", "\"remaining\":3", 1);
    let target = ReplayTarget::at("memory://").unwrap();
    let (_, mismatches) = target.replay(&wrong).unwrap();
    assert_eq!(mismatches.len(), 1);
    assert!(mismatches[0].starts_with("fixed/rejected-hits-count-cost, step 0: expected admitted remaining 3"));
    assert!(target.replay("{}").is_err());
}
