//! The shared ownership of the slots of a request.

use std::fmt;
use std::sync::Arc;

use http::Extensions;

use super::table::Slot;

/// The slots of a request in an [`InFlightLayer`](crate::InFlightLayer), in its extensions.
///
/// The slots are given back when the body of the response has ended and all clones of the permit are
/// dropped. Move a clone into each task that outlives the response, for example into that of an upgraded
/// connection such as a WebSocket, or into a job that the handler spawns. With the feature `axum`, `Permit`
/// is an extractor.
///
/// ```
/// use axum::{Router, routing::post};
/// use tower_ratelimit::{InFlightLayer, PeerIp, Permit};
///
/// let start = |permit: Permit| async move {
///     tokio::spawn(async move {
///         // The job holds its slot until it ends.
///         let _permit = permit;
///     });
/// };
/// let app: Router = Router::new().route("/jobs", post(start)).layer(InFlightLayer::new(2, PeerIp::new()));
/// ```
///
/// - With several layers, the permit of the innermost one holds the slots of all of them.
/// - A request that the layer does not limit has no permit: it is [skipped](crate::InFlightLayer::skip),
///   it has no key, or [`slots_by`](crate::slots_by) has chosen no slots for it. Nor has a request
///   without a required key or cost that a shadow layer forwards.
/// - A request that passes without a slot has a permit that holds nothing: its cost is 0, the layer is a
///   [shadow](crate::InFlightLayer::shadow) layer that would have refused it, or the storage failed.
#[derive(Clone)]
#[must_use = "the slots are given back when the last clone is dropped"]
pub struct Permit {
    held: Arc<Held>,
}

struct Held {
    slot: Option<Slot>,
    /// The permit of an outer layer.
    _outer: Option<Permit>,
}

impl Permit {
    /// Inserts the permit of a request into its extensions, and returns it. `None` for a request that
    /// passes without a slot.
    pub(super) fn insert(slot: Option<Slot>, extensions: &mut Extensions) -> Self {
        let permit = Self::new(slot, None);
        let Some(outer) = extensions.insert(permit.clone()) else { return permit };
        // Looking for an outer permit first would delay all other requests.
        extensions.remove::<Self>();
        let slot = Arc::into_inner(permit.held).and_then(|held| held.slot);
        let permit = Self::new(slot, Some(outer));
        extensions.insert(permit.clone());
        permit
    }

    fn new(slot: Option<Slot>, outer: Option<Self>) -> Self {
        Self { held: Arc::new(Held { slot, _outer: outer }) }
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit").finish_non_exhaustive()
    }
}

#[cfg(feature = "axum")]
crate::extract::extract_inserted! {
    /// Extracts a clone of the permit (feature `axum`).
    ///
    /// Without a permit, the request is rejected with [`NoPermit`](crate::extract::NoPermit). Extract an
    /// `Option<Permit>` if a request may have none, because it is skipped.
    Permit, or NoPermit: |extensions| extensions.get().cloned()
}
