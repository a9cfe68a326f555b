//! The suite of the laws of storages.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;

use proptest::test_runner::Config;
use tokio::runtime::Runtime;

use super::concurrency::{cancellation_is_isolated, hits_are_exact, many_keys_are_independent, settlements_are_exact};
use super::harness::{Inputs, Law, MakeStorage, parsed, runtime, runtime_of_threads, wait_until_connected};
use super::members::concurrent_members_are_exact;
use super::model::{decides_like_the_model_in, of_one_name, policies_share_equal_limits};
use super::{changes, listing, members, scripts, sequential, slots};
use crate::policy::Policy;
use crate::storage::{AnyStorage, ManualClock, Storage};

/// Policies of one limit, with all strategies. No amount divides its period.
const EVERY_STRATEGY: [&str; 11] = [
    "fixed-window 3 per 7 seconds",
    "fixed-window-aligned 3 per 7 seconds",
    "elastic-window 3 per 7 seconds",
    "moving-window 3 per 7 seconds",
    "3 per 7 seconds",
    "sliding-window-counter-aligned 3 per 7 seconds",
    "token-bucket 3 per 7 seconds",
    "token-bucket 3 per 7 seconds burst 5",
    "leaky-bucket 3 per 7 seconds queue 2",
    "lockout 3 per 7 seconds for 4 seconds x2 up to 8 seconds forget 5 seconds",
    "calendar 3/week from sunday",
];

/// A calendar window that needs the feature of that name.
const MONTH: &str = "calendar 3/month from 31";

/// Policies with several limits: small states, logs, and many limits.
const SEVERAL_LIMITS: [&str; 5] = [
    "elastic-window 2/second; moving-window 5/20 seconds",
    "token-bucket 7/second burst 4; sliding-window-counter-aligned 9/minute; leaky-bucket 3/second queue 2",
    "moving-window 4/second; moving-window 6/second; 20/minute; fixed-window-aligned 5/second; 30/hour",
    "2/month; fixed-window 3/45 days",
    "fixed-window 2/second; lockout 4 refusals/5 seconds for 3 seconds x2 up to 6 seconds forget 4 seconds",
];

/// A policy with several limits, for short scripts.
const A_FEW_LIMITS: [&str; 1] =
    ["fixed-window 3 per 7 seconds; moving-window 3 per 9 seconds; token-bucket 3 per 7 seconds"];

/// Policies for concurrent hits.
const CONCURRENT: [&str; 6] = [
    "fixed-window 300/day",
    "token-bucket 300/year",
    "elastic-window 300/day; fixed-window 400/day",
    "moving-window 300/day; 500/day",
    "lockout 300/day for 1 day",
    "calendar 300/week",
];

/// The laws that are checked without concurrency, in this order. The first ones are on states that
/// are removed early, because a storage that does so breaks the others at random.
const LAWS: [Law; 27] = [
    ("11: no state is removed early", sequential::no_state_is_removed_early),
    ("11: no state is removed early, in real time", sequential::no_state_is_removed_early_in_real_time),
    ("11: no state is removed early, around powers of two", sequential::no_state_is_removed_around_powers_of_two),
    ("5: a hit takes its cost", sequential::hits_take_their_cost),
    ("5: a peek predicts the hit and changes nothing", sequential::peeks_change_nothing),
    ("1: a refusal takes no units, from any limit", sequential::refusals_take_no_units),
    ("10: keys and policies are independent", sequential::keys_and_policies_are_independent),
    ("of clearing: a clear removes one key of one policy", sequential::clears_remove_one_key),
    ("of clearing: `clear_all` removes all keys", sequential::clear_all_removes_all_keys),
    ("3: waits are exact, by the clock of the storage", sequential::waits_are_exact),
    ("6: a clock that goes back grants no units", sequential::clock_change_grants_no_units),
    ("6: the time of the storage goes back with the clock", changes::time_goes_back_with_the_clock),
    ("6: waits are exact after the clock has gone back", changes::waits_are_exact_after_clock_change),
    ("12: waits are exact after a quota has changed", changes::waits_are_exact_after_quota_change),
    ("of refunds: a refund returns exactly the units of the hit", scripts::refunds_return_the_units),
    ("of settling: a settled hit has its actual cost", scripts::settled_hits_have_their_actual_cost),
    ("8: decisions equal the model's, for large costs", scripts::large_hits_take_their_cost),
    ("of settling: a charge is spent, however large", scripts::large_charges_are_spent),
    ("of settling: a settled hit has its actual cost, however large", scripts::settled_hits_have_any_actual_cost),
    ("of `try_admit`: its result and its summary are those of a hit", scripts::try_admit_decides_like_the_model),
    ("of kept units: a limit leaves them to hits that keep less", scripts::kept_units_are_left_to_others),
    ("8: decisions equal the model's, with many limits", scripts::many_limits_are_kept),
    ("8: decisions equal the model's, with a long log", scripts::long_logs_are_kept),
    ("15: all hits of several keys spend, or none does", members::all_spend_or_none),
    ("15: two members with the same states are an error", members::equal_members_are_an_error),
    ("16: slots are granted as by the ledger", slots::slots_are_granted_like_the_ledger),
    ("of listing: the pages have the keys in use", listing::pages_have_the_keys_in_use),
];

/// Creates another handle to the same states.
type MakeHandle = dyn Fn(&AnyStorage) -> AnyStorage;

/// Checks that a [`Storage`] keeps the laws of this table.
///
/// The constructor takes a function that creates an empty storage with a given clock. The suite
/// calls it often, inside a tokio runtime with time and I/O, and waits up to 30 seconds until the
/// storage is connected. On a server, each storage needs its own prefix or table, so that it is empty.
/// The clock stands still until a law advances it. Policies that fail [validation](Storage::validate)
/// are skipped.
///
/// | law | meaning |
/// |---|---|
/// | 1 | A refusal spends no units of any limit of the policy. |
/// | 3 | Waits are exact: by the given clock, a peek one microsecond before `retry_after` is refused, and a peek at `retry_after` is admitted. |
/// | 5 | A hit spends its cost, and nothing for cost 0. A peek predicts the verdict of the hit and changes nothing. |
/// | 6 | A clock that goes back causes no errors and grants no units. Waits are exact from the first refusal on. The time of new keys goes back with the clock. |
/// | 8 | Decisions equal those of the [`Model`](super::Model), on random scripts of hits, peeks, charges, settlements and clears, on a long log, on 20 limits, and for costs of up to 32 bits. |
/// | 9 | Concurrent hits, refunds and settlements are exact. |
/// | 10 | Keys are independent, also long ones and those that are not UTF-8. Policies with different names are independent. Policies with the same name share the states of limits with the same position, strategy and period, and no others. |
/// | 11 | No state is removed early, neither by the given clock nor in real time. An expired state has no effect. |
/// | 12 | Waits are exact after the quota of a policy has changed. |
/// | 15 | All hits of [several keys](Storage::decide_all) spend, or none does, also if they are concurrent. Members with the same states are an error. Checked if [`validate_members`](Storage::validate_members) supports it. |
/// | 16 | Claims for the [slots](Storage::slots) of requests in flight, also late and repeated ones, are granted as by the pure function of the ledger. Checked if `slots` returns a store. |
/// | of cancellation | A request that is dropped before it completes does not affect other keys. |
/// | of clearing | A clear removes one key of one policy. [`clear_all`](Storage::clear_all) removes all keys, if it is supported. |
/// | of kept units | A limit that [keeps](crate::Limit::keep) units leaves them to hits on the same states that keep less. |
/// | of listing | The pages of [`keys`](Storage::keys) together have exactly the keys of the policy that are in use, each with its peek, if it is supported. |
/// | of refunds | A refund returns exactly the units of the hit, and only to the states in which they were spent. The refund of a refusal or of an expired hit returns nothing. |
/// | of settling | A settled hit has its actual cost. A charge spends its units, even if fewer remain. Both hold for up to 32 bits. |
/// | of `try_admit` | The result and the summary of [`try_admit`](Storage::try_admit) are those of the hit, also if the summary is a refusal. |
///
/// Laws 1 to 7 have the numbers of the [laws of strategies](crate::strategy). Laws 2, 4 and 7 are
/// missing here, because they concern only strategies. [`StrategyLaws`](super::StrategyLaws) checks
/// them. Law 13, on waits after a change, is part of laws 6 and 12. Law 14, on the bound of the
/// memory, concerns only [`MemoryStorage`](crate::MemoryStorage), and tests of this crate check it.
///
/// A [contended](crate::Decision::is_contended) decision breaks no law, because the suite repeats
/// the request. It fails after 100 contended decisions in a row, or after 100,000 with concurrent
/// requests.
///
/// ```
/// use tower_ratelimit::MemoryStorage;
/// use tower_ratelimit::testing::StorageLaws;
///
/// StorageLaws::new(|clock| MemoryStorage::builder().clock(clock).build().unwrap()).check();
/// ```
#[must_use = "nothing is checked until `check` is called"]
pub struct StorageLaws<'a, St> {
    make: Box<MakeStorage<'a>>,
    more: Vec<Policy>,
    scripts: u32,
    second_handle: Option<Box<MakeHandle>>,
    /// The type of the storage.
    storage: PhantomData<fn() -> St>,
}

impl<'a, St: Storage> StorageLaws<'a, St> {
    /// Creates the suite. `make` returns an empty storage that uses the given clock.
    pub fn new(make: impl Fn(ManualClock) -> St + 'a) -> Self {
        let make = Box::new(move |clock| AnyStorage::new(make(clock)));
        let scripts = Config::default().cases;
        Self { make, more: Vec::new(), scripts, second_handle: None, storage: PhantomData }
    }

    /// Checks the concurrent requests of laws 9 and 15 with several handles to the same states, as in
    /// several processes. Without this method, the handles are clones.
    ///
    /// `second_handle` returns a new handle to the states of the given one. Its clock can be a new
    /// [`ManualClock::default`](ManualClock), because these checks do not advance the clock. Use it
    /// for storages whose clones share more than the states, such as connections or locks, and for
    /// a [`Cas`](crate::storage::Cas), whose clones merge concurrent requests.
    pub fn second_handle(self, second_handle: impl Fn(&St) -> St + 'static) -> Self {
        let second_handle = move |first: &AnyStorage| {
            // `St` may be `AnyStorage` itself.
            let first = (first as &dyn Any).downcast_ref().or_else(|| first.downcast_ref());
            AnyStorage::new(second_handle(first.unwrap_or_else(|| unreachable!("`make` has returned it"))))
        };
        Self { second_handle: Some(Box::new(second_handle)), ..self }
    }

    /// Adds policies, such as those with custom strategies, to the policies of law 8, the
    /// comparison with the [`Model`](super::Model). The other laws do not check them.
    pub fn and_policies(mut self, policies: impl IntoIterator<Item = Policy>) -> Self {
        self.more.extend(policies);
        self
    }

    /// Sets the number of random scripts of law 8, and of law 10 for policies with the same name.
    /// Defaults to the value of the environment variable `PROPTEST_CASES`, or to 256 if it is not
    /// set.
    ///
    /// A script has up to 79 operations, so use fewer scripts for a slow storage. Fewer scripts
    /// also reduce the operations of other laws:
    ///
    /// | scripts | keys of law 10 | concurrent hits of law 9 |
    /// |---|---|---|
    /// | 256 or more | 167,000 | 4,096 |
    /// | 64 | 650 | 1,024 |
    pub fn scripts(self, scripts: u32) -> Self {
        Self { scripts, ..self }
    }

    /// Checks all laws. It starts its own tokio runtimes, so call it from a plain `#[test]`.
    ///
    /// # Panics
    ///
    /// Panics if a law is broken or the storage fails, with a message that starts with the law.
    /// Also panics if it is called inside a tokio runtime.
    pub fn check(&self) {
        let (runtime, make) = (runtime(), &*self.make);
        let policies = self.supported(EVERY_STRATEGY.map(parsed));
        let several = self.supported(A_FEW_LIMITS.map(parsed));
        let inputs = Inputs { policies, several, scripts: self.scripts, runtime: &runtime, make };
        for law in LAWS {
            inputs.check(law);
        }
        self.concurrent_requests();
        many_keys_are_independent(&runtime, self.scripts, &self.empty(&runtime));
        let of_one_name = self.supported(of_one_name());
        if !of_one_name.is_empty() {
            policies_share_equal_limits(self.scripts, &of_one_name, make);
        }
        let month = cfg!(feature = "calendar").then_some(MONTH);
        let texts = EVERY_STRATEGY.into_iter().chain(SEVERAL_LIMITS).chain(month);
        let all = texts.map(parsed).chain(self.more.iter().cloned());
        decides_like_the_model_in(self.scripts, &self.supported(all), make);
    }

    fn concurrent_requests(&self) {
        // With this many hits, the suite detects one lost update in a thousand.
        let many = parsed(&format!("fixed-window {}/day", (16 * self.scripts).clamp(300, 4_096)));
        let policies = self.supported(CONCURRENT.map(parsed).into_iter().chain([many]));
        for (runtime, threads) in [(runtime(), "one thread"), (runtime_of_threads(), "several threads")] {
            for policy in &policies {
                hits_are_exact(&runtime, policy, &self.handles(&runtime), threads);
            }
            concurrent_members_are_exact(&runtime, &self.handles(&runtime), threads);
            for policy in self.supported(["fixed-window 1000/day", "moving-window 1000/day"].map(parsed)) {
                // Every other hit is refunded.
                let handles = self.handles(&runtime);
                settlements_are_exact(&runtime, &policy, &handles, 1, |_, round| round % 2);
                let actual = |task, round| (5 * round + 3 * task) % 8;
                settlements_are_exact(&runtime, &policy, &handles, 3, actual);
                cancellation_is_isolated(&runtime, &policy, &self.empty(&runtime));
            }
        }
    }

    /// Returns handles to an empty storage, as in several processes.
    fn handles(&self, runtime: &Runtime) -> Vec<AnyStorage> {
        let first = self.empty(runtime);
        let Some(second_handle) = &self.second_handle else { return vec![first] };
        let handles = {
            let _guard = runtime.enter();
            vec![second_handle(&first), second_handle(&first), first]
        };
        for handle in &handles {
            wait_until_connected(runtime, handle);
        }
        handles
    }

    fn supported(&self, policies: impl IntoIterator<Item = Policy>) -> Vec<Policy> {
        let runtime = runtime();
        let storage = self.unconnected(&runtime);
        policies.into_iter().filter(|policy| storage.validate(policy).is_ok()).collect()
    }

    fn empty(&self, runtime: &Runtime) -> AnyStorage {
        let storage = self.unconnected(runtime);
        wait_until_connected(runtime, &storage);
        storage
    }

    fn unconnected(&self, runtime: &Runtime) -> AnyStorage {
        let _guard = runtime.enter();
        (self.make)(ManualClock::default())
    }
}

impl<St> fmt::Debug for StorageLaws<'_, St> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StorageLaws").field("more", &self.more).finish_non_exhaustive()
    }
}
