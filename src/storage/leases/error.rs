use std::error::Error;
use std::fmt;
use std::sync::Arc;

use crate::BoxError;

/// Why a [`Leases`](super::Leases) could not decide: its storage could not, or there is nobody to ask it. All who waited for one answer
/// are told the same.
#[derive(Clone)]
pub struct LeaseError(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Storage(Arc<BoxError>),
    Ended,
}

impl LeaseError {
    pub(super) fn storage(error: impl Into<BoxError>) -> Self {
        Self(Kind::Storage(Arc::new(error.into())))
    }

    pub(super) const fn ended() -> Self {
        Self(Kind::Ended)
    }
}

impl fmt::Display for LeaseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Storage(error) => error.fmt(f),
            Kind::Ended => f.write_str(
                "whoever asked the storage for units has ended before it answered: leases on a storage that makes one wait \
                 need a runtime of tokio's, which is still running",
            ),
        }
    }
}

impl fmt::Debug for LeaseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LeaseError").field(&self.0).finish()
    }
}

impl Error for LeaseError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &self.0 {
            // What it says is said already.
            Kind::Storage(error) => error.source(),
            Kind::Ended => None,
        }
    }
}
