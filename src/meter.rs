//! Hits that a handler makes on the keys of its request.

use std::fmt;
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use http::Extensions;
use tokio::time::Instant;

use crate::decision::{Decision, shown_position};
use crate::key::Key;
use crate::limiter::acquire;
use crate::observe::{EventKind, Reporter};
use crate::policy::{Op, SharedPolicy};
use crate::reservation::{LimitedKey, ObservedKey, Reservation, ShadowCheck, StartedLock};
use crate::storage::{AnyStorage, Storage, StorageError, StorageErrorKind, StorageFuture, StorageRequest};
use crate::waiting::{WaitQueues, Waiter};

/// Makes hits on the key of a request while it is handled, and after its response: for each message
/// of a WebSocket, chunk of an upload, field of a GraphQL query, or tool call of an agent.
///
/// A layer with [`meter`](crate::RateLimitLayer::meter) inserts it into the extensions of each
/// limited request. With the feature `axum`, it is an extractor. Clones are cheap and make hits on
/// the same key.
///
/// ```
/// use axum::Router;
/// use axum::body::Bytes;
/// use axum::http::StatusCode;
/// use axum::routing::post;
/// use tower_ratelimit::{Meter, PeerIp, Quota, RateLimitLayer};
///
/// // A megabyte per minute, which only the handler spends.
/// let bytes = RateLimitLayer::new(Quota::per_minute(1_000_000), PeerIp::new()).cost(|_| 0).meter();
/// let upload = |meter: Meter, body: Bytes| async move {
///     let bytes = u32::try_from(body.len()).unwrap_or(u32::MAX);
///     match meter.hit(bytes).await {
///         Ok(hit) if hit.is_admitted() => StatusCode::OK,
///         Ok(_) => StatusCode::TOO_MANY_REQUESTS,
///         Err(_) => StatusCode::SERVICE_UNAVAILABLE,
///     }
/// };
/// let app: Router = Router::new().route("/", post(upload)).layer(bytes);
/// ```
///
/// # The hits
///
/// - The hit of the request itself is separate. A [`Reservation`] of
///   [`settle_later`](crate::RateLimitLayer::settle_later), and the options that settle by the
///   response, correct only that one. Each hit of the meter has a reservation of its own. To spend
///   units only by the meter, set a [cost](crate::RateLimitLayer::cost) of 0.
/// - A layer with [several keys](crate::RateLimitLayer::and) spends the units of all keys of the
///   request together, or of none.
/// - A meter follows the changes of a layer's [`LivePolicy`](crate::LivePolicy). It keeps a policy
///   that [`policy_by`](crate::policy_by) or a `PolicyLookup` has chosen for the request.
/// - The layer's observer receives the decision on each hit, as on a request. The
///   [shadow limits](crate::Policy#shadow-limits) count the admitted hits.
/// - If the storage fails, [`OnError`](crate::OnError) of the layer applies: with `OnError::Admit`,
///   the hit is admitted and has spent nothing.
/// - In a [shadow](crate::RateLimitLayer::shadow) layer, hits are counted and reported, and each of
///   them is admitted immediately.
#[derive(Clone)]
pub struct Meter(Arc<Metered>);

/// The members of a request, and the options of its layer.
pub(crate) struct Metered {
    /// The policies of the request and their keys. There is at least one.
    pub(crate) members: Vec<(SharedPolicy, Key)>,
    pub(crate) storage: AnyStorage,
    pub(crate) queues: Arc<WaitQueues>,
    pub(crate) reporter: Reporter,
    /// `true` if hits are admitted while the storage fails.
    pub(crate) fails_open: bool,
    pub(crate) shadow: bool,
}

impl Meter {
    /// Removes the meter of an outer layer, so that the handler does not get it if this layer does not
    /// limit the request.
    pub(crate) fn begin(extensions: &mut Extensions) {
        extensions.remove::<Self>();
    }

    pub(crate) fn insert(metered: Metered, extensions: &mut Extensions) {
        extensions.insert(Self(Arc::new(metered)));
    }

    /// Spends `units` from each limit if all of them admit it, and none otherwise.
    ///
    /// The [`Reservation`] dereferences to the decision, which may be a refusal. For several keys,
    /// this is the decision that refuses with the longest [`retry_after`](Decision::retry_after),
    /// or else the one with the fewest remaining units.
    ///
    /// The reservation can [refund](Reservation::refund) or [settle](Reservation::settle) this hit,
    /// for example if the work that it paid for has failed. The hit keeps its cost if the
    /// reservation is dropped. The observer does not receive an event for the settlement.
    ///
    /// A [leaky bucket](crate::LeakyBucket) may admit the hit with a [`delay`](Decision::delay),
    /// for which the caller has to sleep. [`acquire`](Self::acquire) sleeps before it returns.
    ///
    /// # Errors
    ///
    /// Returns the storage's error if the storage fails and the layer has
    /// [`OnError::Refuse`](crate::OnError::Refuse). The memory storage never fails.
    pub fn hit(&self, units: u32) -> StorageFuture<Reservation> {
        let limited = self.limited();
        if self.0.shadow {
            for limited in &limited {
                self.check_in_shadow(limited.clone(), units);
            }
            return StorageFuture::ok(unspent(limited, units));
        }
        let (meter, deciding) = (self.clone(), self.decide(&limited, Op::Hit, units));
        deciding.map(move |decided| match decided {
            Ok(decisions) => {
                meter.report(&limited, &decisions);
                Ok(Reservation::of_limiters(limited, decisions))
            }
            Err(error) => meter.on_failure(error, limited, units),
        })
    }

    /// Spends `units` like [`hit`](Self::hit), but waits for up to `max_wait` instead of refusing,
    /// as [`RateLimiter::acquire_with_cost`](crate::RateLimiter::acquire_with_cost) does.
    ///
    /// The hit waits in the same queue as the [waiting](crate::RateLimitLayer::wait) requests of
    /// the layer. A shadow layer does not wait.
    ///
    /// # Errors
    ///
    /// Returns the storage's error as [`hit`](Self::hit) does. Returns an error of the kind
    /// [`Unsupported`](StorageErrorKind::Unsupported), and has spent nothing, if the request has
    /// [several keys](crate::RateLimitLayer::and).
    ///
    /// # Panics
    ///
    /// The future panics if it has to wait outside of a tokio runtime with time enabled.
    pub fn acquire(
        &self,
        units: u32,
        max_wait: Duration,
    ) -> impl Future<Output = Result<Reservation, StorageError>> + Send + use<> {
        let meter = self.clone();
        async move {
            let metered = &*meter.0;
            let [(policy, key)] = &metered.members[..] else { return Err(waits_for_one_key()) };
            if metered.shadow {
                return meter.hit(units).await;
            }
            let (policy, key, storage) = (policy.clone(), key.clone(), metered.storage.clone());
            let reporter = Some(metered.reporter.clone());
            let waiter = Waiter { storage, policy, key, cost: units, delayed_until: None, reporter };
            match acquire(waiter, Arc::clone(&metered.queues), max_wait).await {
                Ok(hit) => {
                    let limited = LimitedKey { policy: hit.policy().clone(), ..meter.limited().remove(0) };
                    meter.report(&[limited], slice::from_ref(&*hit));
                    Ok(hit)
                }
                Err(error) => meter.on_failure(error, meter.limited(), units),
            }
        }
    }

    /// Returns the current state of the limits, and the verdict that a hit of one unit would get
    /// without the layer's shadow mode. Spends nothing. For several keys, returns the decision that
    /// refuses with the longest [`retry_after`](Decision::retry_after), or else the one with the
    /// fewest remaining units.
    ///
    /// # Errors
    ///
    /// Returns the storage's error if the storage fails, also with
    /// [`OnError::Admit`](crate::OnError::Admit). The memory storage never fails.
    pub fn peek(&self) -> StorageFuture<Decision> {
        self.decide(&self.limited(), Op::Peek, 1).map(|decided| {
            let mut decisions = decided?;
            let shown = shown_position(&decisions);
            Ok(decisions.swap_remove(shown))
        })
    }

    fn limited(&self) -> Vec<LimitedKey> {
        let limited = |(policy, key): &(SharedPolicy, Key)| LimitedKey {
            storage: self.0.storage.clone(),
            policy: policy.read().into_owned(),
            key: key.clone(),
        };
        self.0.members.iter().map(limited).collect()
    }

    fn decide(&self, limited: &[LimitedKey], op: Op, units: u32) -> StorageFuture<Vec<Decision>> {
        let requests: Vec<StorageRequest<'_>> = limited.iter().map(|limited| limited.request(op, units)).collect();
        match requests[..] {
            [only] => self.0.storage.decide(only).map(|decided| Ok(vec![decided?])),
            _ => self.0.storage.decide_all(&requests),
        }
    }

    fn observed(&self, limited: LimitedKey, shadow: bool) -> ObservedKey {
        ObservedKey { limited, reporter: self.0.reporter.clone(), shadow, since: Instant::now() }
    }

    /// Makes a hit that is counted and reported, but never refuses. It continues in a task if the
    /// storage is not ready.
    fn check_in_shadow(&self, limited: LimitedKey, units: u32) {
        if units > 0 {
            drop(ShadowCheck::begin(self.observed(limited, true), units));
        }
    }

    /// Reports decisions as those on a request: all of them, or those that refuse.
    fn report(&self, limited: &[LimitedKey], decisions: &[Decision]) {
        let is_refused = decisions.iter().any(Decision::is_refused);
        for (limited, decision) in limited.iter().zip(decisions).filter(|(_, of)| of.is_refused() == is_refused) {
            let observed = self.observed(limited.clone(), false);
            observed.report(EventKind::Decided(decision));
            drop(StartedLock::of(&observed, decision));
            if !is_refused {
                for shadow in limited.policy.shadows() {
                    self.check_in_shadow(LimitedKey { policy: shadow.clone(), ..limited.clone() }, decision.cost());
                }
            }
        }
    }

    /// Reports a failure of the storage, and admits or fails the hit.
    #[cold]
    fn on_failure(
        &self,
        error: StorageError,
        limited: Vec<LimitedKey>,
        units: u32,
    ) -> Result<Reservation, StorageError> {
        let admitted = units == 0 || self.0.fails_open;
        self.observed(limited[0].clone(), false).report(EventKind::Failed { error: &error, admitted });
        if admitted { Ok(unspent(limited, units)) } else { Err(error) }
    }
}

/// Returns an admission that has spent nothing.
fn unspent(limited: Vec<LimitedKey>, units: u32) -> Reservation {
    let decisions = limited.iter().map(|limited| limited.policy.unspent(0).of_cost(units)).collect();
    Reservation::of_limiters(limited, decisions)
}

fn waits_for_one_key() -> StorageError {
    let message = "a meter waits for one key, and the request has several: use `hit` and its `retry_after`";
    StorageError::new(StorageErrorKind::Unsupported, message)
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let policies: Vec<_> = self.0.members.iter().map(|(policy, _)| policy).collect();
        f.debug_struct("Meter").field("policies", &policies).finish_non_exhaustive()
    }
}

#[cfg(feature = "axum")]
crate::extract::extract_inserted! {
    /// Extracts the meter of the innermost layer with [`meter`](crate::RateLimitLayer::meter)
    /// (feature `axum`).
    ///
    /// Without a meter, the request is rejected with [`NoMeter`](crate::extract::NoMeter). Extract
    /// an `Option<Meter>` if a request may have none, because it is not limited.
    Meter, or NoMeter: |extensions| extensions.get().cloned()
}
