//! The contract between limiters and storages. It names no implementation.

use std::any::Any;
use std::fmt;
use std::iter::successors;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, timeout};

use super::future::StorageFuture;
use super::keys::{KeyPage, KeysRequest, cannot_list};
use super::slots::SlotStore;
use super::{StorageError, StorageErrorKind};
use crate::decision::Decision;
use crate::error::ConfigError;
use crate::key::Key;
use crate::policy::{Op, Policy};
use crate::strategy::Status;
use crate::time::Timestamp;

/// An operation on the states of a key: the argument of [`Storage::decide`] and
/// [`Storage::try_admit`], and a member of [`Storage::decide_all`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct StorageRequest<'a> {
    /// The policy whose limits apply.
    pub policy: &'a Policy,
    /// The rate limit key.
    pub key: &'a Key,
    /// The operation: a hit, a peek or a charge.
    pub op: Op,
    /// The number of units to spend. A cost of 0 spends nothing and is always admitted.
    pub cost: u32,
}

impl<'a> StorageRequest<'a> {
    /// Creates a request for the operation `op` on `cost` units of `key`.
    pub fn new(policy: &'a Policy, key: &'a Key, op: Op, cost: u32) -> Self {
        Self { policy, key, op, cost }
    }

    /// Returns `true` if the request changes no state. It need not wait for others, and an error of it
    /// has counted nothing.
    pub(super) fn is_peek(&self) -> bool {
        self.op == Op::Peek || self.cost == 0
    }

    /// Returns a copy that owns its policy and its key, for a future.
    pub(crate) fn owned(&self) -> OwnedRequest {
        OwnedRequest { policy: self.policy.clone(), key: self.key.clone(), op: self.op, cost: self.cost }
    }
}

/// The maximum number of keys of one decision.
pub(crate) const MAX_MEMBERS: usize = 8;

impl StorageRequest<'_> {
    /// Checks that [`Storage::decide_all`] can decide on these members together.
    ///
    /// # Errors
    ///
    /// Returns an error of the kind [`Unsupported`](StorageErrorKind::Unsupported) if
    ///
    /// - there are more than eight members,
    /// - one of several members is a charge,
    /// - two members have the same key and the same policy [digest](Policy::digest), which a policy
    ///   shares with its [shadows](Policy::shadows). The message names the policy and does not
    ///   contain the key.
    pub fn check_members(members: &[Self]) -> Result<(), StorageError> {
        let unsupported = |message: String| Err(StorageError::new(StorageErrorKind::Unsupported, message));
        if members.len() > MAX_MEMBERS {
            return unsupported(format!("{} keys in one decision, at most {MAX_MEMBERS} are supported", members.len()));
        }
        if members.len() > 1 && members.iter().any(|member| member.op == Op::Charge) {
            return unsupported("several keys are decided by hits and peeks: charge each key by itself".to_owned());
        }
        let is_same = |a: &Self, b: &Self| a.policy.digest() == b.policy.digest() && a.key == b.key;
        match (1..members.len()).find(|&at| members[..at].iter().any(|before| is_same(before, &members[at]))) {
            None => Ok(()),
            Some(at) => unsupported(format!(
                "two policies {:?} with the same key in one decision: give each of them its own name",
                members[at].policy.identity()
            )),
        }
    }
}

/// Returns the error of a storage that does not decide on several keys together.
pub(super) fn decides_one_key() -> ConfigError {
    ConfigError::new(
        "this storage decides on one key at a time: wrap it as `InOrder::new(storage)`, which decides one after the \
         other and refunds, or use a storage that decides on several keys together, such as `MemoryStorage`",
    )
}

/// A [`StorageRequest`] that owns its policy and its key.
#[derive(Clone, Debug)]
pub(crate) struct OwnedRequest {
    pub(crate) policy: Policy,
    pub(crate) key: Key,
    pub(crate) op: Op,
    pub(crate) cost: u32,
}

impl OwnedRequest {
    pub(crate) fn borrow(&self) -> StorageRequest<'_> {
        StorageRequest::new(&self.policy, &self.key, self.op, self.cost)
    }
}

/// A decision reduced to the values that response headers report: its time, and the status of one
/// limit. [`Storage::try_admit`] fills it in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a storage fills in every field")]
pub struct Summary {
    /// The time of the decision, by the wall clock.
    pub at: Timestamp,
    /// The status that [`Decision::shown`] returns for the same decision.
    pub limit: Status,
}

impl Summary {
    /// Returns the decision if [`Storage::try_admit`] has filled in a refusal. Returns `None` if
    /// the caller must call [`Storage::decide`].
    #[inline]
    pub(crate) fn refusal(&self, request: &StorageRequest<'_>) -> Option<Decision> {
        match request.policy.limits() {
            [limit] if !self.limit.is_admitted() && !limit.counts_refusals() => {
                Some(Decision::new(self.at, request.cost, self.limit))
            }
            _ => None,
        }
    }

    /// Removes a refusal from the summary, so that the caller calls [`Storage::decide`]. Returns
    /// `false`, the result of [`Storage::try_admit`] in this case.
    pub(crate) fn remove_refusal(summary: Option<&mut Self>) -> bool {
        if let Some(summary) = summary {
            *summary = Self::default();
        }
        false
    }
}

impl Default for Summary {
    #[inline]
    fn default() -> Self {
        Self { at: Timestamp::EPOCH, limit: Status::admitted(0, 0, 0) }
    }
}

/// Stores the rate limit states of keys, and makes atomic decisions on them.
///
/// For a decision, a storage
///
/// 1. loads the states of the key,
/// 2. calls [`Policy::decide`] with the storage's own time,
/// 3. saves the changed states.
///
/// Nothing else may change the states of the key between these steps. The same applies to
/// [`clear`](Self::clear) and [`settle`](Self::settle).
///
/// A state belongs to
///
/// - a policy, identified by [`Policy::identity`],
/// - a key,
/// - a limit, identified by its digest in [`Policy::limit_digests`].
///
/// A digest identifies the position, the strategy and the period of a limit. It may differ between
/// builds of a program. A storage that outlives the process must therefore store those three
/// instead of the digest.
///
/// A [`StorageFuture`] owns the values that it needs. A limiter or a layer keeps its storage in an
/// [`Arc`], which its clones share, so an implementation does not have to be `Clone`.
/// `testing::StorageLaws` (feature `testing`) tests an implementation.
///
/// A wrapper implements [`wrapped`](Self::wrapped), and forwards [`check`](Self::check),
/// [`clear_all`](Self::clear_all), [`keys`](Self::keys) and [`validate`](Self::validate), because the
/// default implementations do not ask the inner storage. For several keys, it also forwards
/// [`decide_all`](Self::decide_all), [`validate_members`](Self::validate_members) and
/// [`needs_outer_key`](Self::needs_outer_key).
///
/// # Examples
///
/// ```
/// use std::collections::HashMap;
/// use std::sync::{Arc, Mutex};
/// use tower_ratelimit::storage::{Clock, Storage, StorageFuture, StorageRequest, SystemClock};
/// use tower_ratelimit::strategy::State;
/// use tower_ratelimit::{Decision, Key, Policy};
///
/// /// Keeps all states in a map, and never removes any.
/// #[derive(Debug)]
/// struct MapStorage {
///     states: Mutex<HashMap<(String, Key, u32), State>>,
///     clock: Arc<dyn Clock>,
/// }
///
/// impl MapStorage {
///     fn new(clock: impl Clock) -> Self {
///         Self { states: Mutex::default(), clock: Arc::new(clock) }
///     }
///
///     fn with_states<T>(&self, policy: &Policy, key: &Key, f: impl FnOnce(&mut [State]) -> T) -> T {
///         let mut map = self.states.lock().unwrap();
///         let name = |digest: &u32| (policy.identity().to_owned(), key.clone(), *digest);
///         let names: Vec<_> = policy.limit_digests().iter().map(name).collect();
///         let mut states: Vec<_> = names.iter().map(|name| map.remove(name).unwrap_or_default()).collect();
///         let result = f(&mut states);
///         map.extend(names.into_iter().zip(states));
///         result
///     }
/// }
///
/// impl Storage for MapStorage {
///     fn decide(&self, request: StorageRequest<'_>) -> StorageFuture<Decision> {
///         let StorageRequest { policy, key, op, cost, .. } = request;
///         let now = self.clock.now();
///         StorageFuture::ok(self.with_states(policy, key, |states| policy.decide(states, now, op, cost)))
///     }
///
///     fn clear(&self, policy: &Policy, key: &Key) -> StorageFuture<()> {
///         StorageFuture::ok(self.with_states(policy, key, |states| states.fill(State::Fresh)))
///     }
///
///     fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> StorageFuture<()> {
///         let now = self.clock.now();
///         StorageFuture::ok(self.with_states(policy, key, |states| policy.settle(states, now, decision, actual)))
///     }
/// }
///
/// let storage = MapStorage::new(SystemClock::new());
///
/// // In a test:
/// # #[cfg(feature = "testing")]
/// tower_ratelimit::testing::StorageLaws::new(|clock| MapStorage::new(clock)).scripts(64).check();
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a storage",
    label = "expected a storage such as `MemoryStorage`, `RedisStorage` or `AnyStorage`",
    note = "write `?` after a constructor that can fail, or parse a URL: `\"redis://cache/\".parse::<AnyStorage>()?`"
)]
pub trait Storage: Any + fmt::Debug + Send + Sync {
    /// Decides on a hit or a peek, or charges units, as [`Policy::decide`] does.
    ///
    /// A charge is refused only as [storage full](Decision::is_storage_full) or
    /// [contended](Decision::is_contended). A refused charge has spent nothing.
    ///
    /// # Errors
    ///
    /// The future returns an error if the storage fails. Its
    /// [`may_have_counted`](StorageError::may_have_counted) returns `true` if units may have been
    /// spent.
    fn decide(&self, request: StorageRequest<'_>) -> StorageFuture<Decision>;

    /// Decides on several keys together, as [`Policy::decide_all`] does: all hits spend, or none
    /// does. Each of `members` is a policy with its key, a cost, and an operation, which is a hit
    /// or a peek. Returns the decisions in the order of the members.
    ///
    /// The hits spend if all of them are admitted. If one hit is refused, the decision on another hit
    /// can still admit, but [has spent](Decision::has_spent) nothing. Each decision can be
    /// [settled](Self::settle) with its own policy and key.
    ///
    /// An implementation calls [`StorageRequest::check_members`] first, and overrides
    /// [`validate_members`](Self::validate_members) too. The default implementation decides on one
    /// member by [`decide`](Self::decide).
    ///
    /// # Errors
    ///
    /// The future returns an error if the storage fails, or if
    /// [`check_members`](StorageRequest::check_members) rejects the members. The default
    /// implementation returns an error of the kind [`Unsupported`](StorageErrorKind::Unsupported)
    /// for more than one member.
    fn decide_all(&self, members: &[StorageRequest<'_>]) -> StorageFuture<Vec<Decision>> {
        match *members {
            [] => StorageFuture::ok(Vec::new()),
            [only] => self.decide(only).map(|decided| Ok(vec![decided?])),
            _ => StorageFuture::ready(Err(StorageError::unsupported_policy(decides_one_key()))),
        }
    }

    /// Tries to admit a hit without a future, which is faster than [`decide`](Self::decide). The
    /// operation of `request` is [`Op::Hit`].
    ///
    /// The caller passes `None`, or a default summary, which the storage fills in:
    ///
    /// | result | summary | meaning |
    /// |---|---|---|
    /// | `true` | the decision | the hit was counted, and does not have to wait |
    /// | `false` | a refusal by the only limit of the policy | nothing was counted; the caller may refuse the hit without calling `decide` |
    /// | `false` | anything else, or `None` | nothing was counted; the caller calls `decide` |
    ///
    /// Filling in a refusal is optional. A wrapper whose own `decide` must run for each refusal
    /// resets the summary to its default.
    ///
    /// The default implementation returns `false`, and does not change the summary.
    #[inline]
    fn try_admit(&self, request: StorageRequest<'_>, summary: Option<&mut Summary>) -> bool {
        let _ = (request, summary);
        false
    }

    /// Removes the states of the key in all limits of the policy.
    ///
    /// # Errors
    ///
    /// The future returns an error if the storage fails.
    fn clear(&self, policy: &Policy, key: &Key) -> StorageFuture<()>;

    /// Corrects the cost of a hit to `actual` units, as [`Policy::settle`] does. `decision` is the
    /// decision on that hit. Does nothing if the decision [has not spent](Decision::has_spent)
    /// units. Call this method once per hit, because a second call is not detected.
    ///
    /// # Errors
    ///
    /// The future returns an error if the storage fails.
    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> StorageFuture<()>;

    /// Checks that the storage is reachable, for example for a health endpoint. Makes one attempt
    /// and spends nothing.
    ///
    /// A wrapper checks its inner storage, and a [breaker](super::Breaker) checks its primary
    /// storage. The default implementation never fails.
    ///
    /// # Errors
    ///
    /// The future returns an error if the storage is not reachable.
    fn check(&self) -> StorageFuture<()> {
        StorageFuture::ok(())
    }

    /// Waits until a [check](Self::check) succeeds, for at most `timeout`. Call this method before
    /// the program accepts traffic.
    ///
    /// The first check of a storage on a server opens its connection. A check that fails is repeated
    /// after 20 milliseconds. Do not implement this method.
    ///
    /// # Errors
    ///
    /// When `timeout` has passed, returns the error of the last check that did not time out. If all
    /// checks timed out, returns a timeout. Outside of a tokio runtime, returns an error of the
    /// kind [`Cancelled`](StorageErrorKind::Cancelled) at once, unless the first check is ready, as
    /// that of a [`MemoryStorage`](crate::MemoryStorage).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::Storage;
    /// use tower_ratelimit::storage::AnyStorage;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let storage: AnyStorage = "memory://".parse()?;
    /// storage.ready(Duration::from_secs(5)).await?;
    /// # Ok(())
    /// # }
    /// ```
    fn ready(&self, timeout: Duration) -> impl Future<Output = Result<(), StorageError>> + Send
    where
        Self: Sized,
    {
        until_ready(timeout, || self.check())
    }

    /// Removes all keys of this storage, and returns their number. A shared storage removes all
    /// keys with its prefix, including the keys of other processes.
    ///
    /// Use it in tests and for operations, because it may visit every key. Hits during the call may
    /// stay counted.
    ///
    /// # Errors
    ///
    /// The future returns an error if the storage fails. The default implementation,
    /// [`Cas`](super::Cas) and `MemcachedStorage` always return an error of the kind
    /// [`Unsupported`](StorageErrorKind::Unsupported).
    fn clear_all(&self) -> StorageFuture<u64> {
        StorageFuture::ready(Err(cannot_list()))
    }

    /// Returns a page of the keys of a policy, each with a peek at its limits. Use it for operators:
    /// [`RateLimiter::keys`](crate::RateLimiter::keys) has an example.
    ///
    /// A page lists the keys that have spent units, until these units are available again.
    ///
    /// - A page can have fewer keys than the `limit`, even none, although other keys follow. The
    ///   last page has no [`next`](KeyPage::next).
    /// - Each page is one short call, and one peek per key. Nothing is locked between two pages. A
    ///   key that is in use from the first page to the last is listed. Other keys may be missing.
    /// - A key is left out if its text and the policy's identity take more than 200 bytes together,
    ///   because its name on the storage ends in a hash. So is a key whose states have the format of
    ///   another version of this crate.
    ///
    /// | storage | pages |
    /// |---|---|
    /// | [`MemoryStorage`](crate::MemoryStorage) | if it was built with [`keep_keys`](super::MemoryStorageBuilder::keep_keys), in random order |
    /// | `RedisStorage` | in random order, by `SCAN` on each server; some keys twice, and some pages longer than the `limit`; if a cluster loses the server of a page, the next one is an error |
    /// | `EtcdStorage`, `PostgresStorage`, `SqliteStorage` | in the order of the keys' texts, from a range of the primary key |
    /// | `MemcachedStorage`, [`Cas`](super::Cas) | none |
    ///
    /// A wrapper lists the keys of its inner storage, and a [breaker](super::Breaker) those of its
    /// primary storage. The units of [leases](super::Leases) count as spent.
    ///
    /// # Errors
    ///
    /// The future returns an error of the kind [`Unsupported`](StorageErrorKind::Unsupported) if
    /// the storage cannot list its keys, which is the default, or if a part of the request is
    /// invalid. It returns another error if the storage fails.
    fn keys(&self, request: KeysRequest<'_>) -> StorageFuture<KeyPage> {
        let _ = request;
        StorageFuture::ready(Err(cannot_list()))
    }

    /// Checks that this storage supports the policy.
    ///
    /// A limiter and a layer call this method when they are built, and when their
    /// [`LivePolicy`](crate::LivePolicy) is set. They do not check a policy that is chosen per
    /// request. So [`decide`](Self::decide) must handle every policy, and can return an error for
    /// an unsupported one.
    ///
    /// An implementation must not set a [`LivePolicy`](crate::LivePolicy), because that can
    /// deadlock.
    ///
    /// # Errors
    ///
    /// Returns an error if the storage does not support the policy. For example, its states can
    /// grow longer than the storage allows. The default implementation never fails.
    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        let _ = policy;
        Ok(())
    }

    /// Returns a store for the slots of an [`InFlightLayer`](crate::InFlightLayer) that several
    /// processes share. [`Cas`](super::Cas) and this crate's storages on servers return a store.
    /// The default implementation and wrappers, except [`AnyStorage`](super::AnyStorage), return
    /// `None`. Other crates cannot override this method, because the type of the store has no
    /// public path.
    fn slots(&self) -> Option<Arc<dyn SlotStore>> {
        None
    }

    /// Checks that this storage decides on several keys [together](Self::decide_all), and that
    /// `policies` can be among their policies. Policies that are not known yet are left out.
    ///
    /// A layer with several keys calls this method when it is built.
    ///
    /// # Errors
    ///
    /// Returns an error if the storage does not support it, which is the default.
    fn validate_members(&self, policies: &[Policy]) -> Result<(), ConfigError> {
        let _ = policies;
        Err(decides_one_key())
    }

    /// Returns `true` if this storage decides on several keys [together](Self::decide_all) only if
    /// all of them are [within](Key::within) the same key. A Redis Cluster keeps such keys on one
    /// server. Defaults to `false`. `policy` is the name of the policy of one of the keys, if it is
    /// known.
    ///
    /// A layer with several keys then needs an [outer key](crate::RateLimitLayer::within).
    fn needs_outer_key(&self, policy: Option<&str>) -> bool {
        let _ = policy;
        false
    }

    /// Returns the storage that this one wraps, for example to find a memory storage that is too
    /// small, or a [breaker](super::Breaker) inside of another one.
    ///
    /// A wrapper returns its inner storage, and an [`Arc`] the storage in it. The default
    /// implementation returns `None`.
    fn wrapped(&self) -> Option<&dyn Storage> {
        None
    }
}

/// The delay between two checks.
const RETRY_AFTER: Duration = Duration::from_millis(20);

/// The longest time of the first check. Each check that takes longer doubles it. A storage with a
/// long timeout may wait for a connection that has stopped replying, and the next check replaces
/// it. An attempt to connect takes at most half of this time, so the check returns its error.
const FIRST_LIMIT: Duration = Duration::from_secs(2);

/// The longest timeout. An instant in the far future can overflow on some systems.
const LONGEST: Duration = Duration::from_secs(365 * 86_400);

/// Repeats `check` until it succeeds, for at most `longest`.
///
/// # Errors
///
/// Returns the last error. A timeout does not replace an earlier error, because that error explains
/// more.
async fn until_ready(longest: Duration, check: impl Fn() -> StorageFuture<()> + Send) -> Result<(), StorageError> {
    let mut checked = check();
    if let Some(Ok(())) = checked.as_ready() {
        return Ok(());
    }
    Handle::try_current().map_err(|_| StorageError::no_runtime())?;
    let deadline = Instant::now() + longest.min(LONGEST);
    let (mut limit, mut last) = (FIRST_LIMIT, None);
    loop {
        let within = limit.min(deadline.saturating_duration_since(Instant::now()));
        let result = timeout(within, checked).await.unwrap_or_else(|_| {
            limit *= 2;
            Err(took_longer(within))
        });
        let Err(error) = result else { return Ok(()) };
        let error = match &last {
            Some(before) if error.is_timeout() => before,
            _ => last.insert(error),
        };
        if Instant::now() + RETRY_AFTER >= deadline {
            return Err(error.clone());
        }
        sleep(RETRY_AFTER).await;
        checked = check();
    }
}

fn took_longer(limit: Duration) -> StorageError {
    let message = format!("the check of the storage took longer than {limit:?}");
    StorageError::new(StorageErrorKind::Timeout, message).uncounted()
}

/// Iterates over a storage and the storages that it wraps, from the outside in.
pub(crate) fn layers(storage: &dyn Storage) -> impl Iterator<Item = &dyn Storage> {
    successors(Some(storage), |storage| storage.wrapped())
}

/// Defines methods of [`Storage`] that call the same methods of another storage.
macro_rules! forward_storage {
    ($self:ident => $other:expr; $($method:ident),+) => {
        $(forward_storage!(@$method $self => $other);)+
    };
    (@decide $self:ident => $other:expr) => {
        #[inline]
        fn decide(&$self, request: StorageRequest<'_>) -> StorageFuture<Decision> {
            $other.decide(request)
        }
    };
    (@try_admit $self:ident => $other:expr) => {
        #[inline]
        fn try_admit(&$self, request: StorageRequest<'_>, summary: Option<&mut Summary>) -> bool {
            $other.try_admit(request, summary)
        }
    };
    (@decide_all $self:ident => $other:expr) => {
        fn decide_all(&$self, members: &[StorageRequest<'_>]) -> StorageFuture<Vec<Decision>> {
            $other.decide_all(members)
        }
    };
    (@clear $self:ident => $other:expr) => {
        fn clear(&$self, policy: &Policy, key: &Key) -> StorageFuture<()> {
            $other.clear(policy, key)
        }
    };
    (@settle $self:ident => $other:expr) => {
        fn settle(&$self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> StorageFuture<()> {
            $other.settle(policy, key, decision, actual)
        }
    };
    (@check $self:ident => $other:expr) => {
        fn check(&$self) -> StorageFuture<()> {
            $other.check()
        }
    };
    (@clear_all $self:ident => $other:expr) => {
        fn clear_all(&$self) -> StorageFuture<u64> {
            $other.clear_all()
        }
    };
    (@keys $self:ident => $other:expr) => {
        fn keys(&$self, request: crate::storage::KeysRequest<'_>) -> StorageFuture<crate::storage::KeyPage> {
            $other.keys(request)
        }
    };
    (@validate $self:ident => $other:expr) => {
        fn validate(&$self, policy: &Policy) -> Result<(), ConfigError> {
            $other.validate(policy)
        }
    };
    (@validate_members $self:ident => $other:expr) => {
        fn validate_members(&$self, policies: &[Policy]) -> Result<(), ConfigError> {
            $other.validate_members(policies)
        }
    };
    (@needs_outer_key $self:ident => $other:expr) => {
        fn needs_outer_key(&$self, policy: Option<&str>) -> bool {
            $other.needs_outer_key(policy)
        }
    };
    (@slots $self:ident => $other:expr) => {
        fn slots(&$self) -> Option<Arc<dyn SlotStore>> {
            $other.slots()
        }
    };
    (@wrapped $self:ident => $other:expr) => {
        fn wrapped(&$self) -> Option<&dyn Storage> {
            $other.wrapped()
        }
    };
}
pub(super) use forward_storage;

// There are two implementations, because a reference to a type that may be unsized does not convert
// into the `&dyn Storage` that `wrapped` returns.
impl<St: Storage> Storage for Arc<St> {
    forward_storage!(self => (**self); decide, try_admit, decide_all, clear, settle, check, clear_all, keys,
        validate, validate_members, needs_outer_key, slots);

    /// Returns the storage in the `Arc`.
    fn wrapped(&self) -> Option<&dyn Storage> {
        Some(&**self)
    }
}

impl Storage for Arc<dyn Storage> {
    forward_storage!(self => (**self); decide, try_admit, decide_all, clear, settle, check, clear_all, keys,
        validate, validate_members, needs_outer_key, slots);

    /// Returns the storage in the `Arc`.
    fn wrapped(&self) -> Option<&dyn Storage> {
        Some(&**self)
    }
}
