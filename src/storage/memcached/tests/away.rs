//! Servers that are away, or hang, or are others than they were.

use super::*;
use crate::storage::servers::Server;

/// Field defect: requests that hang when the server stops answering.
#[tokio::test]
async fn a_server_that_hangs_delays_nobody_and_is_back_at_once() {
    let server = Memcached::start(&[]);
    let (known, new) = (client(&server.url()), client(&server.url()));
    recovers(&known, "k").await;
    server.stop();
    for _ in 0..6 {
        let (one, other) = tokio::join!(load(&known, "a"), load(&new, "b"));
        assert!(one.unwrap_err().is_timeout() && other.is_err());
    }
    server.go_on();
    for client in [&known, &new] {
        let took = recovers(client, "k").await;
        assert!(took < SECOND, "{took:?}");
    }
}

/// Field defect: a connection whose server is gone without a word is used for ever.
#[tokio::test]
async fn a_connection_that_is_silent_for_three_deadlines_is_replaced() {
    let server = Memcached::start(&[]);
    let proxy = Proxy::start(server.port());
    let client = client(&format!("memcached://127.0.0.1:{}", proxy.port()));
    recovers(&client, "k").await;
    server.stop();
    let mut many: JoinSet<_> = JoinSet::new();
    for _ in 0..20 {
        let client = client.clone();
        many.spawn(async move { load(&client, "k").await.is_err() });
    }
    assert!(many.join_all().await.into_iter().all(|failed| failed));
    server.go_on();
    assert!(load(&client, "k").await.is_ok());
    assert_eq!(proxy.connections(), 1, "many at once are one silence, and one is not the end of a connection");
    // Also when all who ask go away before their time.
    server.stop();
    let silent = Instant::now();
    while proxy.connections() == 1 {
        let _ = tokio::time::timeout(DEADLINE / 4, client.load("k")).await;
        assert!(silent.elapsed() < 5 * DEADLINE);
    }
    assert!(silent.elapsed() > 2 * DEADLINE);
    server.go_on();
    recovers(&client, "k").await;
    assert_eq!(proxy.connections(), 2);
}

#[tokio::test]
async fn while_nobody_listens_calls_fail_at_once_and_connects_are_few() {
    let mut server = Memcached::start(&[]);
    let client = client(&server.url());
    server.kill();
    let (started, mut calls) = (Instant::now(), 0);
    while started.elapsed() < Duration::from_millis(300) {
        let error = load(&client, "k").await.unwrap_err();
        assert!(!error.may_have_counted() && !error.is_timeout(), "{error}");
        calls += 1;
    }
    assert!(calls > 100, "{calls}");
    server.restart();
    let took = recovers(&client, "k").await;
    assert!(took < SECOND, "{took:?}");
}

/// A server counts its writings anew when it starts.
#[tokio::test]
async fn what_was_loaded_before_a_restart_swaps_nothing_after_it() {
    let mut server = Memcached::start(&[]);
    let client = client(&server.url());
    put(&client, "k", "before").await;
    let before = load(&client, "k").await.unwrap();
    let name = server.ask("mg rl:k c");
    server.restart();
    recovers(&client, "k").await;
    put(&client, "k", "after").await;
    assert_eq!(server.ask("mg rl:k c"), name, "the same name for another writing");
    assert!(!swap(&client, "k", &before.version, "late").await.unwrap());
    assert_eq!(text(&client, "k").await, "after");
}

#[tokio::test]
async fn a_server_that_dies_takes_only_its_own_keys_with_it() {
    let mut servers = [Memcached::start(&[]), Memcached::start(&[]), Memcached::start(&[])];
    let hosts: Vec<String> = servers.iter().map(|server| format!("127.0.0.1:{}", server.port())).collect();
    let client = client(&format!("memcached://{}", hosts.join(",")));
    client.ready(Instant::now() + 10 * SECOND).await.unwrap();
    let names: Vec<String> = (0..60).map(|number| format!("k{number}")).collect();
    for name in &names {
        put(&client, name, name).await;
    }
    let counts: Vec<u64> = servers.iter().map(|server| server.stat("curr_items")).collect();
    assert!(counts.iter().all(|count| *count > 5) && counts.iter().sum::<u64>() == 60, "{counts:?}");
    servers[1].kill();
    let mut failed = 0;
    for name in &names {
        match load(&client, name).await {
            Ok(there) => assert_eq!(there.text, *name),
            Err(error) => {
                assert!(error.to_string().contains(&hosts[1]), "{error}");
                failed += 1;
            }
        }
    }
    assert_eq!(failed, counts[1]);
    servers[1].restart();
    for name in &names {
        let took = recovers(&client, name).await;
        assert!(took < SECOND, "{took:?}");
    }
    let empty = {
        let mut empty = 0;
        for name in &names {
            empty += u64::from(text(&client, name).await.is_empty());
        }
        empty
    };
    assert_eq!(empty, counts[1], "nothing wandered");
}

#[tokio::test]
async fn what_is_no_memcached_is_told_so() {
    let server = Server::start(&[]);
    let client = client(&format!("memcached://127.0.0.1:{}", server.port()));
    let error = load(&client, "k").await.unwrap_err().to_string();
    assert!(error.starts_with("cannot reach 127.0.0.1:") && error.contains("no reply of memcached's"), "{error}");
}

#[test]
fn a_client_outlives_its_runtime() {
    let server = Memcached::start(&[]);
    let client = client(&server.url());
    for round in 0..3 {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            assert_eq!(text(&client, "k").await, "x".repeat(round));
            put(&client, "k", &"x".repeat(round + 1)).await;
        });
    }
}
