use std::sync::Arc;

use super::{Strategy, StrategyDyn};
use crate::quota::Quota;

/// The part of a limit that belongs to one of several replicas. See [`Strategy::divide`].
#[derive(Clone, Debug)]
pub struct Divided {
    pub(crate) strategy: Arc<dyn StrategyDyn>,
    pub(crate) quota: Quota,
}

impl Divided {
    /// Creates the part of one replica. `strategy` must have the same [name](Strategy::name) as the
    /// strategy that is being divided, and `quota` the same period as the original quota, because
    /// the part uses the same stored states. This is not checked.
    pub fn new(strategy: impl Strategy, quota: Quota) -> Self {
        Self { strategy: Arc::new(strategy), quota }
    }
}
