use super::*;
use crate::storage::servers::{Sentinels, wait_until};

/// After a failover the old primary may go on taking writes for ten seconds.
#[tokio::test]
async fn a_primary_that_sentinels_no_longer_name_is_left_though_it_answers() {
    let all = Sentinels::start();
    let link = link(&all.url());
    recovers(&link, &count("k")).await;
    // What sentinels ask of it is refused, what the link asks is not.
    all.servers[0].ask(&["ACL", "SETUSER", "default", "-ping"]);
    wait_until("another primary is named", || {
        let asking = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster"];
        all.sentinels
            .iter()
            .all(|sentinel| sentinel.ask(&asking).list()[1].to_string() == all.servers[1].port().to_string())
    });
    let before = all.servers[0].ask(&["GET", "k"]).to_string();
    let started = Instant::now();
    let mut on_the_old = 0;
    while !all.servers[1].ask(&["CLIENT", "LIST"]).to_string().contains("cmd=incr") {
        on_the_old += usize::from(run(&link, &count("k")).await.is_ok());
        assert!(started.elapsed() < Duration::from_secs(3), "{before}, {on_the_old}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(on_the_old > 0, "it did answer");
}
