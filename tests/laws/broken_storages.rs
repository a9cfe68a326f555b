//! Storages with one fault each: the suite reports the law that each breaks.

use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::assert_each_breaks;
use common::fake_cas_store::{FakeCasStore, Fault};
use tokio::task::yield_now;
use tower_ratelimit::storage::{Cas, Clock, ManualClock, StorageRequest};
use tower_ratelimit::strategy::{Log, State, Status};
use tower_ratelimit::testing::{CasLaws, StorageLaws};
use tower_ratelimit::{BoxError, Decision, Key, Op, Policy, Storage, Timestamp};

/// The fault of a storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrong {
    Nothing,
    /// Overwrites what others have stored since it loaded.
    LosesUpdates,
    /// The same, once in a thousand decisions.
    LosesAnUpdateInAThousand,
    /// Checks and spends in two steps.
    ChecksThenWrites,
    /// Fails when another process was faster.
    FailsWhenOutrun,
    TakesOneForAll,
    ChargesForFreeHits,
    SpendsInPeeks,
    /// Takes from the first limits although the last refuses.
    TakesBeforeItRefuses,
    ForgetsALittleEarly,
    ForgetsByAnotherClock,
    /// Forgets a state in the millisecond in which 2^32 microseconds of it are left.
    ForgetsAtAPowerOfTwo,
    /// The same when it was stored so long ago.
    ForgetsAtAnAgeOfAPowerOfTwo,
    /// Keeps the newest 64 entries of a log.
    CutsLogs,
    /// Its time is in milliseconds.
    CountsMillis,
    ReadsTheMachinesClock,
    /// Takes states that are ahead of its clock for garbage.
    DistrustsTheFuture,
    SharesKeys,
    /// Keeps 32 bits of a hash of each key.
    HashesKeys,
    IgnoresCase,
    SharesPolicies,
    TellsNoStrategiesApart,
    ClearsNothing,
    ClearsEverybody,
    RefundsNothing,
    RefundsAll,
    RefundsWhatIsForgotten,
    KeepsFourLimits,
    RoundsInstants,
    /// Returns a `retry_after` that is a microsecond too long for costs above 3.
    RoundsLongWaitsUp,
    /// Keeps no state that a refusal has changed.
    StoresNoRefusals,
    /// Keeps 16 bits of the second amount of a bucket.
    CutsAmounts,
    /// Gives the reply of a dropped caller to the next one.
    AnswersWhoComesNext,
}

type Name = (String, String, u32);

/// A map, the pure function and one fault.
#[derive(Clone, Debug)]
struct Broken {
    wrong: Wrong,
    clock: ManualClock,
    states: Arc<Mutex<HashMap<Name, (State, Instant)>>>,
    /// Held during a decision.
    step: Arc<Mutex<()>>,
    replies: Arc<Mutex<VecDeque<Decision>>>,
    decisions: Arc<AtomicU32>,
}

impl Broken {
    fn now(&self) -> Timestamp {
        match self.wrong {
            Wrong::CountsMillis => Timestamp::from_micros(self.clock.now().as_micros() / 1_000),
            Wrong::ReadsTheMachinesClock => Timestamp::wall_clock(),
            _ => self.clock.now(),
        }
    }

    fn names(&self, policy: &Policy, key: &Key) -> Vec<Name> {
        let key = match self.wrong {
            Wrong::SharesKeys => String::new(),
            Wrong::HashesKeys => {
                let mut hasher = DefaultHasher::new();
                key.hash(&mut hasher);
                (hasher.finish() >> 32).to_string()
            }
            Wrong::IgnoresCase => key.to_string().to_lowercase(),
            _ => key.to_string(),
        };
        let name = if self.wrong == Wrong::SharesPolicies { String::new() } else { policy.identity().to_owned() };
        let digest = |(position, digest): (usize, &u32)| match self.wrong {
            Wrong::TellsNoStrategiesApart => u32::try_from(position).unwrap(),
            _ => *digest,
        };
        policy.limit_digests().iter().enumerate().map(|each| (name.clone(), key.clone(), digest(each))).collect()
    }

    fn load(&self, policy: &Policy, key: &Key) -> Vec<State> {
        let (states, now) = (self.states.lock().unwrap(), self.now());
        let stands = |name: &Name| {
            let (state, written) = states.get(name).cloned().unwrap_or((State::Fresh, Instant::now()));
            let left = state.until().since(now);
            let period = policy.limits()[0].quota().period_micros();
            match self.wrong {
                Wrong::ForgetsALittleEarly if left < period / 8 => State::Fresh,
                Wrong::ForgetsAtAPowerOfTwo if left >> 32 == 1 && left % (1 << 32) < 1_000 => State::Fresh,
                Wrong::ForgetsAtAnAgeOfAPowerOfTwo
                    if (1 << 32..(1 << 32) + 1_000).contains(&(period - left.min(period))) =>
                {
                    State::Fresh
                }
                Wrong::ForgetsByAnotherClock if written.elapsed() > Duration::from_millis(50) => State::Fresh,
                Wrong::DistrustsTheFuture if left > 2 * period => State::Fresh,
                _ => state,
            }
        };
        self.names(policy, key).iter().map(stands).collect()
    }

    fn save(&self, policy: &Policy, key: &Key, states: Vec<State>) {
        let names = self.names(policy, key).into_iter().zip(states).enumerate();
        let kept = names.filter(|(position, _)| self.wrong != Wrong::KeepsFourLimits || *position < 4);
        let bucket = |position: usize| policy.limits()[position].strategy().name() == "token-bucket";
        let rounded = kept.map(|(position, (name, state))| match state {
            State::Counts { until, amounts } if self.wrong == Wrong::RoundsInstants => {
                let until = Timestamp::from_micros(until.as_micros().next_multiple_of(1_000));
                (name, (State::Counts { until, amounts }, Instant::now()))
            }
            State::Counts { until, amounts: [first, second] }
                if self.wrong == Wrong::CutsAmounts && bucket(position) =>
            {
                (name, (State::Counts { until, amounts: [first, second & 0xffff] }, Instant::now()))
            }
            State::Log(log) if self.wrong == Wrong::CutsLogs => {
                let entries: Vec<_> = log.entries().collect();
                let kept = entries[entries.len().saturating_sub(64)..].to_vec();
                (name, (State::Log(Box::new(Log::from_entries(log.until(), kept))), Instant::now()))
            }
            state => (name, (state, Instant::now())),
        });
        self.states.lock().unwrap().extend(rounded);
    }

    /// Decides in one step.
    fn hit(&self, policy: &Policy, key: &Key, op: Op, cost: u32) -> Decision {
        let _alone = self.step.lock().unwrap();
        let mut states = self.load(policy, key);
        let decision = policy.decide(&mut states, self.now(), op, cost);
        if decision.is_refused() && op == Op::Hit && self.wrong == Wrong::TakesBeforeItRefuses {
            for (limit, state) in policy.limits().iter().zip(&mut states) {
                let _ = limit.strategy().hit(limit.quota(), state, self.now(), cost);
            }
        }
        if op == Op::Hit && !(decision.is_refused() && self.wrong == Wrong::StoresNoRefusals) {
            self.save(policy, key, states);
        }
        if self.wrong == Wrong::RoundsLongWaitsUp { waits_longer(decision) } else { decision }
    }

    /// Decides in two steps, between which others may decide.
    async fn hit_in_steps(&self, policy: &Policy, key: &Key, op: Op, cost: u32) -> Result<Decision, BoxError> {
        let before = self.load(policy, key);
        let mut states = before.clone();
        let decision = policy.decide(&mut states, self.now(), op, cost);
        yield_now().await;
        match self.wrong {
            Wrong::FailsWhenOutrun if self.load(policy, key) != before => return Err("others were faster".into()),
            // There was room when it checked.
            Wrong::ChecksThenWrites if decision.is_admitted() => {
                let _ = self.hit(policy, key, op, cost);
            }
            _ if op == Op::Hit => self.save(policy, key, states),
            _ => {}
        }
        Ok(decision)
    }
}

impl Storage for Broken {
    type Error = BoxError;
    type DecideFuture = Pin<Box<dyn Future<Output = Result<Decision, BoxError>> + Send>>;
    type UpdateFuture = Pin<Box<dyn Future<Output = Result<(), BoxError>> + Send>>;

    fn decide(&self, ask: StorageRequest<'_>) -> Self::DecideFuture {
        let (storage, policy, key, op, cost) = (self.clone(), ask.policy.clone(), ask.key.clone(), ask.op, ask.cost);
        let cost = match self.wrong {
            Wrong::TakesOneForAll => cost.min(1),
            Wrong::ChargesForFreeHits => cost.max(1),
            _ => cost,
        };
        let op = if self.wrong == Wrong::SpendsInPeeks { Op::Hit } else { op };
        Box::pin(async move {
            match storage.wrong {
                Wrong::LosesAnUpdateInAThousand if storage.decisions.fetch_add(1, Ordering::Relaxed) % 1_000 == 999 => {
                    storage.hit_in_steps(&policy, &key, op, cost).await
                }
                Wrong::LosesUpdates | Wrong::ChecksThenWrites | Wrong::FailsWhenOutrun => {
                    storage.hit_in_steps(&policy, &key, op, cost).await
                }
                Wrong::AnswersWhoComesNext => {
                    let decision = storage.hit(&policy, &key, op, cost);
                    storage.replies.lock().unwrap().push_back(decision);
                    yield_now().await;
                    Ok(storage.replies.lock().unwrap().pop_front().unwrap())
                }
                _ => Ok(storage.hit(&policy, &key, op, cost)),
            }
        })
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::UpdateFuture {
        match self.wrong {
            Wrong::ClearsNothing => {}
            Wrong::ClearsEverybody => self.states.lock().unwrap().clear(),
            _ => self.save(policy, key, vec![State::Fresh; policy.limits().len()]),
        }
        Box::pin(async { Ok(()) })
    }

    fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> Self::UpdateFuture {
        let _alone = self.step.lock().unwrap();
        let mut states = self.load(policy, key);
        match self.wrong {
            Wrong::RefundsNothing => {}
            Wrong::RefundsAll => states.fill(State::Fresh),
            Wrong::RefundsWhatIsForgotten => {
                for state in &mut states {
                    if let State::Counts { amounts: [first, _], .. } = state {
                        *first = first.saturating_sub(if decision.is_admitted() { decision.cost() } else { 0 });
                    }
                }
            }
            _ => policy.refund(&mut states, self.now(), decision),
        }
        self.save(policy, key, states);
        Box::pin(async { Ok(()) })
    }
}

/// The decision with a wait that is a microsecond longer if it cost more than 3 units.
fn waits_longer(decision: Decision) -> Decision {
    if decision.cost() <= 3 {
        return decision;
    }
    let longer = decision.limits().iter().map(|status| {
        let wait = status.retry_after().map(|wait| u64::try_from(wait.as_micros()).unwrap() + 1);
        match (status.is_admitted(), wait) {
            (true, _) => *status,
            (false, wait) => Status::refused(status.capacity(), status.remaining(), status.reset_after_micros(), wait),
        }
    });
    Decision::of_limits(decision.at(), decision.cost(), longer)
}

/// Runs the suite on a storage with this fault.
fn check(wrong: Wrong) {
    let empty = |clock| {
        let (states, step, replies, decisions) = Default::default();
        Broken { wrong, clock, states, step, replies, decisions }
    };
    // These two take as many keys and hits as come with 256 scripts.
    let is_rare = matches!(wrong, Wrong::HashesKeys | Wrong::LosesAnUpdateInAThousand);
    StorageLaws::new(empty).scripts(if is_rare { 256 } else { 96 }).check();
}

#[test]
fn without_a_fault_all_laws_are_kept() {
    check(Wrong::Nothing);
}

#[test]
fn each_fault_breaks_its_law() {
    let faults = [
        (Wrong::LosesUpdates, "law 9: "),
        (Wrong::LosesAnUpdateInAThousand, "law 9: "),
        (Wrong::ChecksThenWrites, "law 9: "),
        (Wrong::FailsWhenOutrun, "law 9: the storage failed: others were faster"),
        (Wrong::TakesOneForAll, "law 5: "),
        (Wrong::ChargesForFreeHits, "law 5: "),
        (Wrong::SpendsInPeeks, "law 5: "),
        (Wrong::TakesBeforeItRefuses, "law 1: "),
        (Wrong::ForgetsALittleEarly, "law 11: no state is removed early"),
        (Wrong::ForgetsByAnotherClock, "law 11: no state is removed early, in real time"),
        (Wrong::ForgetsAtAPowerOfTwo, "law 11: no state is removed early, around powers of two"),
        (Wrong::ForgetsAtAnAgeOfAPowerOfTwo, "law 11: no state is removed early, around powers of two"),
        (Wrong::CutsLogs, "law 8: decisions equal the model's, with a long log"),
        (Wrong::CountsMillis, "law 3: "),
        (Wrong::ReadsTheMachinesClock, "law 3: "),
        (Wrong::DistrustsTheFuture, "law 6: "),
        (Wrong::SharesKeys, "law 10: keys and policies are independent"),
        (Wrong::HashesKeys, "law 10: keys are independent"),
        (Wrong::IgnoresCase, "law 10: keys and policies are independent"),
        (Wrong::SharesPolicies, "law 10: keys and policies are independent"),
        (Wrong::TellsNoStrategiesApart, "law 10: policies with the same name"),
        (Wrong::ClearsNothing, "law of clearing: "),
        (Wrong::ClearsEverybody, "law of clearing: "),
        (Wrong::RefundsNothing, "law of refunds: "),
        (Wrong::RefundsAll, "law of refunds: "),
        (Wrong::RefundsWhatIsForgotten, "law of refunds: "),
        (Wrong::KeepsFourLimits, "law 8: "),
        (Wrong::RoundsInstants, "law "),
        (Wrong::RoundsLongWaitsUp, "law 8: "),
        (Wrong::StoresNoRefusals, "law 6: waits are exact after the clock has gone back"),
        (Wrong::CutsAmounts, "law 12: "),
        (Wrong::AnswersWhoComesNext, "law of cancellation: "),
    ];
    assert_each_breaks(faults, check);
}

#[test]
fn each_fault_of_a_cas_store_breaks_its_law() {
    let faults = [
        (Fault::DoesNotCompare, "law of comparing: "),
        (Fault::RemovesWhenStale, "law of comparing: a stale removal"),
        (Fault::ComparesThenPuts, "law 9: "),
        (Fault::Trims, "law of storing: "),
        (Fault::IgnoresCase, "law of keys: "),
        (Fault::CutsKeys, "law of keys: "),
        (Fault::ReusesVersions, "law of versions: "),
        (Fault::ReturnsTheGivenText, "law of lost swaps: "),
        (Fault::SecondsAreMillis, "law of expiry: a text for seconds"),
        (Fault::MonthsArePast, "law of expiry: a text for months"),
        (Fault::KeepsTheFirstExpiry, "law of expiry: a text for a second, and then longer"),
        (Fault::ExpiresAfterASecond, "law of expiry: a text for seconds"),
        (Fault::ReportsMillis, "law of time: "),
    ];
    assert_each_breaks(faults, |fault| CasLaws::new(|| FakeCasStore::with_fault(fault)).check());
}

#[test]
fn storage_over_a_broken_store_breaks_its_laws() {
    let faults = [
        (Fault::DoesNotCompare, "law 9: "),
        (Fault::ComparesThenPuts, "law 9: "),
        (Fault::IgnoresCase, "law 10: "),
        (Fault::SecondsAreMillis, "law 11: "),
    ];
    let over = |store| Cas::new(store).deadline(Duration::from_secs(20));
    assert_each_breaks(faults, |fault| {
        let laws = StorageLaws::new(|clock| over(FakeCasStore::with_fault(fault)).clock(clock));
        // The second handle's clock has not advanced.
        laws.scripts(96)
            .second_handle(move |storage| over(storage.store().clone()).clock(ManualClock::default()))
            .check();
    });
}
