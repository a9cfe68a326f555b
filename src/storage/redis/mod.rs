mod decide;
mod error;
mod keys;
mod link;
mod probe;
mod quote;
mod reply;
mod reset;
mod script;
mod size;
mod swap;
mod url;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

pub use self::error::RedisStorageError;
use self::link::Link;
use self::script::Scripts;
use self::swap::Swapping;
use self::url::Target;
use crate::ConfigError;
use crate::error::or_panic;
use crate::storage::link::until_ready;
use crate::storage::url::checked_prefix;
use crate::storage::{Cas, Clock, deadline};

/// Keeps states on a Redis or Valkey server, so that many processes share them.
///
/// Clones are handles on the same connections. There is one for each server, for all who ask at once.
///
/// A policy of any number of limits is decided by one script in one trip, by the server's time, all limits or none. So it is
/// exact however many processes ask. A strategy of one's own without a [script](crate::strategy::Strategy::script) makes its
/// policy be decided here and stored if nobody else has stored meanwhile: two trips and more, and when that has failed too
/// often, a refusal that is [contended](crate::Decision::is_contended).
///
/// Redis from 6.2 on, Valkey from 7.2 on.
///
/// # URLs
///
/// | URL | of |
/// |---|---|
/// | `redis://host:6379` | one server |
/// | `redis://user:password@host/2` | one server, with a login, in database 2 |
/// | `rediss://host` | the same over TLS (feature `redis-rustls`) |
/// | `redis+unix:///run/redis.sock?db=2` | one server on this machine |
/// | `redis+cluster://host,host:7001` | a cluster, some of whose nodes are named (feature `redis-cluster`) |
/// | `redis+sentinel://host,host/service/2` | the primary that sentinels name (feature `redis-sentinel`) |
///
/// `valkey` may be written for `redis`, and `rediss+cluster` and `rediss+sentinel` are over TLS. In a user or a password what is
/// no letter or digit is written with percent: `p%40ss` is `p@ss`. Behind a `?` and with `&` between them stand options:
///
/// | option | unless it is there | says |
/// |---|---|---|
/// | `prefix` | `rl` | what all keys begin with |
/// | `deadline` | `100ms` | how long an answer may take: `50ms`, `2s` |
/// | `ca` | the system's roots | for TLS: a file with the certificates to trust, in PEM |
/// | `sentinel-user`, `sentinel-password` | no login | for the sentinels themselves; the one before the `@` is for the servers |
///
/// # When a server is away
///
/// 1. Nothing is connected before it is used, so a program starts while its server is down.
/// 2. No call takes longer than its deadline, whether it waits for a connection or for an answer.
/// 3. After a connection failed, for whatever reason, it is tried again when somebody asks, 20 to 200 milliseconds later; who
///    asks before that is told of the failure at once.
/// 4. A connection is replaced when it breaks, and when calls have waited in vain for about three deadlines, also when
///    their callers left earlier.
/// 5. A command that was sent is not sent again, as it may have been executed
///    ([`may_have_counted`](RedisStorageError::may_have_counted)).
/// 6. At most 1,024 calls of a process are in flight on a connection, and fewer while calls miss their deadline. A call
///    that does not fit is an error after three quarters of its deadline: "overloaded", and nothing was sent.
/// 7. The primary that sentinels name is asked for again after each failure, and every second in use. Which node of a cluster
///    holds a key is asked again after each failure, and when a node says that it has moved.
///
/// [`OnError`](crate::OnError) decides on the requests that fail. The suite makes each of these faults on Redis 7.0, and ran on
/// Valkey 8.0.
///
/// | fault | requests that fail | for how long | lost |
/// |---|---|---|---|
/// | the server is down | all, at once | until at most a second after it is back | the hits that it has not saved |
/// | the server hangs | all, after the deadline; after about three deadlines they wait for a new connection | until at most a second after it goes on | nothing |
/// | the network loses everything | the same | until at most a second after it is back | nothing |
/// | a reply is lost, a connection breaks | those in flight | once | nothing; they may have been counted, once |
/// | the password is wrong | all | until it is corrected | nothing |
/// | out of memory (`noeviction`), a read-only replica, a missing right | all, at once; nothing is counted | until that is corrected | nothing |
/// | the scripts are flushed | none: they are sent again | | nothing |
/// | more calls than the server answers | those that do not fit, after three quarters of the deadline | as long as it lasts | nothing |
/// | sentinels choose another primary | all, until they have chosen | the time that sentinels take, and a second | the hits that were not replicated |
/// | a node of a cluster dies | those whose keys are on it. With Redis's default, `cluster-require-full-coverage yes`, all of them, once the others know that it failed and while no replica replaces it | until its slots are served again, and a second | the hits that were not replicated or saved |
/// | a slot of a cluster is moved | those of policies with a moving window, which have two keys, for clients that are new or being moved (`TRYAGAIN`) | until the move is over; if it is stuck, until `redis-cli --cluster fix` | nothing |
///
/// # Rights
///
/// A user for one prefix, for everything that this storage does:
///
/// ```text
/// ACL SETUSER ratelimit on >password ~rl:* resetchannels -@all +eval +evalsha +time +get +set +getrange +setrange +strlen +pexpire +unlink +scan +select +role +cluster|slots +asking
/// ```
///
/// | for | commands |
/// |---|---|
/// | every decision, refund and clear | `EVAL`, `EVALSHA`, `TIME`, `GET`, `SET`, `UNLINK` |
/// | `moving-window`, besides | `GETRANGE`, `SETRANGE`, `STRLEN`, `PEXPIRE` |
/// | [`ready`](Self::ready) | all of these |
/// | [`reset`](Self::reset) | `SCAN`, `UNLINK` |
/// | a database other than 0 | `SELECT` |
/// | a URL of sentinels | `ROLE` on the servers; `SENTINEL` for the user of the sentinels |
/// | a cluster | `CLUSTER SLOTS`, `ASKING` |
///
/// A missing right, or a command that `rename-command` has renamed, is an error of the storage: the hit is not counted and
/// [`OnError`](crate::OnError) decides. Use [`ready`](Self::ready) to find it before the first request. `PING` may be forbidden, but
/// not renamed.
///
/// # What stands on the server
///
/// | key | holds |
/// |---|---|
/// | `rl:{free\|t:alice}` | what the limits of the policy `free` remember of the [key](crate::Key) `t:alice`, limit by limit |
/// | `rl:{free\|t:alice}:2.moving-window/60000000` | the log of its second limit |
/// | `rl:{free\|t:alice}:all` | all of it, where a strategy has no script |
///
/// Each limit's part is in brackets: its place among the limits, its strategy, its period, and what it remembers; all instants and periods in
/// microseconds.
///
/// | strategy | for example | |
/// |---|---|---|
/// | a window | `[1.fixed-window/60000000 END,COUNT,BEGINNING]` | the beginning modulo 2^32 |
/// | a counter | `[1.sliding-window-counter/60000000 FORGOTTEN,PREVIOUS,CURRENT]` | two periods after the current bucket's beginning |
/// | a bucket | `[1.token-bucket/60000000 FULL,PART,BEGINNING]` | full again that many Nths of a microsecond earlier |
/// | a log | `[1.moving-window/60000000 END,UNITS,OLDEST,FIRST,LENGTH,ROOM,HEAD,TAIL]` | a ring of `ROOM` entries, each with an instant, modulo what its bytes can hold, and units |
///
/// A policy of the same name with other limits, as in another release of a program, finds its own parts and leaves the others where they are.
/// A policy with a strategy that has no script keeps all its limits under `:all`, and shares none of them with a policy of its name whose
/// strategies all have one.
///
/// What is no letter, digit or one of a few signs is written as in a URL, so nobody's name can end the braces; of what is longer than
/// 200 bytes, the end is a hash. All keys of one ask share what is in them, and with it a slot. Each expires half a second after it has stopped to matter, a log after an eighth of its
/// period.
///
/// # Memory
///
/// The memory of one client: the sum of `MEMORY USAGE` of all its keys, on Redis 7.0.15 (64 bits,
/// jemalloc). The figures hold for `rl:{free|t:alice}`, a key of 17 bytes. Each byte more in the
/// prefix, the policy's name or the [key](crate::Key) adds one byte, and two with a moving window.
///
/// | policy | hits in the window | bytes |
/// |---|---|---|
/// | `fixed-window 10/minute` | 10 | 136 |
/// | `token-bucket 10/minute` | 10 | 136 |
/// | `sliding-window-counter 10/minute` | 10 | 136 |
/// | `moving-window 10/minute` | 10 | 336 |
/// | `moving-window 1000/hour` | 1,000 | 10,496 |
/// | `moving-window 10000/hour` | 10,000 | 98,560 |
///
/// An entry of a moving window's log takes 8 to 11 bytes. A log grows by up to a quarter, and refunds
/// can leave up to half of its entries unused. Beyond 12,288 entries, Redis can allocate twice the
/// bytes. Redis limits a string to 512 MB. So the server fails hits from 48 million entries on, or
/// from 24 million on after many refunds. Use a 64-bit build of the server.
///
/// All keys expire, so every `maxmemory-policy` applies to them. With `noeviction`, a server without
/// memory fails hits, and [`OnError`](crate::OnError) decides. With `volatile-ttl` or `volatile-lru`,
/// the server evicts states, and their clients start afresh: they can use up their limits once more.
/// `volatile-ttl` evicts the states that expire soonest, so it forgets the least. The `allkeys-*`
/// policies do the same to these keys, and evict the keys of other programs too.
///
/// Use `noeviction` and a server for rate limits alone. Use `volatile-ttl` where admitting too many
/// requests is better than failing them.
///
/// A failover loses the hits that the primary has not replicated, because Redis replicates
/// asynchronously. Their clients can use these units once more. A forced failover under load lost
/// 8,690 of 60,279 hits that were made within 1.7 seconds.
///
/// It needs a runtime of tokio's with time and I/O, and may be made outside of one.
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::RedisStorage;
///
/// let storage = RedisStorage::new("redis://localhost/?prefix=shop")?.deadline(Duration::from_millis(50));
///
/// let error = RedisStorage::new("http://localhost").unwrap_err();
/// assert!(error.to_string().starts_with("cannot read the URL \"http://localhost\": its scheme is \"http\", write redis://"));
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
#[derive(Clone)]
pub struct RedisStorage {
    link: Link,
    prefix: Arc<str>,
    deadline: Duration,
    scripts: Scripts,
    /// For strategies without a script.
    swapping: Cas<Swapping>,
    /// Where time is not the server's: in tests.
    clock: Option<Arc<dyn Clock>>,
}

impl RedisStorage {
    /// A storage on the servers that `url` names. It connects to none of them yet.
    ///
    /// # Errors
    ///
    /// When the URL cannot be understood, or needs a feature that is not enabled. It is quoted without its login.
    pub fn new(url: &str) -> Result<Self, ConfigError> {
        let Target { place, access, prefix, deadline } = Target::parse(url)?;
        let (link, scripts, prefix) = (Link::new(place, &access), Scripts::default(), Arc::from(prefix));
        let swapping = swap::on(&link, &prefix, deadline, None);
        Ok(Self { link, prefix, deadline, scripts, swapping, clock: None })
    }

    /// The same, where what is compared and swapped knows of what was changed.
    fn with_swapping(self) -> Self {
        let swapping = swap::on(&self.link, &self.prefix, self.deadline, self.clock.clone());
        Self { swapping, ..self }
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
        Ok(Self { prefix: prefix.into(), ..self }.with_swapping())
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
        Ok(Self { deadline, ..self }.with_swapping())
    }

    /// Decides by this clock instead of the server's: for tests (feature `testing`).
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        Self { clock: Some(Arc::new(clock)), ..self }.with_swapping()
    }

    /// Waits until the servers can decide, in a cluster every node that holds keys. Call it before a program takes traffic.
    ///
    /// It runs every command of the scripts on a key under the [prefix](Self::prefix), and removes the key. So a missing
    /// [right](Self#rights), a renamed command, a replica and a server without memory are errors here. It tries again until
    /// `timeout` has passed. [`reset`](Self::reset) needs `SCAN`, which is not checked.
    ///
    /// # Errors
    ///
    /// Returns the last error when `timeout` has passed. The error of a command that the user may not run names the command.
    pub async fn ready(&self, timeout: Duration) -> Result<(), RedisStorageError> {
        until_ready(Instant::now() + timeout.min(FOREVER), |deadline| self.probe(deadline)).await
    }
}

/// An instant that is further away cannot be counted on every system.
const FOREVER: Duration = Duration::from_secs(365 * 86_400);

impl fmt::Debug for RedisStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { link, prefix, deadline, .. } = self;
        f.debug_struct("RedisStorage").field("link", link).field("prefix", prefix).field("deadline", deadline).finish()
    }
}
