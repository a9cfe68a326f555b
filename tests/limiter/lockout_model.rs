//! Random scripts against a lockout that follows the words of its rules, not the code.

use std::time::Duration;

use common::memory_with_manual_clock;
use common::random::Numbers;
use tower_ratelimit::storage::{Clock, ManualClock};
use tower_ratelimit::strategy::Status;
use tower_ratelimit::{
    Decision, FixedWindow, Key, LocalLimiter, Lockout, MemoryStorage, Policy, Quota, RateLimiter, Storage,
};

const SCRIPTS: u64 = 30_000;
const STEPS: u64 = 30;

/// A lockout, in microseconds. Without a state, the key is new.
struct Model {
    amount: u64,
    period: u64,
    first: u64,
    factor: u64,
    longest: u64,
    forget: u64,
    state: Option<Known>,
}

/// The start of the window or lock, its strikes, its level, and the first strike's instant.
#[derive(Clone, Copy)]
struct Known {
    start: u64,
    strikes: u64,
    level: u32,
    run: u64,
}

/// The data that a refund needs: the instant from which the hit is forgotten, and its run.
#[derive(Clone, Copy)]
struct Spent {
    forgotten: u64,
    run: u64,
}

impl Model {
    fn random(numbers: &mut Numbers) -> Self {
        let first = 1 + numbers.below(100);
        let longest = first + numbers.below(3) * numbers.below(400);
        Self {
            amount: 1 + numbers.below(4),
            period: 1 + numbers.below(60),
            first,
            factor: 1 + numbers.below(3),
            longest,
            forget: 1 + numbers.below(300),
            state: None,
        }
    }

    fn strategy(&self) -> Lockout {
        let factor = u32::try_from(self.factor).unwrap();
        Lockout::lasting(Duration::from_micros(self.first))
            .escalating(factor, Duration::from_micros(self.longest))
            .forgetting_after(Duration::from_micros(self.forget))
    }

    fn quota(&self) -> Quota {
        Quota::per(u32::try_from(self.amount).unwrap(), Duration::from_micros(self.period))
    }

    fn unbounded_length(&self, level: u32) -> u64 {
        self.first.saturating_mul(self.factor.saturating_pow(level))
    }

    fn end(&self, known: Known) -> u64 {
        let lock = self.unbounded_length(known.level).min(self.longest);
        known.start + if self.is_lock(known) { lock } else { self.period }
    }

    fn is_lock(&self, known: Known) -> bool {
        known.strikes >= self.amount
    }

    /// Returns the window or lock that is live, if any, and the level that is remembered.
    fn at(&self, now: u64) -> (Option<Known>, u32) {
        let Some(known) = self.state else { return (None, 0) };
        let end = self.end(known);
        if now < end {
            return (Some(known), known.level);
        }
        let is_longest = self.unbounded_length(known.level) >= self.longest;
        let level = known.level + u32::from(self.is_lock(known) && !is_longest);
        (None, if now < end + self.forget { level } else { 0 })
    }

    fn lock(&self, now: u64) -> Option<Known> {
        self.at(now).0.filter(|known| self.is_lock(*known))
    }

    fn remaining(&self, now: u64) -> u64 {
        self.amount - self.at(now).0.map_or(0, |known| known.strikes.min(self.amount))
    }

    /// Adds strikes to a window that is not locked, and returns the data that a refund needs.
    fn strike(&mut self, now: u64, strikes: u64) -> Spent {
        let (live, level) = self.at(now);
        let mut known = live.unwrap_or(Known { start: now, strikes: 0, level, run: now });
        known.strikes += strikes;
        if self.is_lock(known) {
            known.start = now;
        }
        self.state = Some(known);
        Spent { forgotten: self.end(known), run: known.run }
    }

    fn refund(&mut self, now: u64, spent: Spent, units: u64) {
        let Some(mut known) = self.at(now).0.filter(|known| known.run == spent.run && now < spent.forgotten) else {
            return;
        };
        known.strikes = known.strikes.saturating_sub(units);
        self.state = (known.strikes > 0 || known.level > 0).then_some(known);
    }
}

/// The parts of a decision that a client sees.
#[derive(Debug, PartialEq)]
struct Seen {
    is_admitted: bool,
    remaining: u64,
    retry: Option<u64>,
    lock: Option<(u32, u64)>,
}

fn seen(decision: &Decision) -> Seen {
    let micros = |wait: Duration| u64::try_from(wait.as_micros()).unwrap();
    Seen {
        is_admitted: decision.is_admitted(),
        remaining: decision.remaining().into(),
        retry: decision.retry_after().map(micros),
        lock: decision.statuses().iter().find_map(Status::lock).map(|it| (it.level(), micros(it.ends_after()))),
    }
}

struct Script {
    limiter: RateLimiter,
    clock: ManualClock,
    numbers: Numbers,
    now: u64,
}

impl Script {
    fn new(policy: Policy, numbers: Numbers) -> Self {
        let (storage, clock): (MemoryStorage, _) = memory_with_manual_clock();
        let now = clock.now().as_micros();
        Self { limiter: LocalLimiter::with_storage(policy, storage).into(), clock, numbers, now }
    }

    /// Passes a time that often ends at a boundary of `model`.
    fn pass(&mut self, model: &Model) {
        let to_the_end = model.at(self.now).0.map_or(model.forget, |known| model.end(known) - self.now);
        let micros = match self.numbers.below(8) {
            0..=2 => 0,
            3 => to_the_end,
            4 => to_the_end.saturating_sub(1),
            5 => model.forget,
            6 => self.numbers.below(500),
            _ => self.numbers.below(20),
        };
        self.now += micros;
        self.clock.advance(Duration::from_micros(micros));
    }
}

async fn by_hits(seed: u64) {
    let mut numbers = Numbers(seed);
    let mut model = Model::random(&mut numbers);
    let mut script = Script::new(Policy::new(model.strategy(), model.quota()), numbers);
    let key = Key::global();
    let mut hits: Vec<(Decision, Spent, u64)> = Vec::new();
    for _ in 0..STEPS {
        script.pass(&model);
        let now = script.now;
        let units = 1 + script.numbers.below(model.amount + 1);
        let cost = u32::try_from(units).unwrap();
        match script.numbers.below(12) {
            0..=5 => {
                let refusal = if units > model.amount {
                    Some(None)
                } else {
                    let end = model.at(now).0.map(|known| model.end(known) - now);
                    (units > model.remaining(now)).then_some(end)
                };
                let spent = refusal.is_none().then(|| model.strike(now, units));
                let decision = script.limiter.hit_with_cost(&key, cost).await.unwrap();
                let expected = Seen {
                    is_admitted: spent.is_some(),
                    remaining: model.remaining(now),
                    retry: refusal.flatten(),
                    lock: model.lock(now).map(|known| (known.level, model.end(known) - now)),
                };
                assert_eq!(seen(&decision), expected, "seed {seed}, a hit of {units} at {now}");
                hits.extend(spent.map(|spent| (decision, spent, units)));
            }
            6 | 7 => {
                let _ = script.limiter.charge(&key, cost).await.unwrap();
                if model.lock(now).is_none() {
                    model.strike(now, units);
                }
            }
            8..=10 if !hits.is_empty() => {
                let hit = usize::try_from(script.numbers.below(hits.len() as u64)).unwrap();
                let (decision, spent, cost) = hits.swap_remove(hit);
                let actual = script.numbers.below(cost + 2);
                let (policy, actual_cost) = (script.limiter.policy(), u32::try_from(actual).unwrap());
                script.limiter.storage().settle(&policy, &key, &decision, actual_cost).await.unwrap();
                if actual < cost {
                    model.refund(now, spent, cost - actual);
                } else if actual > cost && model.lock(now).is_none() {
                    model.strike(now, actual - cost);
                }
            }
            11 if script.numbers.below(4) == 0 => {
                script.limiter.clear(&key).await.unwrap();
                model.state = None;
            }
            _ => {
                let decision = script.limiter.peek(&key).await.unwrap();
                assert_eq!(u64::from(decision.remaining()), model.remaining(now), "seed {seed}, a peek at {now}");
            }
        }
    }
}

async fn by_refusals(seed: u64) {
    let mut numbers = Numbers(seed);
    let mut model = Model::random(&mut numbers);
    let (amount, period) = (1 + numbers.below(3), 1 + numbers.below(80));
    let other = Quota::per(u32::try_from(amount).unwrap(), Duration::from_micros(period));
    let policy = Policy::new(FixedWindow::new(), other).limit(model.strategy().by_refusals(), model.quota());
    let mut script = Script::new(policy, numbers);
    let key = Key::global();
    // The window of the other limit: its end and its count.
    let (mut end, mut count) = (0, 0);
    for _ in 0..STEPS {
        script.pass(&model);
        let now = script.now;
        if now >= end {
            count = 0;
        }
        let units = 1 + script.numbers.below(amount + 1);
        let is_locked = model.lock(now).is_some();
        let fits = count + units <= amount;
        if fits && !is_locked {
            end = if count == 0 { now + period } else { end };
            count += units;
        } else if !is_locked {
            model.strike(now, 1);
        }
        let lock = model.lock(now).map(|known| (known.level, model.end(known) - now));
        let waits = [(!fits).then(|| end.saturating_sub(now)), lock.map(|(_, wait)| wait)];
        let expected = Seen {
            is_admitted: fits && !is_locked,
            remaining: if lock.is_some() { 0 } else { amount - count },
            retry: waits.into_iter().flatten().max().filter(|_| units <= amount),
            lock,
        };
        let decision = script.limiter.hit_with_cost(&key, u32::try_from(units).unwrap()).await.unwrap();
        assert_eq!(seen(&decision), expected, "seed {seed}, a hit of {units} at {now}");
    }
}

#[tokio::test]
async fn lockout_decides_like_the_model() {
    for script in 1..=SCRIPTS {
        by_hits(script.wrapping_mul(0x9E37_79B9_7F4A_7C15)).await;
    }
}

#[tokio::test]
async fn lockout_by_refusals_decides_like_the_model() {
    for script in 1..=SCRIPTS {
        by_refusals(script.wrapping_mul(0x9E37_79B9_7F4A_7C15)).await;
    }
}
