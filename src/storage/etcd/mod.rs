mod decide;
mod error;
mod lease;
mod link;
mod store;
mod url;
mod wire;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

pub use self::error::EtcdStorageError;
use self::lease::Leases;
use self::link::Members;
use self::store::Store;
use self::url::Target;
use crate::ConfigError;
use crate::error::or_panic;
use crate::storage::cas::skew;
use crate::storage::link::until_ready;
use crate::storage::url::checked_prefix;
use crate::storage::{Cas, Clock, deadline};

/// Keeps states in etcd, so that many processes share them.
///
/// Clones are handles on the same connections. There is one for each member that is asked, for all who ask at once.
///
/// A policy is decided here and stored if nobody else has stored meanwhile, all limits or none, as [`Cas`] says: two trips for a hit
/// that is admitted, one for a refusal or a peek. Hits that wait for one key in this process are decided together. What other
/// processes are faster with too often is a refusal that is [contended](crate::Decision::is_contended): no hit is admitted beyond the limit.
///
/// Every admitted hit is a write that a majority of the members agrees on and puts on disk. That is for limits that have to hold on
/// whatever happens, at some hundreds of hits a second; for thousands, use `RedisStorage`.
///
/// etcd from 3.4 on.
///
/// # URLs
///
/// | URL | of |
/// |---|---|
/// | `etcd://host:2379` | one member |
/// | `etcd://host,host:2379,[2001:db8::1]` | several members of one cluster, any of which will do |
/// | `etcd://user:password@host` | the same with a login |
/// | `etcds://host`, `etcd+tls://host` | the same over TLS (feature `etcd-rustls`) |
///
/// In a user or a password what is no letter or digit is written with percent: `p%40ss` is `p@ss`. Behind a `?` and with `&` between
/// them stand options:
///
/// | option | unless it is there | says |
/// |---|---|---|
/// | `prefix` | `rl` | what all keys begin with |
/// | `deadline` | `100ms` | how long an answer may take: `50ms`, `2s` |
/// | `max-skew` | `5s` | is [`max_skew`](Self::max_skew): `500ms`, `5s` |
/// | `long-logs` | `refuse` | `allow` is [`allow_long_logs`](Self::allow_long_logs) |
/// | `ca` | the system's roots | for TLS: a file with the certificates to trust, in PEM |
///
/// # When a member is away
///
/// 1. Nothing is connected before it is used, so a program starts while etcd is down.
/// 2. No answer takes longer than its deadline, whether it waits for a connection or for a member.
/// 3. A call that could not be sent goes to another member at once, and so does one that a member has not executed because it knows of no
///    leader. What is only read is asked of another member when half of the time is over.
/// 4. A swap that was sent is not sent again, as it may have been executed
///    ([`may_have_counted`](EtcdStorageError::may_have_counted)).
/// 5. After a connection failed, for whatever reason, it is tried again when somebody asks, 20 to 200 milliseconds later. It is
///    replaced when it breaks, and when calls have waited in vain for about three deadlines, also when their callers left
///    earlier.
/// 6. At most 1,024 calls of a process are in flight on a connection, and fewer while calls miss their deadline. A call
///    that does not fit is an error after three quarters of its deadline: "overloaded", and nothing was sent.
///
/// | what happens | what [`OnError`](crate::OnError) decides on | and then |
/// |---|---|---|
/// | a member dies or hangs that leads nobody | the requests that were being stored by it | decisions by the others |
/// | the leader dies or hangs | requests until there is another: one to two election timeouts, a second or two unless etcd is told otherwise | decisions |
/// | there is no majority | every request | decisions within a second of its return |
/// | nobody is there yet, or any more | every request, at once | decisions within a second of its return |
/// | the password is wrong | every request | decisions when it is put right |
/// | it has no space left | every hit, at once | decisions when it has, and its alarm is off |
/// | a reply is lost | that request | it may have been counted, once |
///
/// A login is checked when a connection is made, and takes etcd a tenth of a second (`--bcrypt-cost`): the first requests may be
/// past their deadline by then. [`ready`](Self::ready) waits for it. The user needs to read and write what begins with the prefix.
///
/// # Clocks
///
/// etcd reports no time to a client that may only read and write keys, so each process decides by its own
/// machine's clock. Let NTP set it. The newest instant at which a key was decided is stored with the key, and no
/// decision is made earlier than that, as long as it is at most `max_skew` (5 seconds) ahead of the machine's
/// clock. [`Cas`](Cas#clocks) says what that promises, and what may be admitted beyond `max_skew`:
/// `100/minute` with clocks 61 seconds apart admitted 10,987 in 6 seconds.
///
/// # What stands there
///
/// The key `rl:free|t:alice` holds what the limits of the policy `free` remember of the [key](crate::Key) `t:alice`, limit by limit, as
/// text: `@INSTANT[1.fixed-window/60000000 END,COUNT,BEGINNING]`, with the newest instant of a decision, the limit's place, its period and all instants in microseconds.
///
/// Each hangs on a lease, and goes when that ends: `max_skew` after the states have stopped to matter, and by 4 seconds to a quarter of
/// their time later. A lease is shared by the keys of a process that end at about the same time, so it costs one write in some seconds.
/// What is cleared is removed at once.
///
/// etcd remembers what stood there before until it is told to forget it, and each admitted hit is a change: let it run with
/// `--auto-compaction-retention` (`--auto-compaction-mode revision --auto-compaction-retention 10000`, or an hour), or its space will
/// run out.
///
/// A policy that can keep more than 1,000 log entries of a key (a moving window of more than 1,000) is an
/// error where it meets the storage ([`Storage::validate`](crate::Storage::validate)): use a
/// `sliding-window-counter` instead, or [`allow_long_logs`](Self::allow_long_logs). Beyond 1.5 MB, some
/// 75,000 entries, it is an error in any case.
///
/// It needs a runtime of tokio's with time and I/O, and may be made outside of one.
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::EtcdStorage;
///
/// let storage = EtcdStorage::new("etcd://localhost/?prefix=shop")?.deadline(Duration::from_millis(50));
///
/// let error = EtcdStorage::new("http://localhost").unwrap_err();
/// assert!(error.to_string().starts_with("cannot read the URL \"http://localhost\": its scheme is \"http\", write etcd://"));
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
#[derive(Clone)]
pub struct EtcdStorage {
    store: Store,
    /// Where time is not this machine's: in tests.
    clock: Option<Arc<dyn Clock>>,
    long_logs: bool,
    max_skew: Duration,
    deciding: Cas<Store>,
}

impl EtcdStorage {
    /// A storage on the members that `url` names. It connects to none of them yet.
    ///
    /// # Errors
    ///
    /// When the URL cannot be understood, or needs a feature that is not enabled. It is quoted without its login.
    pub fn new(url: &str) -> Result<Self, ConfigError> {
        let Target { members, access, prefix, deadline, long_logs, max_skew } = Target::parse(url)?;
        let (members, leases) = (Members::new(members, access), Arc::new(Leases::new()));
        let store = Store { members, leases, prefix: prefix.into(), deadline };
        let deciding = Cas::new(store.clone());
        Ok(Self { store, clock: None, long_logs, max_skew, deciding }.rebuilt())
    }

    /// The same with a `Cas` that has the current settings.
    fn rebuilt(mut self) -> Self {
        self.deciding = Cas::new(self.store.clone()).deadline(self.store.deadline).max_skew(self.max_skew);
        if !self.long_logs {
            self.deciding = self.deciding.without_long_logs();
        }
        if let Some(clock) = &self.clock {
            self.deciding = self.deciding.clock(Arc::clone(clock));
        }
        self
    }

    /// What all keys begin with, instead of what the URL says: programs that share etcd tell theirs apart with it.
    ///
    /// # Panics
    ///
    /// When it is not 1 to 64 ASCII characters, or holds white space, `{` or `}`; [`try_prefix`](Self::try_prefix) returns an
    /// error instead.
    #[must_use]
    #[track_caller]
    pub fn prefix(self, prefix: &str) -> Self {
        or_panic(self.try_prefix(prefix))
    }

    /// As [`prefix`](Self::prefix).
    ///
    /// # Errors
    ///
    /// When it is not 1 to 64 ASCII characters, or holds white space, `{` or `}`.
    pub fn try_prefix(mut self, prefix: &str) -> Result<Self, ConfigError> {
        checked_prefix(prefix)?;
        self.store.prefix = prefix.into();
        Ok(self.rebuilt())
    }

    /// How long an answer may take, instead of what the URL says.
    ///
    /// # Panics
    ///
    /// When it is less than a millisecond or more than an hour; [`try_deadline`](Self::try_deadline) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn deadline(self, deadline: Duration) -> Self {
        or_panic(self.try_deadline(deadline))
    }

    /// As [`deadline`](Self::deadline).
    ///
    /// # Errors
    ///
    /// When it is less than a millisecond or more than an hour.
    pub fn try_deadline(mut self, deadline: Duration) -> Result<Self, ConfigError> {
        deadline::checked(deadline)?;
        self.store.deadline = deadline;
        Ok(self.rebuilt())
    }

    /// Allows policies that can keep more than 1,000 log entries of a key, which are refused otherwise.
    ///
    /// Of the library's strategies only the moving window keeps a log. Each hit loads and stores the
    /// whole log, and etcd keeps the old ones until it compacts them: `moving-window 5000/day` wrote 41 kB
    /// a hit and filled 256 MB in 11,400 hits. Prefer
    /// [`SlidingWindowCounter`](crate::SlidingWindowCounter), which keeps two numbers.
    #[must_use]
    pub fn allow_long_logs(self) -> Self {
        Self { long_logs: true, ..self }.rebuilt()
    }

    /// Sets how far the newest decision on a key may be ahead of this node's clock, instead of the URL.
    /// See [clocks](Self#clocks). Defaults to 5 seconds.
    ///
    /// # Panics
    ///
    /// If it is more than a day. [`try_max_skew`](Self::try_max_skew) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn max_skew(self, max_skew: Duration) -> Self {
        or_panic(self.try_max_skew(max_skew))
    }

    /// As [`max_skew`](Self::max_skew).
    ///
    /// # Errors
    ///
    /// If it is more than a day.
    pub fn try_max_skew(self, max_skew: Duration) -> Result<Self, ConfigError> {
        Ok(Self { max_skew: skew::checked(max_skew)?, ..self }.rebuilt())
    }

    /// Decides by this clock instead of the machine's: for tests (feature `testing`).
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        Self { clock: Some(Arc::new(clock)), ..self }.rebuilt()
    }

    /// Returns as soon as etcd answers, which takes a majority of its members: for a program that would rather not start without it.
    /// It tries again until `timeout` has passed.
    ///
    /// # Errors
    ///
    /// What was wrong at last.
    pub async fn ready(&self, timeout: Duration) -> Result<(), EtcdStorageError> {
        until_ready(Instant::now() + timeout.min(FOREVER), |deadline| self.store.look(deadline)).await
    }

    /// Forgets all keys of the prefix, also those that other processes keep under it, in one call. Returns how many there were.
    ///
    /// # Errors
    ///
    /// When etcd does not answer within the [deadline](Self::deadline). The keys may be forgotten all the same.
    pub async fn reset(&self) -> Result<u64, EtcdStorageError> {
        self.store.reset().await
    }
}

/// An instant that is further away cannot be counted on every system.
const FOREVER: Duration = Duration::from_secs(365 * 86_400);

impl fmt::Debug for EtcdStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Store { members, prefix, deadline, .. } = &self.store;
        f.debug_struct("EtcdStorage")
            .field("members", members)
            .field("prefix", prefix)
            .field("deadline", deadline)
            .finish_non_exhaustive()
    }
}
