//! Runs a policy on traffic: the real limiter on a storage with a manual clock.

use std::ops::Deref;
use std::time::Duration;

use tower_ratelimit::storage::{Clock, ManualClock};
use tower_ratelimit::{Decision, Key, LocalLimiter, MemoryStorage, Policy, Timestamp};

use crate::series::{Series, in_trailing_period};
use crate::setup::Checked;
use crate::traffic::{Hit, MAX_HITS, Traffic};

/// The number of instants at which the remaining units are read between hits.
const READINGS: u64 = 600;

/// The result of a policy on the traffic.
pub(crate) struct Lane {
    pub(crate) policy: Policy,
    pub(crate) hits: Hits,
    /// The curves of each limit, in the order of the policy.
    pub(crate) limits: Vec<Curves>,
}

/// The hits of a lane, in order.
#[derive(Default)]
pub(crate) struct Hits(Vec<Decided>);

/// A hit and its decision.
#[derive(Clone, Copy)]
pub(crate) struct Decided {
    pub(crate) hit: Hit,
    pub(crate) verdict: Verdict,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Admitted,
    /// Admitted after this number of microseconds.
    Delayed(u64),
    Refused,
}

/// The curves of a limit, for the first client.
pub(crate) struct Curves {
    pub(crate) remaining: Series,
    /// The hits that started within the trailing period of the limit.
    pub(crate) trailing: Series,
}

/// Runs all policies on the same traffic. Returns a lane for each.
pub(crate) fn lanes(setup: &Checked) -> Vec<Lane> {
    let traffic = setup.traffic.hits(setup);
    let mut lanes = Vec::new();
    for policy in &setup.policies {
        lanes.push(lane(policy, &traffic, setup));
    }
    lanes
}

fn lane(policy: &Policy, traffic: &[Hit], setup: &Checked) -> Lane {
    let mut run = Run::new(policy, setup);
    send(traffic, setup, |hit| retry_after(&run.hit(hit)));
    run.finish(setup.span)
}

/// Sends the hits of the traffic. `hit` makes a hit, and returns the wait of `Retry-After` in
/// microseconds if the hit is refused.
pub(crate) fn send(traffic: &[Hit], setup: &Checked, mut hit: impl FnMut(Hit) -> Option<u64>) {
    // The time by which the client of `Traffic::Retry` is late because of refusals.
    let (mut late, mut sent) = (0_u64, 0);
    for next in traffic {
        loop {
            let next = Hit { at: next.at.saturating_add(late), ..*next };
            if next.at >= setup.span || sent > MAX_HITS {
                break;
            }
            sent += 1;
            match hit(next).filter(|_| setup.traffic == Traffic::Retry) {
                Some(wait) => late = late.saturating_add(wait),
                None => break,
            }
        }
    }
}

/// Returns the wait of the header field `Retry-After` in microseconds, rounded up to whole seconds.
fn retry_after(decision: &Decision) -> Option<u64> {
    let wait = decision.retry_after()?;
    let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
    Some(seconds.saturating_mul(1_000_000))
}

struct Run {
    limiter: LocalLimiter,
    clock: ManualClock,
    start: Timestamp,
    keys: Vec<Key>,
    hits: Hits,
    remaining: Vec<Series>,
    readings: u64,
    /// The time between two readings.
    every: u64,
}

impl Run {
    fn new(policy: &Policy, setup: &Checked) -> Self {
        let clock = ManualClock::default();
        let storage = MemoryStorage::builder().clock(clock.clone()).build().expect("the defaults are valid");
        // A key's name is the number of its client.
        let keys = (0..crate::traffic::CLIENTS).map(|client| Key::from(u64::from(client))).collect();
        Self {
            limiter: LocalLimiter::with_storage(policy.clone(), storage),
            start: clock.now(),
            clock,
            keys,
            hits: Hits::default(),
            remaining: policy.limits().iter().map(|_| Series::default()).collect(),
            readings: 0,
            every: (setup.span / READINGS).max(1),
        }
    }

    fn hit(&mut self, hit: Hit) -> Decision {
        self.read_until(hit.at);
        self.clock.set(self.start.plus(hit.at));
        let decision = self.limiter.hit(&self.keys[usize::from(hit.client)]);
        let verdict = match decision.delay() {
            _ if decision.is_refused() => Verdict::Refused,
            Duration::ZERO => Verdict::Admitted,
            delay => Verdict::Delayed(u64::try_from(delay.as_micros()).unwrap_or(u64::MAX)),
        };
        self.hits.push(Decided { hit, verdict });
        if hit.client == 0 {
            self.record(hit.at, &decision);
        }
        decision
    }

    /// Reads the remaining units at regular times up to `end`.
    fn read_until(&mut self, end: u64) {
        while self.readings * self.every <= end {
            let at = self.readings * self.every;
            self.readings += 1;
            self.clock.set(self.start.plus(at));
            let decision = self.limiter.peek(&self.keys[0]);
            self.record(at, &decision);
        }
    }

    fn record(&mut self, at: u64, decision: &Decision) {
        for (series, status) in self.remaining.iter_mut().zip(decision.statuses()) {
            series.push(at, status.remaining());
        }
    }

    fn finish(mut self, span: u64) -> Lane {
        self.read_until(span);
        let policy = self.limiter.policy();
        let mut starts: Vec<u64> =
            self.hits.iter().filter(|it| it.hit.client == 0).filter_map(Decided::start).collect();
        starts.sort_unstable();
        let limits = policy.limits().iter().zip(self.remaining);
        let limits = limits
            .map(|(limit, remaining)| {
                let trailing = in_trailing_period(&starts, limit.quota().period_micros());
                Curves { remaining, trailing }
            })
            .collect();
        Lane { policy, hits: self.hits, limits }
    }
}

impl Decided {
    /// Returns the time at which the hit starts, or `None` if it is refused.
    pub(crate) fn start(&self) -> Option<u64> {
        match self.verdict {
            Verdict::Admitted => Some(self.hit.at),
            Verdict::Delayed(delay) => Some(self.hit.at.saturating_add(delay)),
            Verdict::Refused => None,
        }
    }
}

impl Deref for Hits {
    type Target = [Decided];

    fn deref(&self) -> &[Decided] {
        &self.0
    }
}

impl Hits {
    pub(crate) fn push(&mut self, decided: Decided) {
        self.0.push(decided);
    }

    fn count(&self, of: impl Fn(Verdict) -> bool) -> usize {
        self.iter().filter(|it| of(it.verdict)).count()
    }

    pub(crate) fn refused(&self) -> usize {
        self.count(|verdict| verdict == Verdict::Refused)
    }

    pub(crate) fn delayed(&self) -> usize {
        self.count(|verdict| matches!(verdict, Verdict::Delayed(_)))
    }

    /// Returns the number of admitted hits, including delayed ones.
    pub(crate) fn admitted(&self) -> usize {
        self.len() - self.refused()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::promise;
    use crate::setup::{Mode, Setup};

    fn run(setup: &Setup) -> Vec<Lane> {
        lanes(&setup.checked().unwrap())
    }

    #[test]
    fn greedy_client_is_admitted_as_often_as_the_guide_documents() {
        let guide = [
            ("fixed-window 100/minute", 199),
            ("sliding-window-counter 100/minute", 101),
            ("moving-window 100/minute", 100),
            ("elastic-window 100/minute", 99),
            ("lockout 100/minute for 1m", 99),
            ("token-bucket 100/minute burst 10", 13),
        ];
        for (policy, admitted) in guide {
            let times = (0..2_000_u64).map(|i| Hit { at: 59_000_000 + i * 1_000, client: 0 });
            let traffic: Vec<Hit> = [Hit { at: 0, client: 0 }].into_iter().chain(times).collect();
            let setup = Setup { mode: Mode::Policy, policy: policy.to_owned(), ..Setup::default() };
            let setup = setup.checked().unwrap();
            let lane = lane(&setup.policies[0], &traffic, &setup);
            assert_eq!(lane.hits.admitted(), admitted + 1, "{policy}");
        }
    }

    #[test]
    fn no_lane_exceeds_its_promise() {
        use Traffic::{Bursts, Greedy, Mixed, Poisson, Retry, Steady, Zipf};
        for traffic in [Mixed, Steady, Bursts, Greedy, Poisson, Zipf, Retry] {
            for policy in [
                "10/minute",
                "7/second burst 3",
                "fixed-window-aligned 5/minute",
                "leaky-bucket 9/minute queue 4",
                "lockout 3/minute for 25s x2 up to 50s",
                "calendar 4/month from 31 in America/Havana",
            ] {
                let setup = Setup { traffic, policy: policy.to_owned(), hits: Some(500), ..Setup::default() };
                for lane in run(&setup) {
                    let limit = &lane.policy.limits()[0];
                    let (most, promise) = (lane.limits[0].trailing.highest(), promise::of(limit).most.unwrap());
                    assert!(most <= promise, "{traffic:?} {limit}: {most} > {promise}");
                }
            }
        }
    }

    #[test]
    fn retrying_client_is_admitted_after_its_wait() {
        let setup = Setup { traffic: Traffic::Retry, hits: Some(40), ..Setup::default() };
        for lane in run(&setup) {
            assert!(lane.hits.refused() > 0 || lane.hits.delayed() > 0, "{}", lane.policy);
            let twice = lane.hits.windows(2).find(|two| two.iter().all(|it| it.verdict == Verdict::Refused));
            assert!(twice.is_none(), "{}: refused again at {:?}", lane.policy, twice.map(|two| two[1].hit));
        }
    }

    #[test]
    fn lockout_lane_has_locks_of_one_two_four_and_eight_periods() {
        let setup = Setup { traffic: Traffic::Steady, periods: 20, hits: Some(2_000), ..Setup::default() };
        let lanes = run(&setup);
        let lane = lanes.iter().find(|lane| lane.policy.to_string().starts_with("lockout")).unwrap();
        // A hit every 0.6 s: ten of them are admitted, and the tenth starts a lock.
        let locks = lane.hits.chunk_by(|a, b| a.start().is_none() == b.start().is_none());
        let locks: Vec<usize> = locks.map(<[Decided]>::len).collect();
        assert_eq!(locks, [10, 99, 10, 199, 10, 399, 10, 799, 10, 454]);
    }

    #[test]
    fn remaining_units_recover_between_hits() {
        let setup = Setup { traffic: Traffic::Mixed, ..Setup::default() };
        for lane in run(&setup) {
            let points = lane.limits[0].remaining.points();
            assert_eq!(points[0], (0, lane.policy.limits()[0].capacity()), "{}", lane.policy);
            assert!(points.is_sorted_by_key(|(at, _)| *at), "{}", lane.policy);
            let empty = points.iter().position(|(_, remaining)| *remaining == 0).unwrap();
            assert!(points[empty..].iter().any(|(_, remaining)| *remaining > 5), "{}", lane.policy);
        }
    }
}
