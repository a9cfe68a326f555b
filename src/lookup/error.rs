use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::BoxError;

/// The error of a failed lookup of a policy.
///
/// | cause | [`source`](Error::source) |
/// |---|---|
/// | the lookup returned an error | this error |
/// | the lookup took longer than its [timeout](crate::PolicyLookup::timeout) | none |
/// | the lookup panicked, or its runtime has ended | none |
/// | there is no tokio runtime with time enabled | none |
/// | too many lookups [wait](crate::PolicyLookup::max_lookups) | none |
///
/// All requests that wait for the same lookup get clones of one error.
#[derive(Clone)]
pub struct LookupError(Arc<LookupErrorKind>);

enum LookupErrorKind {
    Failed(BoxError),
    TimedOut(Duration),
    Panicked,
    NoRuntime,
    /// The number of lookups in flight.
    TooMany(usize),
}

impl LookupError {
    pub(super) fn failed(error: BoxError) -> Self {
        Self(Arc::new(LookupErrorKind::Failed(error)))
    }

    pub(super) fn timed_out(timeout: Duration) -> Self {
        Self(Arc::new(LookupErrorKind::TimedOut(timeout)))
    }

    pub(super) fn panicked() -> Self {
        Self(Arc::new(LookupErrorKind::Panicked))
    }

    pub(super) fn no_runtime() -> Self {
        Self(Arc::new(LookupErrorKind::NoRuntime))
    }

    pub(super) fn too_many(in_flight: usize) -> Self {
        Self(Arc::new(LookupErrorKind::TooMany(in_flight)))
    }

    /// Returns `true` if the lookup took longer than its timeout.
    pub fn is_timeout(&self) -> bool {
        matches!(*self.0, LookupErrorKind::TimedOut(_))
    }
}

impl fmt::Display for LookupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("cannot look up the policy")?;
        match &*self.0 {
            LookupErrorKind::Failed(_) => Ok(()),
            LookupErrorKind::TimedOut(timeout) => write!(f, ": no result within {timeout:?}"),
            LookupErrorKind::Panicked => f.write_str(": the lookup panicked, or its runtime has ended"),
            LookupErrorKind::NoRuntime => f.write_str(": there is no tokio runtime with time enabled"),
            LookupErrorKind::TooMany(in_flight) => write!(f, ": {in_flight} lookups are in flight or wait already"),
        }
    }
}

impl fmt::Debug for LookupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LookupError({self}")?;
        if let LookupErrorKind::Failed(error) = &*self.0 {
            write!(f, ": {error:?}")?;
        }
        f.write_str(")")
    }
}

impl Error for LookupError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &*self.0 {
            LookupErrorKind::Failed(error) => Some(&**error),
            LookupErrorKind::TimedOut(_)
            | LookupErrorKind::Panicked
            | LookupErrorKind::NoRuntime
            | LookupErrorKind::TooMany(_) => None,
        }
    }
}
