use std::error::Error;
use std::fmt;
use std::sync::Arc;

use crate::BoxError;

/// The error of [`Leases`](super::Leases): the storage failed, or the task that sent the request
/// was cancelled. All hits that waited for the same request get the same error.
#[derive(Clone)]
pub struct LeaseError(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Storage(Arc<BoxError>),
    Cancelled,
}

impl LeaseError {
    pub(super) fn storage(error: impl Into<BoxError>) -> Self {
        Self(Kind::Storage(Arc::new(error.into())))
    }

    pub(super) const fn cancelled() -> Self {
        Self(Kind::Cancelled)
    }
}

impl fmt::Display for LeaseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Storage(error) => error.fmt(f),
            Kind::Cancelled => f.write_str(
                "lease task was cancelled: leases on a storage with round trips need a running tokio runtime",
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
            // `Display` has printed the error itself, so this continues with its source.
            Kind::Storage(error) => error.source(),
            Kind::Cancelled => None,
        }
    }
}
