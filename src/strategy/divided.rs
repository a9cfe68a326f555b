use std::sync::Arc;

use super::{Strategy, StrategyDyn};
use crate::Quota;

/// What one of several has of a limit that they divide: see [`Strategy::divide`].
#[derive(Clone, Debug)]
pub struct Divided {
    pub(crate) strategy: Arc<dyn StrategyDyn>,
    pub(crate) quota: Quota,
}

impl Divided {
    /// So much by this strategy: one of the same name, and a quota of the same period.
    pub fn new(strategy: impl Strategy, quota: Quota) -> Self {
        Self { strategy: Arc::new(strategy), quota }
    }
}
