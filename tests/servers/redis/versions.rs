//! Values of another format: of a later version of the library, or of another program.

use common::policy;
use common::servers::storage::{RUNTIME, on_prefix};
use common::servers::{Reply, Server};
use tower_ratelimit::storage::{ManualClock, RedisStorage, StorageError, StorageErrorKind, StorageRequest};
use tower_ratelimit::{Decision, Key, Op, Policy, Storage};

/// One record of 20 bytes, and one of 44 bytes for the log.
const POLICY: &str = "fixed-window 2/day; moving-window 2/day";

fn decide(storage: &RedisStorage, policy: &Policy, op: Op) -> Result<Decision, StorageError> {
    RUNTIME.block_on(storage.decide(StorageRequest::new(policy, &Key::from("k"), op, 1)))
}

/// Guards against this defect: two builds with different formats overwrite each other's values
/// under the same key, and admit all hits.
#[test]
fn states_of_another_version_have_a_key_of_their_own() {
    let server = Server::start(&[]);
    let storage = on_prefix(&server, "v", ManualClock::default());
    let policy = policy(POLICY).with_name("p");
    let others = ["v:{p|t:k}v2", "v:{p|t:k}v2:2.moving-window/86400000000", "v:{p|t:k}"];
    for other in others {
        server.ask(&["SET", other, "a value of another version"]);
    }
    let first = decide(&storage, &policy, Op::Hit).unwrap();
    assert_eq!([first.remaining(), decide(&storage, &policy, Op::Peek).unwrap().remaining()], [1, 1]);
    assert!(decide(&storage, &policy, Op::Hit).unwrap().is_admitted());
    assert!(decide(&storage, &policy, Op::Hit).unwrap().is_refused());
    let Reply::List(keys) = server.ask(&["KEYS", "*v1*"]) else { panic!("no list") };
    let mut keys: Vec<String> = keys.iter().map(ToString::to_string).collect();
    keys.sort();
    assert_eq!(keys, ["v:{p|t:k}v1", "v:{p|t:k}v1:2.moving-window/86400000000"]);
    RUNTIME.block_on(storage.settle(&policy, &Key::from("k"), &first, 0)).unwrap();
    RUNTIME.block_on(storage.clear(&policy, &Key::from("k"))).unwrap();
    for other in others {
        assert_eq!(server.ask(&["GET", other]).to_string(), "a value of another version", "{other}");
    }
    assert_eq!(RUNTIME.block_on(storage.clear_all()).unwrap(), 3, "the prefix includes all versions");
}

/// A value under the storage's own key is overwritten only if it consists of records.
#[test]
fn values_of_an_unknown_format_fail_and_are_not_overwritten() {
    let server = Server::start(&[]);
    let storage = on_prefix(&server, "odd", ManualClock::default());
    let (policy, key) = (policy(POLICY).with_name("p"), Key::from("k"));
    let name = "odd:{p|t:k}v1";
    for change in [
        &["SET", name, "garbage"][..],
        // As long as a record, and as two records.
        &["SET", name, "twenty bytes of text"],
        &["SET", name, "as many bytes as both records take, which is sixty-four bytes..."],
        // Records with other numbers after them, as a later version could write.
        &["APPEND", name, "\x01"],
        &["APPEND", name, "\x02\x02\x02\x02\x02\x02\x02\x02\x02\x02\x02\x02\x02\x02\x02\x02\x02\x02\x02\x02"],
        // A marker before the records.
        &["SETRANGE", name, "20", "\0"],
        &["SETRANGE", name, "63", "\0\0"],
    ] {
        server.ask(&["FLUSHALL"]);
        let first = decide(&storage, &policy, Op::Hit).unwrap();
        server.ask(change);
        let hash = || server.ask(&["EVAL", "return redis.sha1hex(redis.call('GET', KEYS[1]))", "1", name]);
        let stored = hash();
        for op in [Op::Hit, Op::Peek, Op::Charge] {
            let error = decide(&storage, &policy, op).unwrap_err();
            assert!(format!("{error:#}").contains("the key has a value of an unknown format"), "{change:?}: {error:#}");
            assert_eq!((error.kind(), error.may_have_counted()), (StorageErrorKind::Unsupported, false), "{error:?}");
        }
        let refund = RUNTIME.block_on(storage.settle(&policy, &key, &first, 0));
        assert!(refund.is_err_and(|error| format!("{error:#}").contains("unknown format")), "{change:?}");
        assert_eq!(hash(), stored, "{change:?}");
        RUNTIME.block_on(storage.clear(&policy, &key)).unwrap();
        assert_eq!(server.ask(&["DBSIZE"]).to_string(), "0", "{change:?}: a clear deletes the value");
        assert_eq!(decide(&storage, &policy, Op::Hit).unwrap().remaining(), 1, "{change:?}");
    }
}
