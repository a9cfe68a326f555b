//! The documented memory of a client.

use common::policy;
use common::servers::{Reply, Server};
use tower_ratelimit::{Key, RateLimiter};

use super::{ready, storage};

const DOCS: &str = include_str!("../../../src/storage/redis/server.md");

/// Returns the rows of the documented table: a policy, the hits of the client, and the documented
/// bytes.
fn documented() -> Vec<(String, u32, u64)> {
    let table = DOCS.split("# Memory").nth(1).unwrap().split("\n# ").next().unwrap();
    let rows = table.lines().filter_map(|line| line.strip_prefix("| `"));
    let cells = rows.map(|row| row.split('|').map(|cell| cell.trim().replace(['`', ','], "")).collect::<Vec<_>>());
    cells.map(|cells| (cells[0].clone(), cells[1].parse().unwrap(), cells[2].parse().unwrap())).collect()
}

/// Guards against this defect: nothing documents the memory of a client.
#[tokio::test]
async fn client_takes_as_much_memory_as_documented() {
    let rows = documented();
    assert_eq!(rows.len(), 6);
    let mut wrong = Vec::new();
    for (text, hits, bytes) in rows {
        let server = Server::start(&[]);
        let storage = storage(&server.url());
        ready(&storage).await;
        let limiter = RateLimiter::with_storage(policy(&text).with_name("free"), storage);
        for _ in 0..hits {
            assert!(limiter.hit(&Key::from("alice")).await.unwrap().is_admitted());
        }
        let Reply::List(keys) = server.ask(&["KEYS", "*"]) else { panic!("no list") };
        let keys: Vec<String> = keys.iter().map(ToString::to_string).collect();
        assert!(keys.iter().any(|key| key == "rl:{free|t:alice}v1"), "{keys:?}");
        let usage = |key: &String| server.ask(&["MEMORY", "USAGE", key]).to_string().parse::<u64>().unwrap();
        let found: u64 = keys.iter().map(usage).sum();
        if found.abs_diff(bytes) * 10 > bytes {
            wrong.push(format!("{text}: {found} bytes instead of {bytes}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[tokio::test]
async fn operators_read_stored_states_as_text() {
    let server = Server::start(&[]);
    let storage = storage(&server.url());
    ready(&storage).await;
    let (policy, key) = (policy("fixed-window 10/day; moving-window 20/day").with_name("free"), Key::from("alice"));
    assert!(storage.stored_states(&policy, &key).await.unwrap().is_empty());
    let limiter = RateLimiter::with_storage(policy.clone(), storage.clone());
    for _ in 0..3 {
        assert!(limiter.hit(&key).await.unwrap().is_admitted());
    }
    let lines = storage.stored_states(&policy, &key).await.unwrap();
    let words: Vec<Vec<&str>> = lines.iter().map(|line| line.split(' ').collect()).collect();
    assert_eq!((words[0][0], words[0][2]), ("1.fixed-window/86400000000", "3"), "{lines:?}");
    assert_eq!((words[1][0], words[1][2]), ("2.moving-window/86400000000", "3"), "{lines:?}");
    assert_eq!((words.len(), words[0].len(), words[1].len()), (2, 4, 9), "{lines:?}");
}
