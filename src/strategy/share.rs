use std::sync::Arc;

use super::{Kernel, Strategy};
use crate::Quota;

/// What one of several has of a limit that they divide: see [`Strategy::share`].
#[derive(Clone, Debug)]
pub struct Share {
    pub(crate) strategy: Arc<dyn Kernel>,
    pub(crate) quota: Quota,
}

impl Share {
    /// So much by this strategy: one of the same name, and a quota of the same period.
    pub fn new(strategy: impl Strategy, quota: Quota) -> Self {
        Self { strategy: Arc::new(strategy), quota }
    }
}
