use std::fmt;

use proptest::test_runner::Config;
use tokio::runtime::Runtime;

use super::at_once::{hits_are_exact, leaving_disturbs_nobody, refunds_are_exact};
use super::desk::{runtime, runtime_of_threads};
use super::large::many_keys_do_not_mix;
use super::like_the_model::{decides_like_the_model_in, policies_of_one_name_in};
use super::one_by_one::{Trial, parsed};
use crate::storage::ManualClock;
use crate::{Policy, Storage};

/// Every strategy, each with an amount that does not divide its period.
const EVERY_STRATEGY: [&str; 9] = [
    "fixed-window 3 per 7 seconds",
    "fixed-window-aligned 3 per 7 seconds",
    "elastic-window 3 per 7 seconds",
    "moving-window 3 per 7 seconds",
    "3 per 7 seconds",
    "sliding-window-counter-aligned 3 per 7 seconds",
    "token-bucket 3 per 7 seconds",
    "token-bucket 3 per 7 seconds burst 5",
    "leaky-bucket 3 per 7 seconds queue 2",
];

/// Several limits together, small ones and logs, and many.
const TOGETHER: [&str; 4] = [
    "elastic-window 2/second; moving-window 5/20 seconds",
    "token-bucket 7/second burst 4; sliding-window-counter-aligned 9/minute; leaky-bucket 3/second queue 2",
    "moving-window 4/second; moving-window 6/second; 20/minute; fixed-window-aligned 5/second; 30/hour",
    "2/month; fixed-window 3/45 days",
];

/// What many callers share.
const STORAGE_FULL: [&str; 4] = [
    "fixed-window 300/day",
    "token-bucket 300/year",
    "elastic-window 300/day; fixed-window 400/day",
    "moving-window 300/day; 500/day",
];

/// Makes another handle on the same states.
type Elsewhere<St> = dyn Fn(&St) -> St;

/// The laws of a storage, each tried by scripts of its own.
///
/// They ask for one thing: a function that makes an empty storage whose time is a given clock's. It is called often, inside of a
/// runtime of tokio's with time and I/O; on a server each storage is to have a corner of its own (a prefix, a table), so that it
/// is empty. Its clock stands until the law moves it on. What a storage [refuses to keep](Storage::validate) it is not asked for.
///
/// | law | says |
/// |---|---|
/// | 1 | a refusal takes nothing, from any limit of the policy |
/// | 3 | the time is the clock's: a peek is refused a microsecond before `retry_after`, and admitted at it |
/// | 5 | a hit takes what it costs, cost 0 nothing; a peek predicts the hit and changes nothing |
/// | 6 | a clock that goes back neither fails nor grants, and from the first refusal on waits are tight |
/// | 8 | on random scripts of hits, peeks, refunds and clears it decides as the [`Model`](super::Model) does |
/// | 9 | many at once are admitted exactly as often as there is room, and get back exactly what is refunded |
/// | 10 | keys and policies do not mix, nor do limits of one name that differ in place, strategy or period |
/// | 11 | nothing is forgotten early, by whatever clock it is thrown away; what has expired is as if it had never been |
/// | 12 | waits are tight after a policy's quota has changed |
/// | of leaving | who leaves before the answer is there disturbs nobody else's |
/// | of clearing | the key is forgotten, in this policy and no other |
/// | of refunds | what the hit took is given back, once, and only where it was spent |
///
/// A decision that [is contended](crate::Decision::is_contended) is no breach of 3, 8 or 9: whoever is told so comes back.
///
/// ```
/// use tower_ratelimit::MemoryStorage;
/// use tower_ratelimit::testing::StorageLaws;
///
/// StorageLaws::new(|clock| MemoryStorage::builder().clock(clock).build().unwrap()).check();
/// ```
#[must_use = "nothing is tried until `check` is called"]
pub struct StorageLaws<St, M> {
    make: M,
    more: Vec<Policy>,
    scripts: u32,
    second_handle: Option<Box<Elsewhere<St>>>,
}

impl<St: Storage, M: Fn(ManualClock) -> St> StorageLaws<St, M> {
    /// The laws of what `make` makes: an empty storage with this clock.
    pub fn new(make: M) -> Self {
        Self { make, more: Vec::new(), scripts: Config::default().cases, second_handle: None }
    }

    /// Law 9 with handles on the same states as other processes have them: `second_handle` makes one, with the time of the one it is
    /// given. For storages whose clones share more than the states: connections, locks, a [`Cas`](crate::storage::Cas) in which they
    /// wait for one another.
    pub fn second_handle(self, second_handle: impl Fn(&St) -> St + 'static) -> Self {
        Self { second_handle: Some(Box::new(second_handle)), ..self }
    }

    /// Law 8 with these policies too: those with strategies of one's own, or that the storage treats in some other way.
    pub fn and_policies(mut self, policies: impl IntoIterator<Item = Policy>) -> Self {
        self.more.extend(policies);
        self
    }

    /// Sets the number of random scripts for law 8, and for law 10 on policies of one name. Defaults to 256, or to the value of
    /// the environment variable `PROPTEST_CASES`.
    ///
    /// A script has up to 80 operations, so fewer of them suit a slow storage. The other laws that take many operations take
    /// fewer of them too: 256 scripts come with 167,000 keys and 4,096 concurrent hits, 64 scripts with 650 keys and 1,024 hits.
    pub fn scripts(self, scripts: u32) -> Self {
        Self { scripts, ..self }
    }

    /// Tries them all.
    ///
    /// # Panics
    ///
    /// When a law is broken; the message begins with it.
    pub fn check(&self) {
        let (runtime, make) = (runtime(), &self.make);
        let policies = self.that_can_be_kept(EVERY_STRATEGY.map(parsed));
        let trial = Trial { runtime: &runtime, make, policies: &policies, scripts: self.scripts };
        // First, since what forgets early breaks all others now and then.
        trial.nothing_is_forgotten_early();
        trial.nothing_is_forgotten_around_powers_of_two();
        trial.hits_cost_what_they_cost();
        trial.a_peek_changes_nothing();
        trial.a_refusal_takes_nothing();
        trial.keys_and_policies_do_not_mix();
        trial.a_clear_forgets();
        trial.waits_are_tight();
        trial.a_clock_that_goes_back_grants_nothing();
        trial.a_clock_that_goes_back_keeps_waits_tight();
        trial.a_changed_quota_keeps_waits_tight();
        trial.a_refund_gives_back_what_the_hit_took();
        trial.long_logs_are_kept();
        self.many_at_once();
        many_keys_do_not_mix(&runtime, self.scripts, &self.empty(&runtime));
        policies_of_one_name_in(self.scripts, make);
        let all = EVERY_STRATEGY.into_iter().chain(TOGETHER).map(parsed).chain(self.more.iter().cloned());
        decides_like_the_model_in(self.scripts, &self.that_can_be_kept(all), make);
    }

    fn many_at_once(&self) {
        // So many hits that an update that is lost once in a thousand is found out.
        let many = parsed(&format!("fixed-window {}/day", (16 * self.scripts).clamp(300, 4_096)));
        let storage_full = self.that_can_be_kept(STORAGE_FULL.map(parsed).into_iter().chain([many]));
        for (runtime, threads) in [(runtime(), "one thread"), (runtime_of_threads(), "several threads")] {
            for policy in &storage_full {
                let mut handles = vec![self.empty(&runtime)];
                if let Some(second_handle) = &self.second_handle {
                    let _inside = runtime.enter();
                    handles = vec![second_handle(&handles[0]), second_handle(&handles[0]), handles.remove(0)];
                }
                hits_are_exact(&runtime, policy, &handles, threads);
            }
            for policy in self.that_can_be_kept(["fixed-window 1000/day", "moving-window 1000/day"].map(parsed)) {
                refunds_are_exact(&runtime, &policy, &self.empty(&runtime));
                leaving_disturbs_nobody(&runtime, &policy, &self.empty(&runtime));
            }
        }
    }

    fn that_can_be_kept(&self, policies: impl IntoIterator<Item = Policy>) -> Vec<Policy> {
        let runtime = runtime();
        let storage = self.empty(&runtime);
        policies.into_iter().filter(|policy| storage.validate(policy).is_ok()).collect()
    }

    fn empty(&self, runtime: &Runtime) -> St {
        let _inside = runtime.enter();
        (self.make)(ManualClock::default())
    }
}

impl<St, M> fmt::Debug for StorageLaws<St, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StorageLaws").field("more", &self.more).finish_non_exhaustive()
    }
}
