//! The reservations of a request, in its extensions.

use std::iter::successors;
use std::sync::{Arc, Mutex};

use http::Extensions;

use super::Reservation;
use crate::policy::Policy;
use crate::sync::unpoisoned;

/// The reservations of a request, in its extensions: one of each layer with
/// [`settle_later`](crate::RateLimitLayer::settle_later).
///
/// Clones share the reservations, and each can be taken once. With the feature `axum`, a handler
/// can take a [`Reservation`] directly.
///
/// ```
/// use tower_ratelimit::Reservations;
///
/// fn settle(request: &http::Request<()>, tokens: u32, images: u32) {
///     let Some(reservations) = request.extensions().get::<Reservations>() else { return };
///     for (policy, units) in [("tokens", tokens), ("images", images)] {
///         if let Some(reservation) = reservations.take_policy(policy) {
///             reservation.settle(units);
///         }
///     }
/// }
/// ```
#[derive(Clone, Debug)]
pub struct Reservations {
    /// The policies of the layer. Empty if the layer has made no reservation.
    policies: Vec<Policy>,
    /// `None` after it was taken.
    own: Arc<Mutex<Option<Reservation>>>,
    /// Those of the outer layers.
    outer: Option<Arc<Self>>,
}

impl Reservations {
    /// Adds a layer without a reservation, so that the handler does not take that of an outer layer
    /// instead.
    pub(crate) fn begin(extensions: &mut Extensions) {
        if let Some(outer) = extensions.remove().map(Arc::new) {
            extensions.insert(Self { policies: Vec::new(), own: Arc::default(), outer: Some(outer) });
        }
    }

    /// Sets the reservation of the layer that has [begun](Self::begin).
    pub(crate) fn insert(reservation: Reservation, extensions: &mut Extensions) {
        let outer = extensions.remove().and_then(|begun: Self| begun.outer);
        let policies = reservation.policies();
        extensions.insert(Self { policies, own: Arc::new(Mutex::new(Some(reservation))), outer });
    }

    /// Takes the reservation of the innermost layer. Returns `None` if this layer has made none,
    /// because the request is not limited, or if it was taken before.
    pub fn take(&self) -> Option<Reservation> {
        unpoisoned(self.own.lock()).take()
    }

    /// Takes the reservation of the policy with this [identity](crate::Policy::identity): its name,
    /// or its text if it has no name. A layer with [several keys](crate::RateLimitLayer::and) has
    /// one reservation for all of its policies. Returns `None` if there is none, or if it was taken
    /// before. Of several layers whose policies have the same identity, the innermost one counts.
    pub fn take_policy(&self, identity: &str) -> Option<Reservation> {
        let has_identity = |layer: &&Self| layer.policies.iter().any(|own| own.identity() == identity);
        successors(Some(self), |layer| layer.outer.as_deref()).find(has_identity)?.take()
    }
}

#[cfg(feature = "axum")]
crate::extract::extract_inserted! {
    /// Takes the reservation of the innermost layer with
    /// [`settle_later`](crate::RateLimitLayer::settle_later) (feature `axum`).
    ///
    /// Without a reservation, the request is rejected with
    /// [`NoReservation`](crate::extract::NoReservation). Extract an `Option<Reservation>` if a
    /// request may have none, because it is not limited. To take those of several layers, extract
    /// an `Extension<Reservations>`.
    Reservation, or NoReservation: |extensions| extensions.get().and_then(Reservations::take)
}
