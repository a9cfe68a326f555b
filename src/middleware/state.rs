//! The state that all services of a layer share.

use std::sync::Arc;

use super::config::LayerConfig;
use super::lints::Lints;

/// The state that all services of a layer share.
pub(crate) struct LayerState<St, R> {
    pub(crate) config: LayerConfig,
    pub(crate) storage: St,
    pub(crate) rejection: Arc<R>,
    pub(super) lints: Lints,
}

impl<St, R> LayerState<St, R> {
    pub(crate) fn new(config: LayerConfig, storage: St, rejection: Arc<R>) -> Arc<Self> {
        Arc::new(Self { config, storage, rejection, lints: Lints::default() })
    }
}
