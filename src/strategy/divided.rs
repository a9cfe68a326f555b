use std::sync::Arc;

use super::{Strategy, StrategyDyn};
use crate::Quota;

/// The part of a limit that belongs to one of several replicas. See [`Strategy::divide`].
#[derive(Clone, Debug)]
pub struct Divided {
    pub(crate) strategy: Arc<dyn StrategyDyn>,
    pub(crate) quota: Quota,
}

impl Divided {
    /// Creates a part. `strategy` must have the same [name](Strategy::name) as the divided
    /// strategy, and `quota` the same period as the divided quota.
    pub fn new(strategy: impl Strategy, quota: Quota) -> Self {
        Self { strategy: Arc::new(strategy), quota }
    }
}
