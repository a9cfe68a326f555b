//! The state that all services of a layer share.

use std::sync::Arc;

use super::config::LayerConfig;
use super::lints::Lints;
use super::waiting_room::WaitingRoom;

/// The state that all services of a layer share.
pub(crate) struct LayerState<St, R> {
    pub(crate) config: LayerConfig,
    pub(crate) storage: St,
    pub(crate) rejection: Arc<R>,
    pub(super) lints: Lints,
    /// `None` if the layer refuses without waiting.
    pub(super) room: Option<Arc<WaitingRoom>>,
}

impl<St, R> LayerState<St, R> {
    pub(crate) fn new(config: LayerConfig, storage: St, rejection: Arc<R>) -> Arc<Self> {
        let room = config.wait.map(WaitingRoom::new);
        Arc::new(Self { config, storage, rejection, lints: Lints::default(), room })
    }
}
