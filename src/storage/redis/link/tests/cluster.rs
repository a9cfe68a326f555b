use super::*;
use crate::storage::servers::Cluster;

/// `bar` is in another slot, and with another node.
const FOO: u16 = 12_182;

#[tokio::test]
async fn a_node_that_is_away_or_hangs_takes_only_its_own_keys_with_it() {
    let mut cluster = Cluster::start();
    let link = link(&cluster.url());
    recovers(&link, &count("foo")).await;
    let lost = Cluster::home(FOO);
    cluster.nodes[lost].kill();
    for _ in 0..20 {
        assert!(run(&link, &count("foo")).await.is_err());
        run(&link, &count("bar")).await.unwrap();
    }
    cluster.nodes[lost].restart();
    cluster.wait_until_whole();
    let took = recovers(&link, &count("foo")).await;
    assert!(took < Duration::from_secs(1), "{took:?}");

    cluster.nodes[lost].stop();
    for _ in 0..5 {
        assert!(run(&link, &count("foo")).await.is_err());
        run(&link, &count("bar")).await.unwrap();
    }
    cluster.nodes[lost].go_on();
    cluster.wait_until_whole();
    let took = recovers(&link, &count("foo")).await;
    assert!(took < Duration::from_secs(1), "{took:?}");
}

#[tokio::test]
async fn slots_that_move_are_followed() {
    let cluster = Cluster::start();
    let link = link(&cluster.url());
    recovers(&link, &count("foo")).await;
    let (from, to) = (Cluster::home(FOO), 0);
    let (from_id, to_id) = (cluster.id(from), cluster.id(to));
    let slot = |node: usize, what: &[&str]| {
        let command = [&["CLUSTER", "SETSLOT", "12182"], what].concat();
        assert_eq!(cluster.nodes[node].ask(&command).to_string(), "OK");
    };
    slot(to, &["IMPORTING", &from_id]);
    slot(from, &["MIGRATING", &to_id]);
    // Not there yet: asked.
    assert_eq!(run(&link, &count("{foo}new")).await.unwrap(), Value::Int(1));
    let port = cluster.nodes[to].port().to_string();
    assert_eq!(cluster.nodes[from].ask(&["MIGRATE", "127.0.0.1", &port, "foo", "0", "1000"]).to_string(), "OK");
    assert_eq!(run(&link, &count("foo")).await.unwrap(), Value::Int(2));
    slot(to, &["NODE", &to_id]);
    slot(from, &["NODE", &to_id]);
    assert_eq!(run(&link, &count("foo")).await.unwrap(), Value::Int(3));
    assert_eq!(run(&link, &count("{foo}new")).await.unwrap(), Value::Int(2));
}
