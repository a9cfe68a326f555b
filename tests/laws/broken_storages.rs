//! Storages with one fault each. The suite must report the law that each breaks.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Bound;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use common::assert_each_breaks;
use common::fake_cas_store::{FakeCasStore, Fault};
use tokio::task::yield_now;
use tower_ratelimit::storage::{
    Cas, Clock, KeyPage, KeysRequest, ManualClock, Member, StorageError, StorageErrorKind, StorageFuture,
    StorageRequest, Summary,
};
use tower_ratelimit::strategy::{Log, State, Status};
use tower_ratelimit::testing::{CasLaws, StorageLaws};
use tower_ratelimit::{ConfigError, Decision, Key, Limit, Op, Policy, Storage, Timestamp};

/// The fault of a storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StorageFault {
    None,
    /// No fault: two of three settlements and clears are contended.
    Contends,
    /// No fault: rejects other strategies than the token bucket.
    SupportsTokenBuckets,
    /// Overwrites changes that others stored since it loaded.
    LosesUpdates,
    /// Overwrites such changes once in a thousand decisions.
    LosesAnUpdateInAThousand,
    /// Checks and spends in two steps.
    ChecksThenWrites,
    /// Fails if another process changed the state first.
    FailsOnConflict,
    ChargesOneUnit,
    ChargesForFreeHits,
    SpendsInPeeks,
    /// Spends from the first limits although the last refuses.
    SpendsBeforeRefusing,
    ForgetsEarly,
    ForgetsByAnotherClock,
    /// Forgets a state in the millisecond in which it expires in 2^32 microseconds.
    ForgetsAtAPowerOfTwo,
    /// Forgets a state in the millisecond in which it is 2^32 microseconds old.
    ForgetsAtAnAgeOfAPowerOfTwo,
    /// Keeps the newest 64 entries of a log.
    CutsLogs,
    /// Uses milliseconds as microseconds.
    CountsMillis,
    ReadsTheMachinesClock,
    /// Discards states that are ahead of its clock.
    DiscardsFutureStates,
    SharesKeys,
    /// Keeps 32 bits of a hash of each key.
    HashesKeys,
    IgnoresCase,
    SharesPolicies,
    IgnoresStrategies,
    /// Identifies a policy by its identity and its kept units.
    SeparatesKeptUnits,
    IgnoresKeptUnits,
    ClearsNothing,
    ClearsAllKeys,
    RefundsNothing,
    RefundsAll,
    RefundsExpiredHits,
    /// Decides a charge like a hit.
    RefusesCharges,
    /// Refunds the whole hit if its actual cost is lower than its estimated cost.
    SettlesTheWholeHit,
    /// Loads and stores in two steps when it settles.
    SettlesInSteps,
    /// Does the same behind a lock that only the clones of one handle share.
    SettlesInStepsOfOneHandle,
    KeepsFourLimits,
    RoundsInstants,
    /// Returns a `retry_after` that is a microsecond too long for costs above 3.
    RoundsLongWaitsUp,
    /// Does not store the states that a refusal has changed.
    StoresNoRefusals,
    /// Keeps 16 bits of the second amount of a bucket.
    CutsAmounts,
    /// Returns the result of a dropped caller to the next one.
    ReturnsToTheNextCaller,
    /// Keeps 16 bits of a cost, so 65,536 units are free.
    CutsCosts,
    /// Counts up to 65,535 units.
    CountsTo16Bits,
    /// Counts up to 2^31 - 1 units.
    CountsTo31Bits,
    /// Refuses charges above a million units.
    RefusesLargeCharges,
    /// Charges at most the capacity.
    CapsCharges,
    /// Settles one unit too few if the actual cost differs by 7 units or more.
    SettlesOneTooFewFromSeven,
    /// Settles one unit too few if the actual cost differs by 60,000 units or more.
    SettlesOneTooFewFromSixtyThousand,
    RefundsTwice,
    SettlesTheFirstLimit,
    ClearsTheFirstLimit,
    /// `try_admit` reports a refusal with a wait that is a microsecond too long.
    ReportsALongWait,
    /// `try_admit` reports a refusal of the last unit.
    ReportsARefusalOfTheLastUnit,
    /// `try_admit` reports a refusal without numbers.
    ReportsAnEmptyRefusal,
    /// `try_admit` counts the hits that it does not admit.
    CountsInTryAdmit,
    /// `try_admit` admits hits without counting them.
    AdmitsWithoutCounting,
    /// Replaces invalid UTF-8 in keys.
    ReplacesInvalidBytes,
    CutsKeysAtAKilobyte,
    EndsKeysAtANull,
    TrimsKeys,
    IgnoresLongKeys,
    CutsNames,
    CutsNamesAt256,
    TrimsNames,
    /// Uses the latest instant that it has seen.
    NeverGoesBack,
    KeepsEightLimits,
    ExpiresAPeriodEarly,
    /// `clear_all` keeps the keys of one policy.
    ClearsOnePolicyOfAll,
    /// Spends the members before the one that refuses.
    SpendsMembersInOrder,
    /// Spends two members with the same states.
    AllowsEqualMembers,
    /// Loads and stores several keys in two steps.
    DecidesMembersInSteps,
    /// Lists keys whose states have expired.
    ListsExpiredKeys,
    /// Lists no keys after the first page.
    ListsOnePage,
    /// Lists keys with other beginnings.
    IgnoresThePrefix,
}

type Name = (String, String, u32);

/// A map of states with one fault.
#[derive(Clone, Debug)]
struct Broken {
    fault: StorageFault,
    clock: ManualClock,
    states: Arc<Mutex<HashMap<Name, (State, Instant)>>>,
    /// All keys, by their texts.
    keys: Arc<Mutex<BTreeMap<String, Key>>>,
    /// Held during a decision.
    step: Arc<Mutex<()>>,
    /// The lock of this handle and its clones.
    handle: Arc<tokio::sync::Mutex<()>>,
    replies: Arc<Mutex<VecDeque<Decision>>>,
    decisions: Arc<AtomicU32>,
    latest: Arc<Mutex<Timestamp>>,
    /// The machine's time, which does not advance: a window that ends during a law would break that law.
    machines: Arc<OnceLock<Timestamp>>,
}

impl Broken {
    fn now(&self) -> Timestamp {
        match self.fault {
            StorageFault::CountsMillis => Timestamp::from_micros(self.clock.now().as_micros() / 1_000),
            StorageFault::ReadsTheMachinesClock => *self.machines.get_or_init(Timestamp::wall_clock),
            StorageFault::NeverGoesBack => {
                let mut latest = self.latest.lock().unwrap();
                *latest = self.clock.now().max(*latest);
                *latest
            }
            _ => self.clock.now(),
        }
    }

    fn names(&self, policy: &Policy, key: &Key) -> Vec<Name> {
        let key = match self.fault {
            StorageFault::SharesKeys => String::new(),
            StorageFault::HashesKeys => {
                let mut hasher = DefaultHasher::new();
                key.hash(&mut hasher);
                (hasher.finish() >> 32).to_string()
            }
            StorageFault::IgnoresCase => key.to_string().to_lowercase(),
            StorageFault::ReplacesInvalidBytes => String::from_utf8_lossy(key.as_bytes()).into_owned(),
            StorageFault::CutsKeysAtAKilobyte => key.to_string().chars().take(1_024).collect(),
            StorageFault::EndsKeysAtANull => key.to_string().split("%00").next().unwrap().to_owned(),
            StorageFault::TrimsKeys => key.to_string().trim_end_matches("%20").to_owned(),
            _ => key.to_string(),
        };
        let identity = policy.identity();
        let name = match self.fault {
            StorageFault::SharesPolicies => String::new(),
            StorageFault::SeparatesKeptUnits => {
                let kept = policy.limits().iter().map(Limit::kept).collect::<Vec<_>>();
                format!("{identity} {kept:?}")
            }
            StorageFault::CutsNames => identity.chars().take(40).collect(),
            StorageFault::CutsNamesAt256 => identity.chars().take(256).collect(),
            StorageFault::TrimsNames => identity.trim().to_owned(),
            _ => identity.to_owned(),
        };
        let digest = |(position, digest): (usize, &u32)| match self.fault {
            StorageFault::IgnoresStrategies => u32::try_from(position).unwrap(),
            _ => *digest,
        };
        policy.limit_digests().iter().enumerate().map(|each| (name.clone(), key.clone(), digest(each))).collect()
    }

    fn load(&self, policy: &Policy, key: &Key) -> Vec<State> {
        let (states, now) = (self.states.lock().unwrap(), self.now());
        let stored = |name: &Name| {
            let (state, written) = states.get(name).cloned().unwrap_or((State::Fresh, Instant::now()));
            let left = state.until().since(now);
            let period = policy.limits()[0].quota().period_micros();
            match self.fault {
                StorageFault::ForgetsEarly if left < period / 8 => State::Fresh,
                StorageFault::ExpiresAPeriodEarly if left <= period => State::Fresh,
                StorageFault::ForgetsAtAPowerOfTwo if left >> 32 == 1 && left % (1 << 32) < 1_000 => State::Fresh,
                StorageFault::ForgetsAtAnAgeOfAPowerOfTwo
                    if (1 << 32..(1 << 32) + 1_000).contains(&(period - left.min(period))) =>
                {
                    State::Fresh
                }
                // Only the law in real time has this period. On a busy machine, the scripts of other laws
                // can take as long, too.
                StorageFault::ForgetsByAnotherClock
                    if period == 2_000_000 && written.elapsed() > Duration::from_millis(50) =>
                {
                    State::Fresh
                }
                StorageFault::DiscardsFutureStates if left > 2 * period => State::Fresh,
                _ => state,
            }
        };
        self.names(policy, key).iter().map(stored).collect()
    }

    fn save(&self, policy: &Policy, key: &Key, states: Vec<State>) {
        self.keys.lock().unwrap().insert(key.to_string(), key.clone());
        let names = self.names(policy, key).into_iter().zip(states).enumerate();
        let most = match self.fault {
            StorageFault::KeepsFourLimits => 4,
            StorageFault::KeepsEightLimits => 8,
            StorageFault::IgnoresLongKeys if key.as_bytes().len() > 1_024 => 0,
            _ => usize::MAX,
        };
        let kept = names.filter(|(position, _)| *position < most);
        let bucket = |position: usize| policy.limits()[position].strategy().name() == "token-bucket";
        // The first amount of a bucket is not a count.
        let counts = |position: usize| !policy.limits()[position].strategy().name().ends_with("-bucket");
        let rounded = kept.map(|(position, (name, state))| match state {
            State::Counts { until, amounts } if self.fault == StorageFault::RoundsInstants => {
                let until = Timestamp::from_micros(until.as_micros().next_multiple_of(1_000));
                (name, (State::Counts { until, amounts }, Instant::now()))
            }
            State::Counts { until, amounts: [first, second] }
                if self.fault == StorageFault::CutsAmounts && bucket(position) =>
            {
                (name, (State::Counts { until, amounts: [first, second & 0xffff] }, Instant::now()))
            }
            State::Counts { until, amounts: [first, second] }
                if self.fault == StorageFault::CountsTo16Bits && counts(position) =>
            {
                (name, (State::Counts { until, amounts: [first.min(65_535), second] }, Instant::now()))
            }
            State::Counts { until, amounts: [first, second] }
                if self.fault == StorageFault::CountsTo31Bits && counts(position) =>
            {
                (name, (State::Counts { until, amounts: [first.min(i32::MAX.unsigned_abs()), second] }, Instant::now()))
            }
            State::Log(log) if self.fault == StorageFault::CutsLogs => {
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
        if decision.is_refused() && op == Op::Hit && self.fault == StorageFault::SpendsBeforeRefusing {
            for (limit, state) in policy.limits().iter().zip(&mut states) {
                let _ = limit.strategy().hit(limit.quota(), state, self.now(), cost);
            }
        }
        if op != Op::Peek && !(decision.is_refused() && self.fault == StorageFault::StoresNoRefusals) {
            self.save(policy, key, states);
        }
        if self.fault == StorageFault::RoundsLongWaitsUp { waits_longer(decision) } else { decision }
    }

    /// Decides in two steps, between which others may decide.
    async fn hit_in_steps(&self, policy: &Policy, key: &Key, op: Op, cost: u32) -> Result<Decision, StorageError> {
        let before = self.load(policy, key);
        let mut states = before.clone();
        let decision = policy.decide(&mut states, self.now(), op, cost);
        yield_now().await;
        match self.fault {
            StorageFault::FailsOnConflict if self.load(policy, key) != before => {
                return Err(StorageError::new(StorageErrorKind::Other, "another process changed the state"));
            }
            // The decision of the check is returned, even if this hit is refused.
            StorageFault::ChecksThenWrites if decision.is_admitted() => {
                let _ = self.hit(policy, key, op, cost);
            }
            _ if op != Op::Peek => self.save(policy, key, states),
            _ => {}
        }
        Ok(decision)
    }
}

impl Broken {
    async fn alone_in_handle(&self) -> Option<tokio::sync::MutexGuard<'_, ()>> {
        match self.fault {
            StorageFault::SettlesInStepsOfOneHandle => Some(self.handle.lock().await),
            _ => None,
        }
    }

    /// Fails two of three times if the fault is that changes are contended.
    fn change(&self) -> Result<(), StorageError> {
        match self.fault {
            StorageFault::Contends if self.decisions.fetch_add(1, Ordering::Relaxed) % 3 < 2 => {
                Err(StorageError::new(StorageErrorKind::Contended, "others have changed the key"))
            }
            _ => Ok(()),
        }
    }

    /// Settles in two steps, between which others may decide.
    fn settle_in_steps(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> StorageFuture<()> {
        let (storage, policy, key, decision) = (self.clone(), policy.clone(), key.clone(), decision.clone());
        StorageFuture::new(async move {
            let _alone = storage.alone_in_handle().await;
            let mut states = storage.load(&policy, &key);
            yield_now().await;
            policy.settle(&mut states, storage.now(), &decision, actual);
            storage.save(&policy, &key, states);
            Ok(())
        })
    }
}

/// Returns the policy with the same limits, which keep no units.
fn without_kept_units(policy: &Policy) -> Policy {
    let mut limits = policy.limits().iter().map(|limit| limit.clone().keep(0));
    let first = Policy::from(limits.next().expect("a limit"));
    let limits = limits.fold(first, Policy::with);
    match policy.name() {
        Some(name) => limits.with_name(name),
        None => limits,
    }
}

impl Storage for Broken {
    fn decide(&self, request: StorageRequest<'_>) -> StorageFuture<Decision> {
        let (storage, policy, key, op, cost) =
            (self.clone(), request.policy.clone(), request.key.clone(), request.op, request.cost);
        let policy = if self.fault == StorageFault::IgnoresKeptUnits { without_kept_units(&policy) } else { policy };
        let cost = match self.fault {
            StorageFault::ChargesOneUnit => cost.min(1),
            StorageFault::ChargesForFreeHits => cost.max(1),
            StorageFault::CapsCharges if op == Op::Charge => cost.min(policy.limits()[0].capacity()),
            _ => cost,
        };
        let cost = if self.fault == StorageFault::CutsCosts { cost & 0xffff } else { cost };
        let op = match (self.fault, op) {
            (StorageFault::SpendsInPeeks, _) | (StorageFault::RefusesCharges, Op::Charge) => Op::Hit,
            (StorageFault::RefusesLargeCharges, Op::Charge) if cost > 1_000_000 => Op::Hit,
            _ => op,
        };
        if let Err(error) = self.validate(&policy) {
            return StorageFuture::ready(Err(StorageError::new(StorageErrorKind::Unsupported, error.to_string())));
        }
        StorageFuture::new(async move {
            let _alone = storage.alone_in_handle().await;
            match storage.fault {
                StorageFault::LosesAnUpdateInAThousand
                    if storage.decisions.fetch_add(1, Ordering::Relaxed) % 1_000 == 999 =>
                {
                    storage.hit_in_steps(&policy, &key, op, cost).await
                }
                StorageFault::LosesUpdates | StorageFault::ChecksThenWrites | StorageFault::FailsOnConflict => {
                    storage.hit_in_steps(&policy, &key, op, cost).await
                }
                StorageFault::ReturnsToTheNextCaller => {
                    let decision = storage.hit(&policy, &key, op, cost);
                    storage.replies.lock().unwrap().push_back(decision);
                    yield_now().await;
                    Ok(storage.replies.lock().unwrap().pop_front().unwrap())
                }
                _ => Ok(storage.hit(&policy, &key, op, cost)),
            }
        })
    }

    fn decide_all(&self, members: &[StorageRequest<'_>]) -> StorageFuture<Vec<Decision>> {
        if self.fault != StorageFault::AllowsEqualMembers
            && let Err(error) = StorageRequest::check_members(members)
        {
            return StorageFuture::ready(Err(error));
        }
        if self.fault == StorageFault::SpendsMembersInOrder {
            let mut refused = false;
            let decide = |member: &StorageRequest<'_>| {
                let op = if refused { Op::Peek } else { member.op };
                let decision = self.hit(member.policy, member.key, op, member.cost);
                refused |= decision.is_refused();
                decision
            };
            return StorageFuture::ok(members.iter().map(decide).collect());
        }
        let _alone = self.step.lock().unwrap();
        let mut states: Vec<_> = members.iter().map(|member| self.load(member.policy, member.key)).collect();
        let loaded = members.iter().zip(&mut states).map(|(member, states)| {
            let StorageRequest { policy, op, cost, .. } = *member;
            Member { policy, states, now: self.now(), op, cost }
        });
        let decisions = Policy::decide_all(&mut loaded.collect::<Vec<_>>());
        if self.fault == StorageFault::DecidesMembersInSteps {
            let (storage, policies) =
                (self.clone(), members.iter().map(|member| member.policy.clone()).collect::<Vec<_>>());
            let keys: Vec<_> = members.iter().map(|member| member.key.clone()).collect();
            return StorageFuture::new(async move {
                yield_now().await;
                for ((policy, key), states) in policies.iter().zip(&keys).zip(states) {
                    storage.save(policy, key, states);
                }
                Ok(decisions)
            });
        }
        for (member, states) in members.iter().zip(states) {
            self.save(member.policy, member.key, states);
        }
        StorageFuture::ok(decisions)
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        let is_bucket = |limit: &Limit| limit.strategy().name() == "token-bucket";
        if self.fault == StorageFault::SupportsTokenBuckets && !policy.limits().iter().all(is_bucket) {
            return Err(ConfigError::new("only token buckets are supported"));
        }
        Ok(())
    }

    fn validate_members(&self, policies: &[Policy]) -> Result<(), ConfigError> {
        policies.iter().try_for_each(|policy| self.validate(policy))
    }

    fn try_admit(&self, request: StorageRequest<'_>, summary: Option<&mut Summary>) -> bool {
        let StorageRequest { policy, key, cost, .. } = request;
        let refuses = |decision: &Decision| {
            let ([limit], [status]) = (policy.limits(), decision.statuses()) else { return None };
            (decision.is_refused() && !limit.strategy().counts_refusals()).then_some(*status)
        };
        let peek = || self.hit(policy, key, Op::Peek, cost);
        let refusal = match self.fault {
            StorageFault::ReportsALongWait => refuses(&peek()).map(|status| {
                let wait = status.retry_after().map(|wait| u64::try_from(wait.as_micros()).unwrap() + 1);
                Status::refused(status.capacity(), status.remaining(), status.reset_after_micros(), wait)
            }),
            StorageFault::ReportsAnEmptyRefusal => refuses(&peek()).map(|_| Status::refused(0, 0, 0, None)),
            StorageFault::ReportsARefusalOfTheLastUnit => {
                let status = peek().statuses()[0];
                (status.remaining() == 1).then(|| Status::refused(status.capacity(), 0, 0, Some(1)))
            }
            StorageFault::CountsInTryAdmit => {
                let _ = self.hit(policy, key, Op::Hit, cost);
                None
            }
            StorageFault::AdmitsWithoutCounting => {
                let decision = policy.decide(&mut self.load(policy, key), self.now(), Op::Hit, cost);
                let is_admitted = decision.is_admitted() && decision.delay().is_zero();
                if let (true, Some(summary)) = (is_admitted, summary) {
                    *summary = Summary { at: decision.at(), limit: *decision.shown() };
                }
                return is_admitted;
            }
            StorageFault::None => refuses(&peek()),
            _ => None,
        };
        if let (Some(summary), Some(limit)) = (summary, refusal) {
            *summary = Summary { at: self.now(), limit };
        }
        false
    }

    fn clear(&self, policy: &Policy, key: &Key) -> StorageFuture<()> {
        if let Err(error) = self.change() {
            return StorageFuture::ready(Err(error));
        }
        match self.fault {
            StorageFault::ClearsNothing => {}
            StorageFault::ClearsAllKeys => self.states.lock().unwrap().clear(),
            StorageFault::ClearsTheFirstLimit => self.save(policy, key, vec![State::Fresh]),
            _ => self.save(policy, key, vec![State::Fresh; policy.limits().len()]),
        }
        StorageFuture::ok(())
    }

    fn clear_all(&self) -> StorageFuture<u64> {
        let mut states = self.states.lock().unwrap();
        let before = states.len();
        match self.fault {
            StorageFault::ClearsOnePolicyOfAll => states.retain(|(name, ..), _| name.starts_with("fixed-window ")),
            _ => states.clear(),
        }
        StorageFuture::ok((before - states.len()) as u64)
    }

    fn keys(&self, request: KeysRequest<'_>) -> StorageFuture<KeyPage> {
        let after = request.after.map_or(Bound::Unbounded, Bound::Excluded);
        let keys = self.keys.lock().unwrap();
        let page = keys.range::<str, _>((after, Bound::Unbounded)).take(request.limit);
        let page: Vec<_> = page.map(|(text, key)| (text.clone(), key.clone())).collect();
        let next = page.last().filter(|_| self.fault != StorageFault::ListsOnePage).map(|(text, _)| text.clone());
        let listed = page.into_iter().filter_map(|(text, key)| {
            let begins = self.fault == StorageFault::IgnoresThePrefix || text.starts_with(request.prefix);
            let has_state = || {
                let states = self.states.lock().unwrap();
                self.names(request.policy, &key)
                    .iter()
                    .any(|name| states.get(name).is_some_and(|(state, _)| *state != State::Fresh))
            };
            let peek = self.hit(request.policy, &key, Op::Peek, 1);
            let is_listed = match self.fault {
                StorageFault::ListsExpiredKeys => has_state(),
                _ => !peek.reset_after().is_zero(),
            };
            (begins && is_listed).then_some((key, peek))
        });
        StorageFuture::ok(KeyPage::new(listed.collect(), next))
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> StorageFuture<()> {
        if let Err(error) = self.change() {
            return StorageFuture::ready(Err(error));
        }
        if matches!(self.fault, StorageFault::SettlesInSteps | StorageFault::SettlesInStepsOfOneHandle) {
            return self.settle_in_steps(policy, key, decision, actual);
        }
        let _alone = self.step.lock().unwrap();
        let mut states = self.load(policy, key);
        let before = states.clone();
        let difference = decision.cost().abs_diff(actual);
        match self.fault {
            StorageFault::RefundsNothing => {}
            StorageFault::SettlesOneTooFewFromSeven if difference >= 7 => {
                policy.settle(&mut states, self.now(), decision, actual - u32::from(actual > decision.cost()));
            }
            StorageFault::SettlesOneTooFewFromSixtyThousand if difference >= 60_000 => {
                policy.settle(&mut states, self.now(), decision, actual + u32::from(actual < decision.cost()));
            }
            StorageFault::RefundsTwice if actual < decision.cost() => {
                policy.settle(&mut states, self.now(), decision, actual);
                policy.settle(&mut states, self.now(), decision, actual);
            }
            StorageFault::SettlesTheFirstLimit => {
                policy.settle(&mut states, self.now(), decision, actual);
                states.splice(1.., before.into_iter().skip(1));
            }
            StorageFault::SettlesTheWholeHit => {
                let actual = if actual < decision.cost() { 0 } else { actual };
                policy.settle(&mut states, self.now(), decision, actual);
            }
            StorageFault::RefundsAll => states.fill(State::Fresh),
            StorageFault::RefundsExpiredHits => {
                for state in &mut states {
                    if let State::Counts { amounts: [first, _], .. } = state {
                        *first = first.saturating_sub(if decision.is_admitted() { decision.cost() } else { 0 });
                    }
                }
            }
            _ => policy.settle(&mut states, self.now(), decision, actual),
        }
        self.save(policy, key, states);
        StorageFuture::ok(())
    }
}

/// Makes the wait a microsecond longer if the cost is above 3 units.
fn waits_longer(decision: Decision) -> Decision {
    if decision.cost() <= 3 {
        return decision;
    }
    let longer = decision.statuses().iter().map(|status| {
        let wait = status.retry_after().map(|wait| u64::try_from(wait.as_micros()).unwrap() + 1);
        match (status.is_admitted(), wait) {
            (true, _) => *status,
            (false, wait) => Status::refused(status.capacity(), status.remaining(), status.reset_after_micros(), wait),
        }
    });
    Decision::from_statuses(decision.at(), decision.cost(), longer)
}

/// Runs the suite on a storage with this fault.
fn check(fault: StorageFault) {
    let empty = |clock| {
        let (states, keys, step, handle, replies, decisions, latest, machines) = Default::default();
        Broken { fault, clock, states, keys, step, handle, replies, decisions, latest, machines }
    };
    let second_handle = |first: &Broken| Broken { handle: Arc::default(), ..first.clone() };
    // These two faults need the keys and hits of 256 scripts.
    let is_rare = matches!(fault, StorageFault::HashesKeys | StorageFault::LosesAnUpdateInAThousand);
    StorageLaws::new(empty).second_handle(second_handle).scripts(if is_rare { 256 } else { 96 }).check();
}

#[test]
fn correct_implementation_obeys_all_laws() {
    check(StorageFault::None);
}

/// Guards against these defects: the suite uses policies that the storage rejects, and does not repeat
/// a settlement that was contended.
#[test]
fn suite_accepts_storages_that_support_few_policies_or_contend() {
    check(StorageFault::SupportsTokenBuckets);
    check(StorageFault::Contends);
    let short = |clock| Cas::new(FakeCasStore::with_max_len(1_000)).timeout(Duration::from_secs(20)).clock(clock);
    StorageLaws::new(short).scripts(16).check();
}

#[test]
fn each_fault_breaks_its_law() {
    let faults = [
        (StorageFault::LosesUpdates, "law 9: "),
        (StorageFault::LosesAnUpdateInAThousand, "law 9: "),
        (StorageFault::ChecksThenWrites, "law 9: "),
        (StorageFault::FailsOnConflict, "law 9: the storage failed: another process changed the state"),
        (StorageFault::ChargesOneUnit, "law 5: "),
        (StorageFault::ChargesForFreeHits, "law 5: "),
        (StorageFault::SpendsInPeeks, "law 5: "),
        (StorageFault::SpendsBeforeRefusing, "law 1: "),
        (StorageFault::ForgetsEarly, "law 11: no state is removed early"),
        (StorageFault::ForgetsByAnotherClock, "law 11: no state is removed early, in real time"),
        (StorageFault::ForgetsAtAPowerOfTwo, "law 11: no state is removed early, around powers of two"),
        (StorageFault::ForgetsAtAnAgeOfAPowerOfTwo, "law 11: no state is removed early, around powers of two"),
        (StorageFault::CutsLogs, "law 8: decisions equal the model's, with a long log"),
        (StorageFault::CountsMillis, "law 3: "),
        (StorageFault::ReadsTheMachinesClock, "law 3: "),
        (StorageFault::DiscardsFutureStates, "law 6: "),
        (StorageFault::SharesKeys, "law 10: keys and policies are independent"),
        (StorageFault::HashesKeys, "law 10: keys are independent"),
        (StorageFault::IgnoresCase, "law 10: keys and policies are independent"),
        (StorageFault::SharesPolicies, "law 10: keys and policies are independent"),
        (StorageFault::IgnoresStrategies, "law 10: policies with the same name"),
        (StorageFault::SeparatesKeptUnits, "law of kept units: a limit leaves them"),
        (StorageFault::IgnoresKeptUnits, "law of kept units: a limit leaves them"),
        (StorageFault::ClearsNothing, "law of clearing: "),
        (StorageFault::ClearsAllKeys, "law of clearing: "),
        (StorageFault::RefundsNothing, "law of refunds: "),
        (StorageFault::RefundsAll, "law of refunds: "),
        (StorageFault::RefundsExpiredHits, "law of refunds: "),
        (StorageFault::RefusesCharges, "law of settling: "),
        (StorageFault::SettlesTheWholeHit, "law of settling: "),
        (StorageFault::SettlesInSteps, "law 9: "),
        (StorageFault::SettlesInStepsOfOneHandle, "law 9: hits of "),
        (StorageFault::KeepsFourLimits, "law 8: "),
        (StorageFault::RoundsInstants, "law "),
        (StorageFault::RoundsLongWaitsUp, "law 8: "),
        (StorageFault::StoresNoRefusals, "law 6: waits are exact after the clock has gone back"),
        (StorageFault::CutsAmounts, "law 12: "),
        (StorageFault::ReturnsToTheNextCaller, "law of cancellation: "),
        (StorageFault::CutsCosts, "law 8: decisions equal the model's, for large costs"),
        (StorageFault::CountsTo16Bits, "law 8: decisions equal the model's, for large costs"),
        (StorageFault::CountsTo31Bits, "law 8: decisions equal the model's, for large costs"),
        (StorageFault::RefusesLargeCharges, "law of settling: a charge is spent, however large"),
        (StorageFault::CapsCharges, "law of settling: a charge is spent, however large"),
        (StorageFault::SettlesOneTooFewFromSeven, "law of settling: a settled hit has its actual cost, however large"),
        (
            StorageFault::SettlesOneTooFewFromSixtyThousand,
            "law of settling: a settled hit has its actual cost, however large",
        ),
        (StorageFault::RefundsTwice, "law of refunds: "),
        (StorageFault::SettlesTheFirstLimit, "law of settling: "),
        (StorageFault::ClearsTheFirstLimit, "law of clearing: a clear removes"),
        (StorageFault::ReportsALongWait, "law of `try_admit`: "),
        (StorageFault::ReportsARefusalOfTheLastUnit, "law of `try_admit`: "),
        (StorageFault::ReportsAnEmptyRefusal, "law of `try_admit`: "),
        (StorageFault::CountsInTryAdmit, "law of `try_admit`: "),
        (StorageFault::AdmitsWithoutCounting, "law of `try_admit`: "),
        (StorageFault::ReplacesInvalidBytes, "law 10: keys and policies are independent"),
        (StorageFault::CutsKeysAtAKilobyte, "law 10: keys and policies are independent"),
        (StorageFault::EndsKeysAtANull, "law 10: keys and policies are independent"),
        (StorageFault::TrimsKeys, "law 10: keys and policies are independent"),
        (StorageFault::IgnoresLongKeys, "law 10: keys and policies are independent"),
        (StorageFault::CutsNames, "law 10: keys and policies are independent"),
        (StorageFault::CutsNamesAt256, "law 10: keys and policies are independent"),
        (StorageFault::TrimsNames, "law 10: keys and policies are independent"),
        (StorageFault::NeverGoesBack, "law 6: the time of the storage goes back with the clock"),
        (StorageFault::KeepsEightLimits, "law 8: decisions equal the model's, with many limits"),
        (StorageFault::ExpiresAPeriodEarly, "law 11: "),
        (StorageFault::ClearsOnePolicyOfAll, "law of clearing: `clear_all`"),
        (StorageFault::SpendsMembersInOrder, "law 15: all hits of several keys spend"),
        (StorageFault::AllowsEqualMembers, "law 15: two members with the same states"),
        (StorageFault::DecidesMembersInSteps, "law 15: all hits of several keys spend"),
        (StorageFault::ListsExpiredKeys, "law of listing: the pages have the keys in use: "),
        (StorageFault::ListsOnePage, "law of listing: the pages have the keys in use: "),
        (StorageFault::IgnoresThePrefix, "law of listing: the pages have the keys in use: "),
    ];
    assert_each_breaks(faults, check);
}

#[test]
fn each_fault_of_a_cas_store_breaks_its_law() {
    let faults = [
        (Fault::DoesNotCompare, "law of comparing: "),
        (Fault::RemovesWhenStale, "law of comparing: a stale removal"),
        (Fault::ComparesThenPuts, "law of concurrency: "),
        (Fault::Trims, "law of storing: "),
        (Fault::IgnoresCase, "law of keys: "),
        (Fault::CutsKeys, "law of keys: "),
        (Fault::ReusesVersions, "law of versions: "),
        (Fault::ReturnsTheGivenText, "law of lost swaps: "),
        // These break the law for several texts. Which one is found first depends on the machine.
        (Fault::SecondsAreMillis, "law of expiry: a text for "),
        (Fault::ExpiresAfterASecond, "law of expiry: a text for "),
        (Fault::MonthsArePast, "law of expiry: a text for months"),
        (Fault::KeepsTheFirstExpiry, "law of expiry: a text for a second, and then longer"),
        (Fault::ReportsMillis, "law of time: "),
        (Fault::ExpiresAFifthEarly, "law of expiry: a text for seconds"),
        (Fault::RoundsSecondsDown, "law of expiry: a text for seconds"),
        (Fault::CutsTexts, "law of storing: a text of 70000 bytes"),
        (Fault::CutsTextsAtAMegabyte, "law of storing: a text of 1100000 bytes"),
        (Fault::ReturnsThePreviousText, "law of lost swaps: "),
        (Fault::CutsReturnedTexts, "law of lost swaps: "),
        (Fault::ReturnsRemovedTexts, "law of lost swaps: "),
        (Fault::StoresAStaleSwapInAThousand, "law of comparing: a stale swap was stored"),
        (Fault::DropsASwapInAThousand, "law of comparing: "),
        (Fault::RecallsOutdatedTexts, "law of lost swaps: "),
        (Fault::MatchesUnderscores, "law of keys: "),
    ];
    assert_each_breaks(faults, |fault| CasLaws::new(|| FakeCasStore::with_fault(fault)).check());
}

#[test]
fn cas_storage_over_a_broken_store_breaks_its_laws() {
    let faults = [
        (Fault::DoesNotCompare, "law 9: "),
        (Fault::ComparesThenPuts, "law 9: "),
        (Fault::IgnoresCase, "law 10: "),
        (Fault::SecondsAreMillis, "law 11: "),
    ];
    let over = |store| Cas::new(store).timeout(Duration::from_secs(20));
    assert_each_breaks(faults, |fault| {
        let laws = StorageLaws::new(|clock| over(FakeCasStore::with_fault(fault)).clock(clock));
        // A new clock is correct, because the clock does not advance in the concurrent laws.
        laws.scripts(96)
            .second_handle(move |storage| over(storage.store().clone()).clock(ManualClock::default()))
            .check();
    });
}

#[test]
fn cas_storage_over_a_store_that_breaks_ledgers_breaks_the_law_of_slots() {
    let faults = [
        Fault::KeepsSlotsOfOneProcess,
        Fault::ForgetsReturnedSlots,
        Fault::ForgetsSequences,
        Fault::KeepsSlotsLonger,
        Fault::ForgetsSlotsEarly,
        Fault::SharesSlots,
    ];
    let check = |fault| {
        let over = |clock| Cas::new(FakeCasStore::with_fault(fault)).timeout(Duration::from_secs(20)).clock(clock);
        // The other laws are not broken, so few scripts suffice.
        StorageLaws::new(over).scripts(1).check();
    };
    assert_each_breaks(faults.map(|fault| (fault, "law 16: ")), check);
}
