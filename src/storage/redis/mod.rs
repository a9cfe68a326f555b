//! A storage on Redis or Valkey.
//!
//! Values that no script has written are forgiven or an error:
//!
//! - A key of another type counts as absent and is overwritten. Every version of the format stores
//!   strings, so the key is of another program.
//! - A record with impossible numbers counts as fresh, and so does a lost log. The format is known,
//!   and no strategy has written these numbers.
//! - A string that does not consist of records is an error, and no script changes it. It may be the
//!   state of a version that forgot to change its number. A clear deletes it.
//! - Every other error ends the script. A missing right must not look like a fresh state.

mod combine;
mod error;
mod exact;
mod key_names;
mod ledgers;
mod link;
mod listing;
mod operate;
mod record;
mod script;
mod swap;
mod url;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::Value;
use tokio::time::Instant;

use self::combine::Combiner;
use self::error::unprepared_time;
use self::link::Link;
use self::script::{Call, ScriptKind, ScriptTime, Scripts, unexpected_reply};
use self::swap::SwapStore;
use self::url::{Access, Combine, RedisUrl, Servers};
use crate::decision::Decision;
use crate::error::{BoxError, ConfigError};
use crate::key::Key;
use crate::policy::{Op, Policy};
#[cfg(feature = "redis-rustls")]
use crate::storage::TlsConfig;
use crate::storage::contract::OwnedRequest;
use crate::storage::credentials::{Credentials, LoginSource};
use crate::storage::metrics::measured;
use crate::storage::net::fail_delayed;
use crate::storage::{
    Cas, Clock, KeyPage, KeysRequest, SlotStore, Storage, StorageError, StorageErrorKind, StorageFuture, StorageRequest,
};
use crate::time::Timestamp;

/// Shares rate limit states between processes through Redis (6.2 or later) or Valkey (7.2 or later).
///
/// ```
/// use tower_ratelimit::storage::RedisStorage;
///
/// let storage = RedisStorage::new("redis://localhost/?prefix=shop&timeout=50ms")?;
///
/// let error = RedisStorage::new("http://localhost").unwrap_err();
/// let expected = "cannot read the URL \"http://localhost\": unknown scheme \"http\"";
/// assert!(error.to_string().starts_with(expected));
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
///
/// One Lua script checks and updates all limits of a policy in one round trip, by the server's
/// clock. All processes together admit exactly as many hits as the limit allows.
///
/// Under load, up to 16 hits [share a call](Self#shared-calls) to a single server.
///
/// If a strategy of a policy has no [script](crate::strategy::Strategy::script), the storage uses
/// compare-and-swap for that policy, as [`Cas`] does. A hit then takes two round trips or more. If
/// other processes change the key before each swap, the hit is refused as
/// [contended](crate::Decision::is_contended).
///
/// # Options
///
/// | option of the URL | default | meaning |
/// |---|---|---|
/// | `prefix` | `rl` | the prefix of all keys: 1 to 64 printable ASCII characters without spaces, `{` and `}`; programs with the same prefix share their counts |
/// | `timeout` | `100ms` | the timeout of a call, from `1ms` to `3600s` |
/// | `combine` | `true` | controls [shared calls](Self#shared-calls): `true`, `always` or `false` |
/// | `ca` | the system's roots | for TLS, a PEM file with the certificates to trust |
/// | `cert`, `key` | none | for TLS, PEM files with a client certificate and its private key |
/// | `sentinel-user`, `sentinel-password` | no login | the login for the sentinels |
///
/// Clones share one connection per server. Calls need a tokio runtime with time and I/O enabled.
/// The storage can be created outside of a runtime. It connects on first use, and reconnects after
/// a failure.
///
#[doc = include_str!("server.md")]
///
/// # Errors
///
/// Calls fail with [`StorageError`] if the server is unreachable, refuses the command, sends an
/// unexpected reply, or does not reply within the timeout. They also fail if 1,024 calls are in
/// flight on the connection to a server, or fewer while calls time out, and if the storage does not
/// support the policy. The [kind](StorageError::kind) of the error names the cause.
///
/// A call that the server may have executed is not retried: see
/// [`may_have_counted`](StorageError::may_have_counted).
#[derive(Clone)]
pub struct RedisStorage {
    link: Link,
    /// The settings of `link`, to create another one with other logins or certificates. `None` on a
    /// connection of the program.
    target: Option<Arc<(Servers, Access)>>,
    prefix: Arc<str>,
    timeout: Duration,
    scripts: Scripts,
    combiner: Arc<Combiner>,
    /// Decides policies with a strategy that has no script.
    cas: Cas<SwapStore>,
    /// Replaces the server's clock in tests.
    clock: Option<Arc<dyn Clock>>,
}

impl RedisStorage {
    /// Creates a storage for the servers in `url`, which has one of [these forms](Self#urls).
    ///
    /// This does not connect. With TLS, it loads the certificates and the private key.
    ///
    /// # Errors
    ///
    /// Returns an error in these cases. The error quotes the URL without its login and its options.
    ///
    /// - The URL cannot be parsed.
    /// - The URL needs a feature of this crate that is not enabled, or Unix sockets on a system
    ///   without them.
    /// - A certificate or the private key cannot be loaded.
    pub fn new(url: &str) -> Result<Self, ConfigError> {
        let RedisUrl { servers, access, prefix, timeout, combine } = RedisUrl::parse(url)?;
        let (link, target) = (Link::new(servers.clone(), &access), Arc::new((servers, access)));
        Ok(Self::over(link, Some(target), prefix.into(), timeout, combine))
    }

    fn over(
        link: Link,
        target: Option<Arc<(Servers, Access)>>,
        prefix: Arc<str>,
        timeout: Duration,
        combine: Combine,
    ) -> Self {
        let cas = swap::cas(&link, &prefix, timeout, None);
        let combiner = Combiner::new(combine, Arc::clone(&prefix));
        Self { link, target, prefix, timeout, scripts: Scripts::default(), combiner, cas, clock: None }
    }

    /// Creates a storage on a connection manager of the crate `redis` 1 (feature
    /// `redis-connection-manager`). A new major version of that crate is a breaking change of the
    /// feature.
    ///
    /// `options` has the form of the query of a URL, such as `"prefix=shop&timeout=200ms"` or `""`.
    /// It can contain the [options](Self#options) `prefix` and `timeout`.
    ///
    /// Other users of the connection are not disturbed. The storage sends single commands that do
    /// not block, and at most 1,024 at once. It changes no state of the connection, and a call that
    /// times out leaves the connection as it is.
    ///
    /// A storage with its own connection, by [`new`](Self::new), does more:
    ///
    /// | | by a URL | on a connection manager |
    /// |---|---|---|
    /// | reconnecting | by the storage, after any error | by the manager, which stops after some errors that are not of the network, such as a wrong password |
    /// | a connection without replies | is replaced after a few timeouts | stays until the manager notices it |
    /// | timeout of a call | the storage's | the shorter one of the storage's and the manager's `response_timeout` |
    /// | concurrent hits | [share calls](Self#shared-calls) | one call per hit |
    /// | [several keys](crate::RateLimitLayer::and) | on one server | only [within](crate::Key::within) the same key |
    /// | [`may_have_counted`](StorageError::may_have_counted) of a call that was not sent | `false`, unless the connection broke | `false` only if the server refuses connections |
    /// | logins, certificates, push messages | handled by the storage | handled by the manager |
    ///
    /// # Errors
    ///
    /// Returns an error if an option is unknown or invalid.
    ///
    /// # Examples
    ///
    /// ```
    /// use redis::aio::{ConnectionManager, ConnectionManagerConfig};
    /// use tower_ratelimit::storage::RedisStorage;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let client = redis::Client::open("redis://localhost")?;
    /// let manager = ConnectionManager::new_lazy_with_config(client, ConnectionManagerConfig::new())?;
    /// let storage = RedisStorage::from_connection_manager(manager.clone(), "prefix=shop&timeout=50ms")?;
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(feature = "redis-connection-manager")]
    pub fn from_connection_manager(manager: redis::aio::ConnectionManager, options: &str) -> Result<Self, ConfigError> {
        Self::on_shared(Link::on_manager(manager), options)
    }

    /// Creates a storage on an asynchronous cluster connection of the crate `redis` 1 (feature
    /// `redis-cluster-async`). A new major version of that crate is a breaking change of the
    /// feature.
    ///
    /// `options` and the differences from a storage with its own connections are those of
    /// `from_connection_manager` (feature `redis-connection-manager`). There are three more:
    ///
    /// - The connection sends a command again after the connection to a node was lost, so a hit can
    ///   count twice. Its option `retries(0)` prevents that, but then calls on a slot that moves
    ///   fail, too. Each error of a call [may have counted](StorageError::may_have_counted), even
    ///   if a node refused the call.
    /// - [`check`](Storage::check) tests the commands on one node.
    /// - [`clear_all`](Storage::clear_all) and [`keys`](Storage::keys) return an error of the kind
    ///   [`Unsupported`](StorageErrorKind::Unsupported).
    ///
    /// # Errors
    ///
    /// Returns an error if an option is unknown or invalid.
    #[cfg(feature = "redis-cluster-async")]
    pub fn from_cluster_connection(
        connection: redis::cluster_async::ClusterConnection,
        options: &str,
    ) -> Result<Self, ConfigError> {
        Self::on_shared(Link::on_cluster(connection), options)
    }

    #[cfg(any(feature = "redis-connection-manager", feature = "redis-cluster-async"))]
    fn on_shared(link: Link, options: &str) -> Result<Self, ConfigError> {
        let read = crate::storage::url::read_options(options, |options, _| Ok((options.prefix()?, options.timeout()?)));
        let (prefix, timeout) = read?;
        Ok(Self::over(link, None, prefix.into(), timeout, Combine::Never))
    }

    /// Creates the compare-and-swap storage and the combiner again, with the current settings.
    fn with_new_cas(self) -> Self {
        let cas = swap::cas(&self.link, &self.prefix, self.timeout, self.clock.clone());
        let combiner = Combiner::new(self.combiner.mode, Arc::clone(&self.prefix));
        Self { combiner, cas, ..self }
    }

    /// Sets a clock for decisions, for tests. Requires the feature `testing`. Defaults to the
    /// server's clock, by which keys still expire, but a minute later.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn clock(self, clock: impl Clock) -> Self {
        Self { clock: Some(Arc::new(clock)), ..self }.with_new_cas()
    }
}

/// The value of the metrics label `storage`.
const LABEL: &str = "redis";

impl fmt::Debug for RedisStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { link, prefix, timeout, .. } = self;
        f.debug_struct("RedisStorage").field("link", link).field("prefix", prefix).field("timeout", timeout).finish()
    }
}

impl RedisStorage {
    /// Sets a provider of credentials, which the storage calls for each new connection. Use it for
    /// passwords and tokens that rotate. Overrides the user and the password in the URL, but not
    /// the login for sentinels.
    ///
    /// | event | effect |
    /// |---|---|
    /// | the password changes | open connections stay open |
    /// | the server closes the connection, or replies that a login is required | the storage reconnects with new credentials |
    /// | the provider fails, or the server rejects its credentials | calls fail, and the storage retries after a backoff of up to 200 ms |
    ///
    /// An attempt to connect takes at most one second, including the call of the provider. It
    /// begins with one try. While no try has ended, another one starts every 250 ms, up to four in
    /// total. The first try that ends decides the attempt, even if it fails. Each try calls the
    /// provider, so up to four calls can run at once. The guide on
    /// [deploying](crate::guide::deploying#logins-that-rotate) has more details.
    ///
    /// The returned storage opens new connections, which it does not share with earlier clones.
    ///
    /// ```
    /// use tower_ratelimit::storage::{Credentials, RedisStorage};
    ///
    /// let storage = RedisStorage::new("redis://cache")?.credentials(|| async {
    ///     // Blocks only for a moment, because the file is small and local.
    ///     let password = std::fs::read_to_string("/run/secrets/redis-password")?;
    ///     Ok(Credentials::new("ratelimit", password.trim_end()))
    /// });
    /// # Ok::<(), tower_ratelimit::ConfigError>(())
    /// ```
    ///
    /// # Panics
    ///
    /// Panics if the storage was created on a connection of the program, by
    /// `from_connection_manager` or `from_cluster_connection`.
    #[must_use]
    #[track_caller]
    pub fn credentials<F, Fut>(self, provider: F) -> Self
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Credentials, BoxError>> + Send + 'static,
    {
        let target = self.target.clone().expect("a connection of the program has its own login: set it there");
        let access = Access { login: LoginSource::provider(provider), ..target.1.clone() };
        self.with_access(&target.0, access)
    }

    /// Sets the certificates and the private key for TLS. Overrides the options `ca`, `cert` and
    /// `key` of the URL. Those that `config` does not set return to their defaults.
    ///
    /// The returned storage opens new connections, which it does not share with earlier clones.
    ///
    /// # Errors
    ///
    /// Returns an error if a part of `config` is malformed, if the scheme of the URL has no TLS, or
    /// if the storage was created on a connection of the program.
    #[cfg(feature = "redis-rustls")]
    pub fn try_tls(self, config: &TlsConfig) -> Result<Self, ConfigError> {
        let Some(target) = self.target.clone() else {
            return Err(ConfigError::new("a connection of the program has its own certificates: set them there"));
        };
        let Some(tls) = &target.1.tls else {
            return Err(ConfigError::new("the URL has no TLS: write rediss:// instead of redis://"));
        };
        let tls = tls.with(config).map_err(ConfigError::new)?;
        let access = Access { tls: Some(tls), ..target.1.clone() };
        Ok(self.with_access(&target.0, access))
    }

    /// Replaces the logins and certificates, and opens new connections on the next call.
    fn with_access(self, servers: &Servers, access: Access) -> Self {
        let link = Link::new(servers.clone(), &access);
        Self { link, target: Some(Arc::new((servers.clone(), access))), ..self }.with_new_cas()
    }
}

impl Storage for RedisStorage {
    fn decide(&self, request: StorageRequest<'_>) -> StorageFuture<Decision> {
        if let Err(error) = exact::check_periods(request.policy) {
            return StorageFuture::ready(Err(StorageError::unsupported_policy(error)));
        }
        if let Some(error) = self.link.overload() {
            return StorageFuture::new(measured(LABEL, fail_delayed(error, self.timeout)));
        }
        let Some(call) = self.scripts.call_for(&self.prefix, request, self.time()) else {
            return self.cas.decide(request);
        };
        let (storage, request, is_peek) = (self.clone(), request.owned(), request.is_peek());
        StorageFuture::new(measured(LABEL, async move {
            let prepare = |time| storage.scripts.call_for(&storage.prefix, request.borrow(), time);
            let (call, reply) = storage.run(call, prepare).await.map_err(|error| error.uncounted_if(is_peek))?;
            call.decision(request.borrow(), &reply).ok_or_else(|| unexpected_reply(&reply).uncounted_if(is_peek))
        }))
    }

    /// Decides on all keys in one call of a script. In a cluster, all keys must be
    /// [within](Key::within) the same key.
    fn decide_all(&self, members: &[StorageRequest<'_>]) -> StorageFuture<Vec<Decision>> {
        match *members {
            [] => return StorageFuture::ok(Vec::new()),
            [only] => return self.decide(only).map(|decided| Ok(vec![decided?])),
            _ => {}
        }
        let checked = StorageRequest::check_members(members);
        let prepared = checked.and_then(|()| self.prepare_all(members)).map(|call| {
            let members = members.iter().map(StorageRequest::owned).collect::<Vec<_>>();
            (call, members)
        });
        let (call, members) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return StorageFuture::ready(Err(error)),
        };
        if let Some(error) = self.link.overload() {
            return StorageFuture::new(measured(LABEL, fail_delayed(error, self.timeout)));
        }
        let storage = self.clone();
        StorageFuture::new(measured(LABEL, async move {
            let requests: Vec<_> = members.iter().map(OwnedRequest::borrow).collect();
            let is_peek = requests.iter().all(StorageRequest::is_peek);
            let prepare = |time| storage.scripts.call_for_all(&storage.prefix, &requests, time);
            let (call, reply) = storage.run(call, prepare).await.map_err(|error| error.uncounted_if(is_peek))?;
            call.decisions(&requests, &reply).ok_or_else(|| unexpected_reply(&reply).uncounted_if(is_peek))
        }))
    }

    fn clear(&self, policy: &Policy, key: &Key) -> StorageFuture<()> {
        // The script of a clear reads no operation and no cost.
        let request = StorageRequest::new(policy, key, Op::Hit, 0);
        let Some(call) = self.scripts.call(ScriptKind::Clear, &self.prefix, request, self.time(), None) else {
            return self.cas.clear(policy, key);
        };
        self.update(call, |_| None)
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> StorageFuture<()> {
        if !decision.has_spent() || actual == decision.cost() {
            return StorageFuture::ok(());
        }
        let Some(call) = self.settlement(policy, key, decision, actual, self.time()) else {
            return self.cas.settle(policy, key, decision, actual);
        };
        let (storage, policy, key, decision) = (self.clone(), policy.clone(), key.clone(), decision.clone());
        self.update(call, move |time| storage.settlement(&policy, &key, &decision, actual, time))
    }

    /// Makes one check within the [timeout](RedisStorage#options). In a cluster, checks every node
    /// that holds keys.
    ///
    /// The check runs every command of the scripts on a temporary key under the
    /// [prefix](RedisStorage#options). So it detects a missing [right](RedisStorage#rights), a
    /// renamed command, a read-only replica and a server without memory. It does not run `SCAN`,
    /// which only [`clear_all`](Storage::clear_all) needs. The first check on a connection also
    /// waits for the proof that hits can [share calls](RedisStorage#shared-calls).
    ///
    /// # Errors
    ///
    /// If the user has no right to run a command, the error names the command.
    fn check(&self) -> StorageFuture<()> {
        let storage = self.clone();
        StorageFuture::new(async move {
            let deadline = Instant::now() + storage.timeout;
            storage.probe(deadline).await.map_err(StorageError::uncounted)?;
            storage.combiner.prove(&storage.link, deadline).await;
            Ok(())
        })
    }

    /// Deletes all keys with the [prefix](RedisStorage#options), and returns their number. Visits
    /// every key on every server with `SCAN`, in steps. Each step has its own
    /// [timeout](RedisStorage#options).
    ///
    /// # Errors
    ///
    /// Returns the error of the first step that fails. Keys that were deleted before stay deleted.
    fn clear_all(&self) -> StorageFuture<u64> {
        let storage = self.clone();
        StorageFuture::new(async move { storage.delete_all().await })
    }

    /// Finds the keys with `SCAN`, in steps of at most about 500 keys, and peeks at each. Each step
    /// and each peek has its own [timeout](RedisStorage#options). A page takes at most 50 steps, so
    /// it can be empty on a server with many other keys.
    fn keys(&self, request: KeysRequest<'_>) -> StorageFuture<KeyPage> {
        if let Err(error) = request.check() {
            return StorageFuture::ready(Err(error));
        }
        let KeysRequest { policy, prefix, after, limit, .. } = request;
        let (storage, policy) = (self.clone(), policy.clone());
        let (prefix, after) = (prefix.to_owned(), after.map(str::to_owned));
        StorageFuture::new(async move { listing::page(&storage, &policy, &prefix, after.as_deref(), limit).await })
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        exact::check_periods(policy)?;
        if Scripts::support(policy) { Ok(()) } else { self.cas.validate(policy) }
    }

    /// Checks that one script can decide on the keys of these policies.
    ///
    /// # Errors
    ///
    /// Returns an error if a strategy has no [script](crate::strategy::Strategy::script). Wrap the
    /// storage as [`InOrder`](crate::storage::InOrder) then.
    fn validate_members(&self, policies: &[Policy]) -> Result<(), ConfigError> {
        policies.iter().try_for_each(validate_member)
    }

    /// Returns `true` for a cluster, and for a connection of the program.
    fn needs_outer_key(&self, _: Option<&str>) -> bool {
        self.link.only_node().is_none()
    }

    fn slots(&self) -> Option<Arc<dyn SlotStore>> {
        Some(Arc::new(self.clone()))
    }
}

fn validate_member(policy: &Policy) -> Result<(), ConfigError> {
    exact::check_periods(policy)?;
    if Scripts::support(policy) {
        return Ok(());
    }
    Err(ConfigError::new(format!(
        "\"{policy}\" has a strategy without a script, so Redis cannot decide on its key together with others: wrap \
         the storage as `InOrder::new(storage)`, which decides on one key after the other"
    )))
}

/// Returns an error unless all keys are within the same outer key.
fn check_outer_key(members: &[StorageRequest<'_>]) -> Result<(), StorageError> {
    let outer = |member: &StorageRequest<'_>| member.key.split_within().map(|[outer, _]| outer);
    let first = members.first().and_then(outer);
    if first.is_some() && members.iter().all(|member| outer(member) == first) {
        return Ok(());
    }
    let message = "a Redis Cluster keeps the keys of this decision on several servers, and nothing was counted: create \
                   all of them within the same key, as in `user.within(&tenant)`, or wrap the storage as \
                   `InOrder::new(storage)`, which decides on one key after the other";
    Err(StorageError::new(StorageErrorKind::Unsupported, message))
}

impl RedisStorage {
    /// Returns the call that decides on several keys.
    fn prepare_all(&self, members: &[StorageRequest<'_>]) -> Result<Call, StorageError> {
        let checked = members.iter().try_for_each(|member| validate_member(member.policy));
        checked.map_err(StorageError::unsupported_policy)?;
        if self.link.only_node().is_none() {
            check_outer_key(members)?;
        }
        let call = self.scripts.call_for_all(&self.prefix, members, self.time());
        call.ok_or_else(|| StorageError::new(StorageErrorKind::Unsupported, "a strategy has no script"))
    }

    /// Runs the script of a decision, in one call with others if possible. `prepare` returns the call for
    /// another time. Returns the call that the reply answers.
    async fn run(
        &self,
        call: Call,
        prepare: impl FnOnce(ScriptTime) -> Option<Call>,
    ) -> Result<(Arc<Call>, Value), StorageError> {
        let deadline = Instant::now() + self.timeout;
        let call = Arc::new(call);
        let reply = self.combiner.run(&self.link, &call, deadline).await;
        match self.server_time(&reply).and_then(prepare) {
            Some(prepared) => {
                let reply = self.combiner.run_alone(&self.link, &prepared, deadline).await?;
                Ok((Arc::new(prepared), reply))
            }
            None => Ok((call, reply?)),
        }
    }

    /// Returns the call that corrects the cost of a hit.
    fn settlement(
        &self,
        policy: &Policy,
        key: &Key,
        decision: &Decision,
        actual: u32,
        time: ScriptTime,
    ) -> Option<Call> {
        if actual > decision.cost() {
            let charge = StorageRequest::new(policy, key, Op::Charge, actual - decision.cost());
            return self.scripts.call_for(&self.prefix, charge, time);
        }
        // The script of a refund reads no operation.
        let refund = StorageRequest::new(policy, key, Op::Hit, decision.cost() - actual);
        self.scripts.call(ScriptKind::Refund, &self.prefix, refund, time, Some(decision))
    }

    /// Runs the script of a change. `prepare` returns the call for another time.
    fn update(
        &self,
        call: Call,
        prepare: impl FnOnce(ScriptTime) -> Option<Call> + Send + 'static,
    ) -> StorageFuture<()> {
        let storage = self.clone();
        StorageFuture::new(measured(LABEL, async move {
            let deadline = Instant::now() + storage.timeout;
            let reply = storage.combiner.run_alone(&storage.link, &call, deadline).await;
            match storage.server_time(&reply).and_then(prepare) {
                Some(prepared) => storage.combiner.run_alone(&storage.link, &prepared, deadline).await,
                None => reply,
            }
            .map(drop)
        }))
    }

    /// Returns the time of the clock that replaces the server's in tests, or that of this process.
    fn time(&self) -> ScriptTime {
        let own = self.clock.as_ref().map(Clock::now);
        ScriptTime { own, near: own.unwrap_or_else(Timestamp::wall_clock) }
    }

    /// Returns the server's time if the script has ended without an effect, because a strategy has not
    /// prepared its arguments for this time.
    fn server_time<T>(&self, reply: &Result<T, StorageError>) -> Option<ScriptTime> {
        let near = reply.as_ref().err().and_then(unprepared_time)?;
        Some(ScriptTime { near, ..self.time() })
    }
}
