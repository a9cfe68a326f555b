use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::MemcachedStorageError;
use super::client::Client;
use super::server_time::MachineClock;
use super::url::Target;
use crate::error::or_panic;
use crate::storage::cas::skew;
use crate::storage::link::overloaded;
use crate::storage::url::checked_prefix;
use crate::storage::{Ask, Cas, Clock, Storage, deadline};
use crate::{ConfigError, Decision, Key, Policy};

/// Keeps states on memcached servers, so that many processes share them.
///
/// Clones are handles on the same connections. There is one for each server, for all who ask at once.
///
/// memcached decides nothing, so hits are decided here: what stands under a key is loaded, decided on, and stored if nobody else has
/// stored meanwhile. That is exact however many processes ask, and takes two trips. Hits of one process that wait for one key are
/// decided together. A hit that others outran all the time is refused, to come back soon:
/// [contended](crate::Decision::is_contended). All of it is said at [`Cas`].
///
/// memcached from 1.6.10 on (2021), which is when the meta commands became what they are.
///
/// # URLs
///
/// | URL | of |
/// |---|---|
/// | `memcached://host:11211` | one server |
/// | `memcached://host,host:11311,[2001:db8::1]:11211` | several, each with its share of the keys |
/// | `memcached+unix:///run/memcached.sock` | one server on this machine |
///
/// Behind a `?` and with `&` between them stand options:
///
/// | option | unless it is there | says |
/// |---|---|---|
/// | `prefix` | `rl` | what all keys begin with |
/// | `deadline` | `100ms` | how long an answer may take: `50ms`, `2s` |
/// | `max-skew` | `5s` | is [`max_skew`](Self::max_skew): `500ms`, `5s` |
/// | `long-logs` | `refuse` | `allow` is [`allow_long_logs`](Self::allow_long_logs) |
///
/// # Several servers
///
/// Which of them has a key is found by consistent hashing: it does not depend on the order in which they are named, and one server more
/// or less moves only its own share of the keys, whose counts begin anew. All processes have to name the same servers by
/// the same names. Keys are where libmemcached looks for them (`ketama_weighted` with equal weights, as pylibmc and many others
/// have it, tested with three servers; for a few numbers from 25 on it rounds its points away), and uhashring's `ketama`.
///
/// The keys of a server that is away fail, and [`OnError`](crate::OnError) decides. They do not wander to another one, which would
/// know nothing of them, and go on counting there when the first is back.
///
/// # What memcached cannot do
///
/// 1. **It forgets.** A server that is full drops what was not used for longest, and one that is started anew has nothing: counts begin
///    anew. Give it room (`-m`), and watch its `evictions`.
/// 2. **It does not decide.** The time is that of the process that decides: see [clocks](#clocks).
/// 3. **It cannot change a part of a value.** Each hit loads and stores all that is kept of its key. 18,667
///    hits of a moving window of as many moved 3.5 GB in each direction. So a policy that can keep more than
///    1,000 log entries of a key is an error where it meets the storage
///    ([`Storage::validate`](crate::Storage::validate)): use a `sliding-window-counter` instead, or
///    [`allow_long_logs`](Self::allow_long_logs).
/// 4. **It keeps at most a megabyte under a key**, some 55,000 log entries. A policy that may need more is an
///    error too. A server that was started with a smaller `-I` refuses larger values *and drops the old one*.
/// 5. **It asks nobody for a password** here: no login is sent, and nothing is encrypted. Keep it where only friends are.
///
/// # Clocks
///
/// Let NTP set all clocks. Then nothing of this section matters.
///
/// 1. A process learns a server's time when it connects and once a minute (`stats`), in whole seconds. If the
///    machine's clock differs from it by more than about 2 seconds, the process corrects it, and logs a
///    warning. So the servers' clocks decide: a machine that is a minute or a year off admits nothing more.
///    [`Decision::at`] and the fields made of it show the server's time.
/// 2. What is left, a second or two between processes, is no reason to end a window early: the newest instant
///    at which a key was decided is stored with the key, and no decision is made earlier than that, as long as
///    it is at most `max_skew` (5 seconds) ahead. [`Cas`](Cas#clocks) says what that promises.
/// 3. A proxy in front of memcached may not know `stats`. Then each process decides by its own clock, and 2. holds.
/// 4. What is kept for more than 30 days expires at an instant of the server's own clock. Without `stats` it never
///    expires: an instant of another clock may be long over for the server, which would forget it at once. It
///    leaves when memcached needs its room.
///
/// # When a server is away
///
/// 1. Nothing is connected before it is used, so a program starts while its servers are down.
/// 2. No call takes longer than its deadline, whether it waits for a connection or for an answer.
/// 3. After a connection failed, for whatever reason, it is tried again when somebody asks, 20 to 200 milliseconds later; who
///    asks before that is told of the failure at once.
/// 4. A connection is replaced when it breaks, and when calls have waited in vain for about three deadlines, also when
///    their callers left earlier.
/// 5. At most 1,024 calls of a process are in flight on a connection, and fewer while calls miss their deadline. A call
///    that does not fit is an error after three quarters of its deadline: "overloaded", and nothing was sent.
/// 6. A state that was sent to be stored is not sent again, as it may have been
///    ([`may_have_counted`](MemcachedStorageError::may_have_counted)).
///
/// | fault | requests that fail | for how long | lost |
/// |---|---|---|---|
/// | a server is down | those whose keys are on it, at once | until at most a second after it is back | all that it has counted |
/// | a server hangs, or the network loses everything | those whose keys are on it, after the deadline | until at most a second after it goes on | nothing |
/// | a reply is lost, a connection breaks | those in flight | once | nothing; they may have been counted, once |
/// | a server evicts keys, or is flushed | none | | what those keys had counted: their clients start afresh |
/// | out of memory, a state that is too large | those hits, at once; nothing is counted | until that is corrected | nothing |
/// | more calls than a server answers | those that do not fit, after three quarters of the deadline | as long as it lasts | nothing |
/// | clocks of nodes differ | none within `max_skew` | | nothing: see [`Cas`](crate::storage::Cas#clocks) |
///
/// # What stands on the server
///
/// Under `rl:free|t:alice`, all that the limits of the policy `free` remember of the [key](crate::Key) `t:alice`:
/// `@INSTANT`, the newest instant of a decision, and `[1.fixed-window/60000000 END,COUNT,BEGINNING]` for each limit, with its
/// period and all instants in microseconds. What is no letter,
/// digit or one of a few signs is written as in a URL, a space as `\s`. It expires `max_skew` and at most some seconds more after it has stopped to matter.
///
/// memcached's keys have at most 250 bytes. Of one that would be longer the beginning is kept, and `#` and the 128 bits of its
/// MD5 follow. That two such keys meet, and count as one, has a probability of 1 in 10^20 among a billion of them. Who chooses
/// keys can make two of their own meet, and none meet somebody else's.
///
/// memcached cannot list its keys, so there is no `reset`. Use another prefix, or empty the servers with `flush_all`.
///
/// It needs a runtime of tokio's with time and I/O, and may be made outside of one.
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::MemcachedStorage;
///
/// let storage = MemcachedStorage::new("memcached://one,two/?prefix=shop")?.deadline(Duration::from_millis(50));
///
/// let error = MemcachedStorage::new("memcached://me:secret@one").unwrap_err();
/// assert!(error.to_string().ends_with("no user and no password can be told to memcached: leave out what is before @"));
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
#[derive(Clone)]
pub struct MemcachedStorage {
    client: Client,
    prefix: Arc<str>,
    deadline: Duration,
    long_logs: bool,
    max_skew: Duration,
    /// Where time is not this machine's: in tests.
    clock: Option<Arc<dyn Clock>>,
    cas: Cas<Client>,
}

impl MemcachedStorage {
    /// A storage on the servers that `url` names. It connects to none of them yet.
    ///
    /// # Errors
    ///
    /// When the URL cannot be understood.
    pub fn new(url: &str) -> Result<Self, ConfigError> {
        let Target { servers, prefix, deadline, long_logs, max_skew } = Target::parse(url)?;
        let machine: Arc<dyn Clock> = Arc::new(MachineClock);
        let client = Client::new(servers, &prefix, deadline, &machine);
        let cas = Cas::new(client.clone());
        Ok(Self { client, prefix: prefix.into(), deadline, long_logs, max_skew, clock: None, cas }.renewed())
    }

    /// The same, where what decides knows of what was changed.
    fn renewed(mut self) -> Self {
        // A little sooner than who waits gives up, who then hears which server it was.
        self.client = self.client.with(&self.prefix, self.deadline * 15 / 16);
        self.cas = Cas::new(self.client.clone()).deadline(self.deadline).max_skew(self.max_skew);
        if !self.long_logs {
            self.cas = self.cas.without_long_logs();
        }
        if let Some(clock) = &self.clock {
            self.cas = self.cas.clock(Arc::clone(clock));
        }
        self
    }

    /// What all keys begin with, instead of what the URL says: programs that share a server tell theirs apart with it.
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
    pub fn try_prefix(self, prefix: &str) -> Result<Self, ConfigError> {
        checked_prefix(prefix)?;
        Ok(Self { prefix: prefix.into(), ..self }.renewed())
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
    pub fn try_deadline(self, deadline: Duration) -> Result<Self, ConfigError> {
        deadline::checked(deadline)?;
        Ok(Self { deadline, ..self }.renewed())
    }

    /// Allows policies that can keep more than 1,000 log entries of a key, which are refused otherwise.
    ///
    /// Of the library's strategies only the moving window keeps a log. Each hit loads and stores the
    /// whole log: with 5,000 entries that is 95 kB in each direction.
    /// Prefer [`SlidingWindowCounter`](crate::SlidingWindowCounter), which keeps two numbers.
    #[must_use]
    pub fn allow_long_logs(self) -> Self {
        Self { long_logs: true, ..self }.renewed()
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
        Ok(Self { max_skew: skew::checked(max_skew)?, ..self }.renewed())
    }

    /// Decides by this clock instead of the machine's: for tests (feature `testing`).
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        Self { clock: Some(Arc::new(clock)), ..self }.renewed()
    }

    /// Takes this clock for the machine's: for tests of clocks that differ (feature `testing`). Unlike
    /// [`clock`](Self::clock), it is corrected by the servers' time. It begins with new connections.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn machine_clock(mut self, machine: impl Clock) -> Self {
        let machine: Arc<dyn Clock> = Arc::new(machine);
        self.client = self.client.reconnected(&machine);
        self.renewed()
    }

    /// Returns as soon as all servers answer: for a program that would rather not start without them. It tries again until
    /// `timeout` has passed.
    ///
    /// # Errors
    ///
    /// What was wrong at last.
    pub async fn ready(&self, timeout: Duration) -> Result<(), MemcachedStorageError> {
        self.client.ready(Instant::now() + timeout.min(FOREVER)).await
    }
}

/// An instant that is further away cannot be counted on every system.
const FOREVER: Duration = Duration::from_secs(365 * 86_400);

type Later<T> = Pin<Box<dyn Future<Output = Result<T, MemcachedStorageError>> + Send>>;

impl Storage for MemcachedStorage {
    type Error = MemcachedStorageError;
    type Decided = Later<Decision>;
    type Done = Later<()>;

    fn decide(&self, ask: Ask<'_>) -> Self::Decided {
        if let Some(error) = self.client.overload(self.cas.busy_keys()) {
            return Box::pin(overloaded(error, self.deadline));
        }
        let decided = self.cas.decide(ask);
        Box::pin(async { Ok(decided.await?) })
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::Done {
        let done = self.cas.clear(policy, key);
        Box::pin(async { Ok(done.await?) })
    }

    fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> Self::Done {
        let done = self.cas.refund(policy, key, decision);
        Box::pin(async { Ok(done.await?) })
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        self.cas.validate(policy)
    }
}

impl fmt::Debug for MemcachedStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { client, prefix, deadline, .. } = self;
        f.debug_struct("MemcachedStorage")
            .field("servers", client)
            .field("prefix", prefix)
            .field("deadline", deadline)
            .finish()
    }
}
