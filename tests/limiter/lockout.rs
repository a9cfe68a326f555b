//! The strategy lockout.

use std::time::Duration;

use common::{memory_with_manual_clock, now, panic_message, policy};
use tower_ratelimit::strategy::Status;
use tower_ratelimit::{
    Decision, FixedWindow, Global, Key, Limit, LocalLimiter, Lockout, MemoryStorage, Policy, Quota, RateLimitLayer,
    RateLimiter,
};

const MINUTE: Duration = Duration::from_secs(60);
const DAY: Duration = Duration::from_secs(86_400);

fn lock(decision: &Decision) -> Option<(u32, Duration, bool)> {
    decision.statuses().iter().find_map(Status::lock).map(|lock| (lock.level(), lock.ends_after(), lock.is_new()))
}

#[test]
fn text_and_builder_describe_the_same_lockout() {
    let lockout = Lockout::lasting(15 * MINUTE);
    for (text, lockout) in [
        ("lockout 5/10 minutes for 15 minutes", lockout),
        ("lockout 5/10 minutes for 15 minutes x2 up to 1 day", lockout.escalating(2, DAY)),
        ("lockout 5/10 minutes for 15 minutes x1 up to 1 day", lockout.escalating(1, DAY)),
        ("lockout 5/10 minutes for 15 minutes forget 7 days", lockout.forgetting_after(7 * DAY)),
        (
            "lockout 5/10 minutes for 15 minutes x3 up to 1 day forget 1 week",
            lockout.escalating(3, DAY).forgetting_after(7 * DAY),
        ),
    ] {
        let quota = Quota::per(5, 10 * MINUTE);
        assert_eq!(Policy::new(lockout, quota), policy(text), "{text}");
        let text = text.replace("7 days", "1 week");
        assert_eq!(policy(&text).to_string(), text);
        let by_refusals = text.replace("5/10", "5 refusals/10");
        let all = Policy::from(Quota::per_second(10)).limit(lockout.by_refusals(), quota);
        assert_eq!(all.to_string(), format!("sliding-window-counter 10/second; {by_refusals}"));
        assert_eq!(policy(&all.to_string()), all);
    }
    let short = policy("LOCKOUT 5/10m for 15m X2 Up To 1d FORGET 7d");
    assert_eq!(short, policy("lockout 5 per 10 minutes for 15 minutes x2 up to 1 day forget 7 days"));
    assert_eq!(policy("lockout 5/m for h").to_string(), "lockout 5/minute for 1 hour");
}

#[test]
fn errors_say_what_to_write() {
    for (text, expected) in [
        ("lockout 5/10m", "did you mean \"lockout 5/10m for 15 minutes\"?"),
        ("ban 5/10m", "did you mean \"lockout 5/10m for 15 minutes\"?"),
        ("lockuot 5/10m for 1h", "did you mean \"lockout 5/10m for 1h\"?"),
        ("lockout 5/10m for 1h up to 1d", "expected a factor before \"up to\", as in \"x2 up to 1 day\""),
        ("lockout 5/10m for 1h x2", "expected \"up to\" and the duration of the longest lock"),
        ("lockout 5/10m for 1h x up to 1d", "expected a number after \"x\", as in \"x2 up to 1 day\""),
        ("lockout 5/10m for 1h x0 up to 1d", "the factor of the lockout \"0\""),
        ("lockout 5/10m for 1d x2 up to 1h", "the longest lock of 1 hour is shorter than the first one of 1 day: swap"),
        ("lockout 5/10m for 0s", "the duration of the lock \"0\""),
        ("lockout 5/10m for 101 years", "a lock must last for at most 100 years"),
        ("lockout 5/10m burst 9 for 1h", "remove \"burst 9\""),
        ("lockout 5 refusals/10m for 1h", "the first limit and shadow limits cannot count the refusals of others"),
        ("9/m; shadow lockout 5 refusals/10m for 1h", "the first limit and shadow limits cannot count the refusals"),
    ] {
        let error = text.parse::<Policy>().unwrap_err().to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
    let alone = Policy::try_new(Lockout::lasting(MINUTE).by_refusals(), Quota::per_minute(3)).unwrap_err();
    assert_eq!(
        alone.to_string(),
        "\"lockout 3 refusals/minute for 1 minute\" counts the refusals of other limits: put another limit before it, \
         for example \"10/second; lockout 3 refusals/minute for 1 minute\""
    );
}

/// Guards against this defect: such a policy is accepted, and never locks.
#[test]
fn policy_without_a_limit_that_refuses_is_an_error() {
    let by_refusals = || Limit::new(Lockout::lasting(MINUTE).by_refusals(), Quota::per_minute(3));
    let alone = Policy::from(by_refusals());
    let two = Policy::named("login").with(by_refusals()).with(by_refusals());
    for policy in [alone.clone(), two] {
        let error = RateLimiter::try_with_storage(policy, MemoryStorage::new()).unwrap_err();
        assert!(error.to_string().contains("put another limit before it"), "{error}");
    }
    let layer = alone.clone();
    for build in [
        Box::new(|| drop(RateLimitLayer::new(layer, Global::new()))) as Box<dyn FnOnce()>,
        Box::new(|| drop(LocalLimiter::new(alone))),
    ] {
        let message = panic_message(build);
        assert!(message.contains("put another limit before it"), "{message}");
    }
    // The order of the limits does not matter.
    let _ = RateLimiter::new(Policy::from(by_refusals()).limit(FixedWindow::new(), Quota::per_second(10)));
}

/// Guards against this defect: such a lockout is accepted, and never locks.
#[test]
#[should_panic(expected = "a shadow limit is decided alone")]
fn shadow_limit_cannot_count_refusals() {
    let by_refusals = Limit::new(Lockout::lasting(MINUTE).by_refusals(), Quota::per_minute(3));
    let _ = Policy::from(Quota::per_second(1)).shadow(by_refusals);
}

#[test]
#[should_panic(expected = "the longest lock of 1 minute is shorter than the first one of 2 minutes")]
fn longest_lock_that_is_shorter_panics() {
    let _ = Lockout::lasting(2 * MINUTE).escalating(2, MINUTE);
}

#[test]
fn status_has_the_level_and_the_end_of_the_lock() {
    let (storage, clock) = memory_with_manual_clock();
    let limiter = RateLimiter::with_storage(policy("lockout 2/minute for 10m x2 up to 1d"), storage);
    let alice = Key::from("alice");
    let hit = || now(limiter.hit(&alice));
    for (level, minutes) in [(0, 10), (1, 20), (2, 40)] {
        assert_eq!(lock(&hit()), None);
        assert_eq!(lock(&hit()), Some((level, minutes * MINUTE, true)));
        clock.advance(MINUTE);
        for decision in [hit(), now(limiter.peek(&alice)), now(limiter.charge(&alice, 5))] {
            assert_eq!(lock(&decision), Some((level, (minutes - 1) * MINUTE, false)));
        }
        clock.advance((minutes - 1) * MINUTE);
    }
    now(limiter.clear(&alice));
    let charged = now(limiter.charge(&alice, 2));
    assert_eq!(lock(&charged), Some((0, 10 * MINUTE, false)));
    assert_eq!(charged.new_lock(), None, "a charge starts a lock without reporting it");
}

#[test]
fn refund_of_the_hit_that_began_a_lock_ends_it() {
    let (storage, _) = memory_with_manual_clock();
    let limiter = RateLimiter::with_storage(policy("lockout 2/minute for 10m x2 up to 1d"), storage);
    let alice = Key::from("alice");
    let _ = now(limiter.hit(&alice));
    let last = now(limiter.reserve(&alice, 1));
    assert!(lock(&last).is_some_and(|(.., is_new)| is_new));
    assert!(now(limiter.hit(&alice)).is_refused());
    drop(last.refund());
    assert_eq!(now(limiter.peek(&alice)).remaining(), 1);
    assert_eq!(lock(&now(limiter.hit(&alice))).map(|(level, ..)| level), Some(0), "the undone lock does not count");
}

#[test]
fn refusals_of_other_limits_are_strikes() {
    let (storage, clock) = memory_with_manual_clock();
    let limiter = RateLimiter::with_storage(policy("fixed-window 1/second; lockout 3 refusals/minute for 1h"), storage);
    let alice = Key::from("alice");
    assert!(now(limiter.hit(&alice)).is_admitted());
    for remaining in [2, 1] {
        let refused = now(limiter.hit(&alice));
        assert_eq!((refused.is_refused(), refused.statuses()[1].remaining()), (true, remaining));
        assert_eq!(refused.retry_after(), Some(Duration::from_secs(1)));
        assert_eq!((refused.capacity(), lock(&refused)), (1, None));
    }
    let last = now(limiter.hit(&alice));
    assert_eq!(lock(&last), Some((0, 60 * MINUTE, true)));
    assert_eq!(last.retry_after(), Some(60 * MINUTE));
    clock.advance(MINUTE);
    let locked = now(limiter.hit(&alice));
    assert_eq!((lock(&locked), locked.capacity()), (Some((0, 59 * MINUTE, false)), 1));
    clock.advance(59 * MINUTE);
    assert!(now(limiter.hit(&alice)).is_admitted());
}

/// A change of the amount neither ends nor lengthens a lock.
#[test]
fn changed_amount_does_not_end_a_lock() {
    let (storage, clock) = memory_with_manual_clock();
    let limiter = |text: &str| RateLimiter::with_storage(policy(text).with_name("login"), storage.clone());
    let (before, alice) = (limiter("lockout 2/minute for 10m"), Key::from("alice"));
    for _ in 0..2 {
        assert!(now(before.hit(&alice)).is_admitted());
    }
    for text in ["lockout 9/minute for 10m", "lockout 1/minute for 10m"] {
        let refused = now(limiter(text).hit(&alice));
        assert_eq!((refused.is_refused(), lock(&refused)), (true, Some((0, 10 * MINUTE, false))), "{text}");
    }
    clock.advance(10 * MINUTE);
    assert!(now(limiter("lockout 9/minute for 10m").hit(&alice)).is_admitted());
}

#[test]
fn refused_reservation_can_clear_the_key() {
    let (storage, _) = memory_with_manual_clock();
    let limiter = RateLimiter::with_storage(policy("lockout 1/minute for 10m x2 up to 1d"), storage);
    let alice = Key::from("alice");
    assert!(now(limiter.hit(&alice)).is_admitted());
    let refused = now(limiter.reserve(&alice, 1));
    assert!(refused.is_refused());
    drop(refused.clear());
    assert_eq!(lock(&now(limiter.hit(&alice))), Some((0, 10 * MINUTE, true)));
}

/// A lock stores its end together with the time for which its level is remembered.
#[test]
fn changed_times_of_a_lockout_apply_to_a_running_lock() {
    for (before, after, minutes) in [
        // The lock keeps its end.
        ("for 10m", "for 1h", 10),
        ("for 10m x2 up to 1d", "for 1h x2 up to 1d", 10),
        // But it lasts at most for the new duration.
        ("for 1h", "for 10m", 10),
        ("for 1h x2 up to 1d", "for 10m x3 up to 1d", 10),
        // It ends earlier by the time that is added to the memory of its level, and later by the
        // time that is taken away.
        ("for 10m forget 5m", "for 10m x2 up to 1d", 0),
        ("for 10m x2 up to 1d forget 5m", "for 10m x2 up to 1d forget 9m", 6),
        ("for 10m x2 up to 1d forget 9m", "for 10m x2 up to 1d forget 5m", 10),
        ("for 10m x2 up to 20m", "for 10m x2 up to 24m", 6),
    ] {
        let (storage, clock) = memory_with_manual_clock();
        let limiter = |times: &str| {
            RateLimiter::with_storage(policy(&format!("lockout 2/minute {times}")).with_name("login"), storage.clone())
        };
        let alice = Key::from("alice");
        for _ in 0..2 {
            assert!(now(limiter(before).hit(&alice)).is_admitted());
        }
        let decision = now(limiter(after).hit(&alice));
        let wait = Some(minutes * MINUTE).filter(|wait| !wait.is_zero());
        assert_eq!(decision.retry_after(), wait, "{before}, then {after}");
        clock.advance(minutes * MINUTE);
        assert!(now(limiter(after).peek(&alice)).is_admitted(), "{before}, then {after}");
    }
}

#[test]
fn strikes_above_a_lowered_number_of_refusals_do_not_count_as_units() {
    let (storage, _) = memory_with_manual_clock();
    let limiter = |refusals: u32| {
        let text = format!("fixed-window 9/second; lockout {refusals} refusals/minute for 1h");
        RateLimiter::with_storage(policy(&text).with_name("api"), storage.clone())
    };
    let alice = Key::from("alice");
    for _ in 0..3 {
        assert!(now(limiter(5).hit_with_cost(&alice, 10)).is_refused());
    }
    let decision = now(limiter(2).hit(&alice));
    assert_eq!((decision.is_admitted(), decision.remaining(), lock(&decision)), (true, 8, None));
    let decision = now(limiter(2).hit_with_cost(&alice, 10));
    assert_eq!(lock(&decision), Some((0, 60 * MINUTE, true)));
}

/// The locks end before the windows of the new keys, which would otherwise be evicted later.
#[test]
fn locked_keys_are_not_evicted_by_new_keys() {
    for text in ["lockout 2/hour for 1m", "lockout 2/hour for 1m x2 up to 4m", "lockout 2/minute for 10m"] {
        let clock = tower_ratelimit::storage::ManualClock::default();
        let storage = MemoryStorage::builder().max_bytes(1 << 16).clock(clock).build().unwrap();
        let limiter = RateLimiter::with_storage(policy(text), storage.clone());
        let locked = || (0..100_u64).map(|number| Key::from(format!("locked {number}")));
        for key in locked() {
            for _ in 0..2 {
                assert!(now(limiter.hit(&key)).is_admitted());
            }
        }
        for number in 0..20_000_u64 {
            let _ = now(limiter.hit(&Key::from(number)));
        }
        assert!(storage.stats().evicted > 10_000);
        assert!(locked().all(|key| now(limiter.hit(&key)).is_refused()), "{text}");
    }
}
