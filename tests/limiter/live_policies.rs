//! Live policies that change together or not at all.

use std::thread;

use common::{FakeStorage, now, policy};
use tower_ratelimit::{Key, LivePolicy, MemoryStorage, Policy, RateLimiter};

fn named(name: &str, amount: u32) -> Policy {
    policy(&format!("fixed-window {amount}/minute")).with_name(name)
}

/// Returns two live policies of this amount.
fn two(amount: u32) -> (LivePolicy, LivePolicy) {
    (LivePolicy::new(named("api", amount)), LivePolicy::new(named("login", amount)))
}

fn amount(live: &LivePolicy) -> u32 {
    live.get().limits()[0].capacity()
}

/// Returns a limiter whose storage rejects policies with a larger capacity.
fn small_limiter(live: &LivePolicy, capacity: u32) -> RateLimiter {
    RateLimiter::with_storage(live.clone(), FakeStorage::around(MemoryStorage::new()).holding_at_most(capacity))
}

#[test]
fn policies_of_several_limiters_change_together() {
    let (api, login) = two(10);
    let limiters = [small_limiter(&api, 100), small_limiter(&login, 100)];
    LivePolicy::set_all([(&api, named("api", 20)), (&login, named("login", 5))]).unwrap();
    let capacities = limiters.each_ref().map(|limiter| now(limiter.peek(&Key::from("alice"))).capacity());
    assert_eq!(capacities, [20, 5]);
    LivePolicy::set_all([(&api, &login)].map(|(live, other)| (live, other.get()))).unwrap();
    assert_eq!(amount(&api), 5);
    LivePolicy::set_all::<Policy>([]).unwrap();
}

#[test]
fn no_policy_changes_if_a_storage_cannot_keep_one() {
    let (api, login) = two(10);
    let _limiters = [small_limiter(&api, 20), small_limiter(&login, 100)];
    let changes = |api_amount, login_amount| [(&api, named("api", api_amount)), (&login, named("login", login_amount))];
    let [api_change, login_change] = changes(21, 30);
    for changes in [[api_change.clone(), login_change.clone()], [login_change, api_change]] {
        let error = LivePolicy::set_all(changes).unwrap_err();
        assert_eq!(error.to_string(), "cannot change the policy \"api\": at most 20");
        assert_eq!((amount(&api), amount(&login)), (10, 10));
    }
    LivePolicy::set_all(changes(20, 30)).unwrap();
    assert_eq!((amount(&api), amount(&login)), (20, 30));
}

#[test]
fn same_live_policy_cannot_be_set_twice_at_once() {
    let (api, login) = two(10);
    let error =
        LivePolicy::set_all([(&api, named("api", 20)), (&login, named("login", 20)), (&api.clone(), named("api", 30))]);
    let expected = "the live policy \"api\" is in the list twice: keep one of its new policies";
    assert_eq!(error.unwrap_err().to_string(), expected);
    assert_eq!((amount(&api), amount(&login)), (10, 10));
}

/// Two calls that lock the same policies in different orders must not wait for each other, and the
/// policies of the calls must not mix.
#[test]
fn concurrent_calls_do_not_mix() {
    let (api, login) = two(1);
    for round in 1..2_000 {
        thread::scope(|scope| {
            let set = |forward: bool, amount| {
                let (api, login) = (&api, &login);
                let mut changes = vec![(api, named("api", amount)), (login, named("login", amount))];
                if !forward {
                    changes.reverse();
                }
                scope.spawn(move || LivePolicy::set_all(changes).unwrap());
            };
            set(true, 2 * round);
            set(false, 2 * round + 1);
            scope.spawn(|| drop(small_limiter(&api, u32::MAX)));
        });
        assert_eq!(amount(&api), amount(&login));
        assert_eq!(amount(&api) / 2, round);
    }
}
