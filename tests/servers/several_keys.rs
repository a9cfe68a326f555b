//! Several keys: in one transaction on PostgreSQL and etcd, and one after the other on memcached and on
//! a cluster.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use common::members::random_members_decide_like_the_model;
use common::random::Numbers;
use common::servers::storage::RUNTIME;
use common::servers::{
    Cluster, Etcd, FaultyServer, Memcached, Mode, PgBouncer, Postgres, Proxy, wait_until, with_option, with_timeout,
};
use common::{EVERY_STRATEGY, foreign, policy};
use tokio::task::JoinSet;
use tower_ratelimit::storage::{
    AnyStorage, EtcdStorage, InOrder, MemcachedStorage, PostgresStorage, StorageErrorKind, StorageRequest,
};
use tower_ratelimit::{Decision, Key, Op, Policy, Storage};

/// A timeout that only a hanging test reaches.
const LONG: Duration = Duration::from_secs(60);

/// A timeout whose last quarter suffices for a cancel request and its reply, also on a busy machine.
const CANCELS: Duration = Duration::from_secs(20);

/// The tasks that hit keys in different orders, and their storages, which are as in other processes.
const TASKS: u64 = 64;
const STORAGES: u64 = 8;
const HITS: u32 = 20;

/// The number of policies, and the number of keys of each.
const POLICIES: usize = 6;
const KEYS: usize = 3;

/// The limit of the first policy, which refuses. The other limits are not reached.
const TIGHT: u32 = 50;
const PLENTY: u32 = 100_000;

fn storage(url: &str) -> AnyStorage {
    with_timeout(url, LONG).parse().unwrap()
}

fn ready(url: &str) -> AnyStorage {
    let storage = storage(url);
    RUNTIME.block_on(storage.ready(LONG)).unwrap();
    storage
}

fn hit<'a>(policies: &'a [Policy], keys: &'a [Key]) -> Vec<StorageRequest<'a>> {
    policies.iter().zip(keys).map(|(policy, key)| StorageRequest::new(policy, key, Op::Hit, 1)).collect()
}

/// The policies of a user, a tenant and all clients, and the keys of one hit.
fn three(limits: [u32; 3]) -> ([Policy; 3], [Key; 3]) {
    let named = |name, limit| policy(&format!("fixed-window {limit}/day")).with_name(name);
    let [user, tenant, all] = limits;
    let keys = [Key::from("alice"), Key::from("umbrella"), Key::global()];
    ([named("user", user), named("tenant", tenant), named("all", all)], keys)
}

/// Returns the spent units of each key.
async fn spent(storage: &AnyStorage, policies: &[Policy], keys: &[Key]) -> Vec<u32> {
    let mut spent = Vec::new();
    for (policy, key) in policies.iter().zip(keys) {
        let peek = storage.decide(StorageRequest::new(policy, key, Op::Peek, 0)).await.unwrap();
        spent.push(peek.capacity() - peek.remaining());
    }
    spent
}

/// Returns a prefix that no other storage has.
fn prefix() -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    format!("t{}", NUMBER.fetch_add(1, Ordering::SeqCst))
}

#[test]
fn postgres_decides_like_the_model() {
    let server = Postgres::start(&["synchronous_commit=off"]);
    RUNTIME.block_on(random_members_decide_like_the_model(12, &EVERY_STRATEGY, |clock| {
        let url = with_option(&with_timeout(&server.url(), LONG), "prefix", prefix());
        PostgresStorage::new(&url).unwrap().clock(clock)
    }));
}

#[test]
fn etcd_decides_like_the_model() {
    let etcd = Etcd::start(1);
    RUNTIME.block_on(random_members_decide_like_the_model(8, &EVERY_STRATEGY, |clock| {
        let url = with_option(&with_timeout(&etcd.url(), LONG), "prefix", prefix());
        EtcdStorage::new(&url).unwrap().clock(clock)
    }));
}

/// Hits random keys in random orders, from storages that share nothing but the server. Each key has
/// spent exactly the units of the admitted hits.
fn mixed_orders_are_exact(url: &str) {
    let policies: Arc<Vec<Policy>> = Arc::new(
        (0..POLICIES)
            .map(|at| policy(&format!("fixed-window {}/day", if at == 0 { TIGHT } else { PLENTY })))
            .enumerate()
            .map(|(at, policy)| policy.with_name(format!("m{at}")))
            .collect(),
    );
    let storages: Vec<AnyStorage> = (0..STORAGES).map(|_| ready(url)).collect();
    let mut expected = [[0; KEYS]; POLICIES];
    let mut refused = 0;
    RUNTIME.block_on(async {
        let mut tasks = JoinSet::new();
        for (task, storage) in (0..TASKS).zip(storages.iter().cycle()) {
            let (storage, policies) = (storage.clone(), Arc::clone(&policies));
            tasks.spawn(hit_in_random_order(storage, policies, Numbers(0x1234_5678 + task)));
        }
        for (admitted, refusals) in tasks.join_all().await {
            refused += refusals;
            for (at, key) in admitted {
                expected[at][usize::try_from(key).unwrap()] += 1;
            }
        }
        for (policy, expected) in policies.iter().zip(expected) {
            let keys: Vec<_> = (0..KEYS as u64).map(Key::from).collect();
            let policies = vec![policy.clone(); keys.len()];
            assert_eq!(spent(&storages[0], &policies, &keys).await, expected, "{policy}");
        }
    });
    assert!(expected[0].iter().all(|spent| *spent <= TIGHT) && refused > 0, "{expected:?}, {refused} refused");
}

/// Returns the members of the admitted hits, and the number of refused hits.
async fn hit_in_random_order(
    storage: AnyStorage,
    policies: Arc<Vec<Policy>>,
    mut numbers: Numbers,
) -> (Vec<(usize, u64)>, u32) {
    let (mut admitted, mut refused) = (Vec::new(), 0);
    for _ in 0..HITS {
        let mut order: Vec<usize> = (0..POLICIES).collect();
        for at in (1..POLICIES).rev() {
            order.swap(at, usize::try_from(numbers.below(at as u64 + 1)).unwrap());
        }
        order.truncate(2 + usize::try_from(numbers.below(POLICIES as u64 - 1)).unwrap());
        let chosen: Vec<u64> = order.iter().map(|_| numbers.below(KEYS as u64)).collect();
        let keys: Vec<Key> = chosen.iter().map(|key| Key::from(*key)).collect();
        let policies: Vec<Policy> = order.iter().map(|at| policies[*at].clone()).collect();
        let decisions = loop {
            let decisions = storage.decide_all(&hit(&policies, &keys)).await.unwrap();
            if !decisions.iter().any(Decision::is_contended) {
                break decisions;
            }
            assert!(decisions.iter().all(|decision| !decision.has_spent()), "{decisions:?}");
        };
        if decisions.iter().all(Decision::is_admitted) {
            admitted.extend(order.into_iter().zip(chosen));
        } else {
            assert!(decisions.iter().all(|decision| !decision.has_spent()), "{decisions:?}");
            refused += 1;
        }
    }
    (admitted, refused)
}

#[test]
fn sixty_four_tasks_in_mixed_orders_are_exact_on_postgres() {
    let server = Postgres::start(&["log_lock_waits=off"]);
    // Rows that exist are locked, and rows of new keys are added.
    for _ in 0..2 {
        mixed_orders_are_exact(&server.url());
        assert_eq!(server.ask("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"), "0");
        assert!(RUNTIME.block_on(ready(&server.url()).clear_all()).unwrap() > 0);
    }
}

#[test]
fn sixty_four_tasks_in_mixed_orders_are_exact_behind_pgbouncer() {
    let server = Postgres::start(&[]);
    let pooler = PgBouncer::start(&server, 8);
    mixed_orders_are_exact(&pooler.url());
    assert_eq!(server.ask("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"), "0");
}

#[test]
fn sixty_four_tasks_in_mixed_orders_are_exact_on_etcd() {
    mixed_orders_are_exact(&Etcd::start(1).url());
}

#[test]
fn refused_hits_leave_every_count_as_it_was() {
    let (postgres, etcd) = (Postgres::start(&["synchronous_commit=off"]), Etcd::start(1));
    for url in [postgres.url(), etcd.url()] {
        let (storage, (policies, keys)) = (ready(&url), three([3, 1_000, 10_000]));
        RUNTIME.block_on(async {
            for _ in 0..3 {
                let decisions = storage.decide_all(&hit(&policies, &keys)).await.unwrap();
                assert!(decisions.iter().all(Decision::is_admitted), "{decisions:?}");
            }
            for _ in 0..1_000 {
                let decisions = storage.decide_all(&hit(&policies, &keys)).await.unwrap();
                assert!(decisions[0].is_refused() && decisions.iter().all(|decision| !decision.has_spent()));
            }
            assert_eq!(spent(&storage, &policies, &keys).await, [3, 3, 3]);
        });
    }
}

/// A hit without a reply is counted on all keys or on none. If the error is definite, it is counted on
/// none.
fn lost_replies_count_on_all_keys_or_none(server: &impl FaultyServer, url: impl Fn(u16) -> String) {
    let (direct, (policies, keys)) = (ready(&url(server.port())), three([1_000; 3]));
    let proxy = Proxy::start(server.port());
    let behind = with_timeout(&url(proxy.port()), Duration::from_secs(2)).parse::<AnyStorage>().unwrap();
    RUNTIME.block_on(async {
        let (mut counted, mut in_doubt) = (0, 0);
        for mode in [Mode::SwallowReplies, Mode::CutAtReply] {
            for replies in 0..5 {
                behind.ready(LONG).await.unwrap();
                let warmed = behind.decide_all(&hit(&policies, &keys)).await;
                let before = spent(&direct, &policies, &keys).await;
                proxy.set_after(replies, mode);
                let result = behind.decide_all(&hit(&policies, &keys)).await;
                proxy.set(Mode::Pass);
                proxy.cut();
                let after = spent(&direct, &policies, &keys).await;
                let added: Vec<_> = after.iter().zip(&before).map(|(after, before)| after - before).collect();
                let is_in_doubt = result.as_ref().is_err_and(tower_ratelimit::storage::StorageError::may_have_counted);
                let expected: &[u32] = match &result {
                    Ok(_) => &[1],
                    Err(_) if is_in_doubt => &[0, 1],
                    Err(_) => &[0],
                };
                assert!(
                    added.iter().all(|units| *units == added[0]) && expected.contains(&added[0]),
                    "{mode:?} after {replies} replies: {added:?}, {warmed:?}, {result:?}"
                );
                in_doubt += u32::from(is_in_doubt);
                counted += u32::from(is_in_doubt && added[0] == 1);
            }
        }
        assert!(in_doubt > 0 && counted > 0, "{in_doubt} in doubt, {counted} counted");
    });
}

#[test]
fn lost_replies_of_postgres_count_on_all_keys_or_none() {
    let server = Postgres::start(&[]);
    lost_replies_count_on_all_keys_or_none(&server, |port| {
        format!("postgres://postgres@127.0.0.1:{port}/postgres?connections=1")
    });
}

#[test]
fn lost_replies_of_etcd_count_on_all_keys_or_none() {
    lost_replies_count_on_all_keys_or_none(&Etcd::start(1), |port| format!("etcd://127.0.0.1:{port}"));
}

/// The statement is cancelled, so nothing is counted.
#[test]
fn locked_row_of_one_key_counts_on_no_key() {
    let server = Postgres::start(&[]);
    let ((policies, keys), direct) = (three([1_000; 3]), ready(&server.url()));
    let storage: AnyStorage = with_timeout(&server.url(), CANCELS).parse().unwrap();
    RUNTIME.block_on(async {
        storage.ready(LONG).await.unwrap();
        storage.decide_all(&hit(&policies, &keys)).await.unwrap();
    });
    let mut session = server.session();
    session.execute("BEGIN; SELECT * FROM tower_ratelimit WHERE key LIKE '%tenant%' FOR UPDATE");
    let error = RUNTIME.block_on(storage.decide_all(&hit(&policies, &keys))).unwrap_err();
    assert!(error.is_timeout() && !error.may_have_counted(), "{error:?}");
    drop(session);
    assert_eq!(RUNTIME.block_on(spent(&direct, &policies, &keys)), [1, 1, 1]);
    wait_until("hits succeed", || RUNTIME.block_on(storage.decide_all(&hit(&policies, &keys))).is_ok());
    assert_eq!(RUNTIME.block_on(spent(&direct, &policies, &keys)), [2, 2, 2]);
}

/// A text of another version of this crate fails the hit, and counts on no key. Other hits of the same
/// batch are not affected.
#[test]
fn text_of_an_unknown_version_counts_on_no_key() {
    let server = Postgres::start(&[]);
    let ((policies, mut keys), storage) = (three([1_000; 3]), ready(&server.url()));
    server.ask("INSERT INTO tower_ratelimit VALUES ('rl:tenant|t:umbrella', 'v2;new', 'infinity')");
    RUNTIME.block_on(async {
        let others = [Key::from("bob"), Key::from("acme"), Key::global()];
        let (members, other_members) = (hit(&policies, &keys), hit(&policies, &others));
        let (failed, other) = tokio::join!(storage.decide_all(&members), storage.decide_all(&other_members));
        let error = failed.unwrap_err();
        assert!(error.kind() == StorageErrorKind::Unsupported && !error.may_have_counted(), "{error:?}");
        assert!(other.unwrap().iter().all(Decision::is_admitted));
        keys[1] = Key::from("acme");
        assert_eq!(spent(&storage, &policies, &keys).await, [0, 1, 1]);
    });
    assert_eq!(server.ask("SELECT state FROM tower_ratelimit WHERE key = 'rl:tenant|t:umbrella'"), "v2;new");
}

/// Custom strategies, and a hit together with refunds of single keys.
#[test]
fn several_keys_settle_one_by_one() {
    let (postgres, etcd) = (Postgres::start(&[]), Etcd::start(1));
    for url in [postgres.url(), etcd.url()] {
        let (storage, (mut policies, keys)) = (ready(&url), three([1_000; 3]));
        policies[0] = foreign(1_000).with_name("user");
        RUNTIME.block_on(async {
            let mut tasks = JoinSet::new();
            for task in 0..16 {
                let (storage, policies, keys) = (storage.clone(), policies.clone(), keys.clone());
                tasks.spawn(async move {
                    let decisions = loop {
                        let decisions = storage.decide_all(&hit(&policies, &keys)).await.unwrap();
                        if decisions.iter().all(Decision::is_admitted) {
                            break decisions;
                        }
                        assert!(decisions.iter().all(Decision::is_contended), "{decisions:?}");
                    };
                    for (at, decision) in decisions.iter().enumerate() {
                        while let Err(error) = storage.settle(&policies[at], &keys[at], decision, task % 3).await {
                            assert_eq!(error.kind(), StorageErrorKind::Contended, "{error:?}");
                        }
                    }
                });
            }
            tasks.join_all().await;
            assert_eq!(spent(&storage, &policies, &keys).await, [15, 15, 15], "{url}");
        });
    }
}

#[test]
fn policies_that_do_not_fit_into_one_transaction_are_rejected() {
    let storage = EtcdStorage::new("etcd://127.0.0.1:1?long-logs=allow").unwrap();
    let policies = [policy("moving-window 50000/day"), policy("moving-window 50000/hour")];
    storage.validate_members(&policies[..1]).unwrap();
    let error = storage.validate_members(&policies).unwrap_err().to_string();
    assert!(error.contains("at most 1500000 in one step"), "{error}");
}

#[test]
fn memcached_decides_on_one_key_at_a_time() {
    let storage = MemcachedStorage::new("memcached://127.0.0.1:1").unwrap();
    let ((policies, keys), expected) = (three([5; 3]), "wrap it as `InOrder::new(storage)`");
    let error = storage.validate_members(&policies).unwrap_err().to_string();
    assert!(error.contains(expected), "{error}");
    let error = RUNTIME.block_on(storage.decide_all(&hit(&policies, &keys))).unwrap_err();
    assert!(error.kind() == StorageErrorKind::Unsupported && format!("{error:#}").contains(expected), "{error:#}");
}

/// The keys of a user, its tenant and all clients.
fn keys_of(user: u64) -> [Key; 3] {
    [Key::from(user), Key::from(user % 2), Key::global()]
}

/// Sequential hits are decided like together: a refused hit is refunded exactly.
fn hits_in_order_leave_exact_counts(storage: &AnyStorage) {
    let limits = [4, 9, 15];
    let (policies, _) = three(limits);
    let (mut numbers, mut counts) = (Numbers(0x2545_f491_4f6c_dd1d), [[0; 6]; 3]);
    RUNTIME.block_on(async {
        for step in 0..60 {
            let user = numbers.below(6);
            let places = [user, user % 2, 0].map(|place| usize::try_from(place).unwrap());
            let admits = (0..3).all(|at| counts[at][places[at]] < limits[at]);
            let decisions = storage.decide_all(&hit(&policies, &keys_of(user))).await.unwrap();
            assert_eq!(decisions.iter().all(Decision::is_admitted), admits, "step {step}: {decisions:?}");
            for at in 0..3 {
                counts[at][places[at]] += u32::from(admits);
                let remaining = limits[at] - counts[at][places[at]];
                assert_eq!(decisions[at].remaining(), remaining, "step {step}: {decisions:?}");
            }
        }
        assert_eq!(counts[2][0], 15);
    });
}

/// When all hits have ended, each key has spent the units of its admitted hits.
fn concurrent_hits_in_order_leave_exact_counts(storage: &AnyStorage) {
    let limits = [40, 90, 150];
    let (policies, _) = three(limits);
    RUNTIME.block_on(async {
        let mut tasks = JoinSet::new();
        for user in 0..6 {
            let (storage, policies) = (storage.clone(), policies.clone());
            tasks.spawn(async move {
                let mut admitted = 0;
                for _ in 0..60 {
                    let decisions = storage.decide_all(&hit(&policies, &keys_of(user))).await.unwrap();
                    admitted += u32::from(decisions.iter().all(Decision::is_admitted));
                }
                (user, admitted)
            });
        }
        let mut admitted = [0; 6];
        for (user, hits) in tasks.join_all().await {
            admitted[usize::try_from(user).unwrap()] = hits;
        }
        let of_tenant = |tenant: usize| admitted.iter().skip(tenant).step_by(2).sum::<u32>();
        for user in 0..6 {
            let place = usize::try_from(user).unwrap();
            let expected = [admitted[place], of_tenant(place % 2), admitted.iter().sum()];
            assert_eq!(spent(storage, &policies, &keys_of(user)).await, expected, "user {user}, {admitted:?} admitted");
            assert!(expected.iter().zip(limits).all(|(spent, limit)| *spent <= limit), "user {user}: {expected:?}");
        }
    });
}

#[test]
fn members_are_hit_in_order_on_memcached_and_on_a_cluster() {
    let (memcached, cluster) = (Memcached::start(&[]), Cluster::start());
    for url in [memcached.url(), cluster.url()] {
        for check in [hits_in_order_leave_exact_counts, concurrent_hits_in_order_leave_exact_counts] {
            check(&AnyStorage::new(InOrder::new(ready(&with_option(&url, "prefix", prefix())))));
        }
    }
}

/// The error of a lost reply to a later member says that the hit may have counted.
#[test]
fn lost_reply_to_a_later_member_may_have_counted() {
    let server = Memcached::start(&[]);
    let proxy = Proxy::start(server.port());
    let (direct, (policies, keys)) = (ready(&server.url()), three([9; 3]));
    let storage = InOrder::new(ready(&format!("memcached://127.0.0.1:{}", proxy.port())));
    // The first hit of a key loads it and stores it. The connection is cut at the second store, and at the
    // refund of the first one.
    proxy.set_after(3, Mode::CutAtReply);
    let error = RUNTIME.block_on(storage.decide_all(&hit(&policies, &keys))).unwrap_err();
    assert!(error.may_have_counted(), "{error:?}");
    assert_eq!(RUNTIME.block_on(spent(&direct, &policies, &keys)), [1, 1, 0]);
}

/// A peek changes nothing, so it does not wait for hits.
#[test]
fn peeks_at_several_keys_do_not_wait_for_a_locked_row() {
    let server = Postgres::start(&[]);
    let (storage, (policies, keys)) = (ready(&server.url()), three([9; 3]));
    let all = |op| {
        let mut members = hit(&policies, &keys);
        for member in &mut members {
            member.op = op;
        }
        storage.decide_all(&members)
    };
    assert!(RUNTIME.block_on(all(Op::Hit)).unwrap().iter().all(Decision::is_admitted));
    // A statement that waits delays those behind it on its connection.
    wait_until("all connections are open", || {
        RUNTIME.block_on(all(Op::Peek)).unwrap();
        server.backends().len() == 4
    });
    let mut session = server.session();
    session.execute("BEGIN; SELECT * FROM tower_ratelimit FOR UPDATE");
    let waiting = RUNTIME.spawn(all(Op::Hit));
    wait_until("the hit waits", || server.ask("SELECT count(*) FROM pg_locks WHERE NOT granted") != "0");
    let peeks = RUNTIME.block_on(all(Op::Peek)).unwrap();
    assert_eq!(peeks.iter().map(Decision::remaining).collect::<Vec<_>>(), [8; 3]);
    assert!(!waiting.is_finished());
    drop(session);
    assert!(RUNTIME.block_on(waiting).unwrap().unwrap().iter().all(Decision::is_admitted));
}
