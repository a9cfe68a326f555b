//! The shared state of a layer.

use std::sync::Arc;

use super::config::LayerConfig;
use super::lints::Lints;
use super::waiting_room::WaitingRoom;
use crate::storage::AnyStorage;
use crate::waiting::Queues;

/// The state that all services of a layer share.
pub(crate) struct LayerState<R> {
    pub(crate) config: LayerConfig,
    pub(crate) storage: AnyStorage,
    pub(crate) rejection: Arc<R>,
    pub(super) lints: Lints,
    /// The queues of the layer's limiters and of its waiting requests.
    pub(crate) queues: Arc<Queues>,
    /// `None` if the layer refuses without waiting.
    pub(super) room: Option<Arc<WaitingRoom>>,
}

impl<R> LayerState<R> {
    pub(crate) fn new(config: LayerConfig, storage: AnyStorage, rejection: Arc<R>) -> Arc<Self> {
        let queues = Arc::<Queues>::default();
        let room = config.wait.map(|bounds| WaitingRoom::new(bounds, Arc::clone(&queues)));
        Arc::new(Self { config, storage, rejection, lints: Lints::default(), queues, room })
    }
}
