use super::Storage;
use crate::policy::PolicyUser;
use crate::{ConfigError, Policy};

/// A storage that has to keep a live policy.
pub(crate) struct StorageUser<St>(St);

impl<St> StorageUser<St> {
    pub(crate) fn new(storage: St) -> Self {
        Self(storage)
    }
}

impl<St: Storage> PolicyUser for StorageUser<St> {
    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        self.0.validate(policy)?;
        policy.shadows().iter().try_for_each(|shadow| self.0.validate(shadow))
    }

    fn changed(&self, _: &Policy) {}
}
