//! Custom strategies with scripts, which do not interfere with others.

use common::policy;
use common::servers::storage::{RUNTIME, on};
use common::servers::{Reply, Server};
use futures_util::future::join_all;
use tower_ratelimit::storage::{ManualClock, RedisStorage, StorageRequest};
use tower_ratelimit::strategy::{Hit, Script, State, Status, Strategy};
use tower_ratelimit::{FixedWindow, Key, Limit, MovingWindow, Op, Policy, Quota, Storage, Timestamp, TokenBucket};

use super::{connected, ready};

/// Another strategy under a new name, with another script.
#[derive(Debug)]
struct Renamed<S> {
    name: &'static str,
    strategy: S,
    script: Option<Script>,
}

impl<S: Strategy> Strategy for Renamed<S> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn check(&self, quota: &Quota, state: &State, now: Timestamp, cost: u32) -> Status {
        self.strategy.check(quota, state, now, cost)
    }

    fn spend(&self, quota: &Quota, state: &mut State, now: Timestamp, cost: u32) -> u64 {
        self.strategy.spend(quota, state, now, cost)
    }

    fn refund(&self, quota: &Quota, state: &mut State, now: Timestamp, hit: &Hit, units: u32) {
        self.strategy.refund(quota, state, now, hit, units);
    }

    fn log_entries(&self, quota: &Quota) -> u32 {
        self.strategy.log_entries(quota)
    }

    fn script(&self, quota: &Quota, now: Timestamp, cost: u32) -> Option<Script> {
        let ours = self.strategy.script(quota, now, cost)?;
        Some(self.script.clone().map_or(ours.clone(), |script| Script { arguments: ours.arguments, ..script }))
    }
}

/// The script of a fixed window whose functions begin with this name.
macro_rules! lua {
    ($name:literal) => {
        concat!(
            "function ",
            $name,
            "_hit(now, cost, till, count, anchor, amount, period)
               if count == 0 or till <= now then
                 till, count, anchor = now + period, 0, now % 4294967296
               end
               if count + cost <= amount then
                 return till, count + cost, anchor, 0
               end
             end
             function ",
            $name,
            "_charge(now, cost, till, count, anchor, amount, period)
               if count == 0 or till <= now then
                 till, count, anchor = now + period, 0, now % 4294967296
               end
               return till, math.min(count + cost, 4294967295), anchor
             end
             function ",
            $name,
            "_refund(now, cost, till, count, anchor, hit)
               if till == hit.till and anchor == hit.anchor then
                 return till, count - cost, anchor
               end
             end\n"
        )
    };
}

fn limit(name: &'static str, sources: &'static [&'static str], delays: bool) -> Limit {
    let script = Some(Script { name, sources, arguments: Vec::new(), delays });
    Limit::new(Renamed { name, strategy: FixedWindow::new(), script }, Quota::per_day(3))
}

/// Makes a hit, refunds it, and returns the number of admitted hits out of five more.
fn admitted(storage: &RedisStorage, policy: &Policy) -> usize {
    let hit = || RUNTIME.block_on(storage.decide(StorageRequest::new(policy, &Key::from("k"), Op::Hit, 1))).unwrap();
    let first = hit();
    RUNTIME.block_on(storage.settle(policy, &Key::from("k"), &first, 0)).unwrap();
    (0..5).filter(|_| hit().is_admitted()).count()
}

#[test]
fn comments_that_look_like_markers_do_not_change_a_script() {
    let server = Server::start(&[]);
    let sources: [&'static [&'static str]; 3] = [
        &[concat!("-- Mine.\n-- each hit counts once\n", lua!("mine"))],
        &[concat!("--[[ Mine.\n-- done\n]]\n", lua!("mine"))],
        &["-- $ and DIGEST$\n", lua!("mine")],
    ];
    for sources in sources {
        let storage = on(&server, ManualClock::default());
        assert_eq!(admitted(&storage, &limit("mine", sources, false).into()), 3, "{sources:?}");
    }
}

#[test]
fn custom_strategy_name_may_be_the_end_of_a_built_in_name() {
    let server = Server::start(&[]);
    let bucket = || limit("bucket", &[lua!("bucket")], false);
    let token = || Limit::new(TokenBucket::new(), Quota::per_day(9));
    for policy in [Policy::from(bucket()).with(token()), Policy::from(token()).with(bucket())] {
        assert_eq!(admitted(&on(&server, ManualClock::default()), &policy), 3, "{policy}");
    }
}

#[test]
fn strategies_with_the_same_name_keep_their_own_scripts() {
    let server = Server::start(&[]);
    let storage = on(&server, ManualClock::default());
    let sources: &'static [&'static str] = &[lua!("mine")];
    for (name, delays) in [("a", false), ("b", true), ("c", false)] {
        assert_eq!(admitted(&storage, &Policy::from(limit("mine", sources, delays)).with_name(name)), 3);
    }
    let moving = Renamed { name: "logged", strategy: MovingWindow::new(), script: None };
    for policy in [Policy::new(moving, Quota::per_day(3)), policy("moving-window 3/day")] {
        assert_eq!(admitted(&storage, &policy), 3, "{policy}");
    }
}

#[test]
fn strategy_whose_name_is_not_an_identifier_runs_without_a_script() {
    let server = Server::start(&[]);
    for name in ["1st", "a.b", "a_b", "a b"] {
        let storage = on(&server, ManualClock::default());
        assert_eq!(admitted(&storage, &limit(name, &["not even Lua"], false).into()), 3, "{name}");
    }
}

#[test]
fn policy_can_have_sixteen_custom_strategies() {
    let server = Server::start(&[]);
    macro_rules! limits {
        ($($name:literal)*) => { [$(limit($name, &[concat!("local own = 1\n", lua!($name))], false)),*] };
    }
    let limits = limits!("a" "b" "c" "d" "e" "f" "g" "h" "i" "j" "k" "l" "m" "n" "o" "p");
    for count in 1..=limits.len() {
        let policy = limits[1..count].iter().cloned().fold(Policy::from(limits[0].clone()), Policy::with);
        assert_eq!(admitted(&on(&server, ManualClock::default()), &policy), 3, "{count}");
    }
}

#[test]
fn error_of_a_script_is_reported_and_counts_nothing() {
    let server = Server::start(&[]);
    let broken = limit("broken", &["function broken_hit() error('OH no') end\n"], false);
    let (storage, key) = (on(&server, ManualClock::default()), Key::from("k"));
    let decided = RUNTIME.block_on(storage.decide(StorageRequest::new(&broken.into(), &key, Op::Hit, 1)));
    let error = decided.unwrap_err();
    assert!(
        format!("{error:#}").contains(" refused the command: ") && format!("{error:#}").contains("OH no"),
        "{error}"
    );
    assert!(!error.may_have_counted() && std::error::Error::source(&error).is_some());
}

#[tokio::test]
async fn hits_with_a_wrong_delay_fail_and_count_nothing() {
    let server = Server::start(&[]);
    let storage = connected(&server, ManualClock::default()).await;
    let sources: &'static [&'static str] = &["function late_hit(now, cost, till, count, anchor, amount, period)
          return now + period, count + cost, 0, 'soon'
        end\n"];
    let policy = Policy::from(limit("late", sources, true));
    let hit = |client: u64| storage.decide(StorageRequest::new(&policy, &Key::from(client), Op::Hit, 1));
    for error in join_all((0..40).map(hit)).await.into_iter().map(Result::unwrap_err) {
        assert!(!error.may_have_counted(), "{error:#}");
    }
    assert_eq!(server.ask(&["DBSIZE"]), Reply::Text("0".to_owned()));
}

#[tokio::test]
async fn hit_whose_script_fails_does_not_fail_those_in_the_same_call() {
    let server = Server::start(&[]);
    let storage = connected(&server, ManualClock::default()).await;
    let sources: &'static [&'static str] = &["function moody_hit(now, cost, till, count, anchor, amount, period)
          if amount == 13 then
            error('OH no')
          end
          return now + period, count + cost, 0, 0
        end\n"];
    let policy = |amount| {
        let script = Some(Script { name: "moody", sources, arguments: Vec::new(), delays: false });
        let strategy = Renamed { name: "moody", strategy: FixedWindow::new(), script };
        Policy::from(Limit::new(strategy, Quota::per_day(amount))).with_name(amount.to_string())
    };
    let (good, bad, key) = (policy(12), policy(13), Key::from("k"));
    let policies: Vec<&Policy> = (0..40).map(|number| if number % 10 == 9 { &bad } else { &good }).collect();
    let hits = policies.iter().map(|policy| storage.decide(StorageRequest::new(policy, &key, Op::Hit, 1)));
    ready(&storage).await;
    let before = server.calls("evalsha");
    let decided = join_all(hits).await;
    let mut remaining = Vec::new();
    for (policy, result) in policies.into_iter().zip(decided) {
        match result {
            Ok(decision) => remaining.push(decision.remaining()),
            Err(error) => {
                assert!(format!("{error:#}").contains("OH no") && !error.may_have_counted(), "{error:#}");
                assert!(std::ptr::eq(policy, &raw const bad));
            }
        }
    }
    remaining.sort_unstable();
    let expected: Vec<u32> = std::iter::repeat_n(0, 36 - 12).chain(0..12).collect();
    assert_eq!(remaining, expected);
    assert!(server.calls("evalsha") - before < 20);
}
