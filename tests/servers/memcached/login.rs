//! Logins by user and password.

use common::servers::Memcached;
use tower_ratelimit::{Key, Quota, RateLimiter, Storage};

use super::{LONG, not_ready, storage, url_of};

#[tokio::test]
async fn each_connection_to_each_server_logs_in() {
    let mut servers = [(); 2].map(|()| Memcached::with_login("app", "p@ss:wörd", &[]));
    let storage = storage(&url_of(&servers).replace("://", "://app:p%40ss%3Aw%C3%B6rd@"));
    storage.ready(LONG).await.unwrap();
    let limiter = RateLimiter::with_storage(Quota::per_hour(1), storage.clone());
    for client in 0..50_u64 {
        assert!(limiter.hit(&Key::from(client)).await.unwrap().is_admitted());
    }
    let items = servers.each_ref().map(|server| server.stat("curr_items"));
    assert!(items.iter().all(|count| *count > 0) && items.iter().sum::<u64>() == 50, "{items:?}");

    servers[0].kill();
    not_ready(&storage).await;
    servers[0].restart();
    storage.ready(LONG).await.unwrap();
    let forgotten = (0..50_u64).map(async |client| limiter.hit(&Key::from(client)).await.unwrap().is_admitted());
    let mut count = 0;
    for admitted in forgotten {
        count += u64::from(admitted.await);
    }
    assert_eq!(count, items[0], "the restarted server is empty, and the other one has kept its items");
}
