//! The shared state of a layer.

use std::sync::Arc;

use super::config::LayerConfig;
use super::lints::Lints;
use super::waiting_room::WaitingRoom;
use crate::waiting::Queues;

/// The state that all services of a layer share.
pub(crate) struct LayerState<St, R> {
    pub(crate) config: LayerConfig,
    pub(crate) storage: St,
    pub(crate) rejection: Arc<R>,
    pub(super) lints: Lints,
    /// The queues of the layer's limiters and of its waiting requests.
    pub(crate) queues: Arc<Queues>,
    /// `None` if the layer refuses without waiting.
    pub(super) room: Option<Arc<WaitingRoom>>,
}

impl<St, R> LayerState<St, R> {
    pub(crate) fn new(config: LayerConfig, storage: St, rejection: Arc<R>) -> Arc<Self> {
        let queues = Arc::<Queues>::default();
        let room = config.wait.map(|bounds| WaitingRoom::new(bounds, Arc::clone(&queues)));
        Arc::new(Self { config, storage, rejection, lints: Lints::default(), queues, room })
    }
}
