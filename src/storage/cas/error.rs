use std::error::Error;
use std::fmt;
use std::sync::Arc;

use crate::{BoxError, ConfigError};

/// The error of a [`Cas`](super::Cas). If the store failed, [`source`](Error::source) returns its
/// error.
///
/// A hit that loses every race is not an error. It is refused as
/// [contended](crate::Decision::is_contended).
#[derive(Clone, Debug)]
pub struct CasError(Kind);

#[derive(Clone, Debug)]
enum Kind {
    /// The store failed to load or to swap.
    Store {
        source: Arc<dyn Error + Send + Sync>,
        swapping: bool,
    },
    /// The call timed out.
    Late {
        sent: bool,
    },
    /// Other processes changed the key before every swap. Nothing was stored.
    Contended,
    /// The states of the policy can grow longer than the store allows.
    TooLong(ConfigError),
    /// The text to store is longer than the store allows.
    Overgrown {
        bytes: usize,
        longest: usize,
    },
    /// The background task ended before it decided.
    Ended,
    NoRuntime,
}

impl CasError {
    pub(super) fn loading(error: impl Into<BoxError>) -> Self {
        Self(Kind::Store { source: error.into().into(), swapping: false })
    }

    pub(super) fn swapping(error: impl Into<BoxError>) -> Self {
        Self(Kind::Store { source: error.into().into(), swapping: true })
    }

    pub(super) fn late(sent: bool) -> Self {
        Self(Kind::Late { sent })
    }

    pub(super) fn contended() -> Self {
        Self(Kind::Contended)
    }

    pub(super) fn too_long(error: ConfigError) -> Self {
        Self(Kind::TooLong(error))
    }

    pub(super) fn overgrown(bytes: usize, longest: usize) -> Self {
        Self(Kind::Overgrown { bytes, longest })
    }

    pub(super) fn ended() -> Self {
        Self(Kind::Ended)
    }

    pub(super) fn no_runtime() -> Self {
        Self(Kind::NoRuntime)
    }

    /// Returns `true` if the store did not reply in time.
    pub fn is_timeout(&self) -> bool {
        matches!(self.0, Kind::Late { .. })
    }

    /// Returns `true` if the store may have executed the call: counted the hit, refunded the units,
    /// or cleared the key.
    ///
    /// The swap was sent, but the store did not confirm it. It is not retried, because it could be
    /// executed twice.
    pub fn may_have_counted(&self) -> bool {
        matches!(self.0, Kind::Store { swapping: true, .. } | Kind::Late { sent: true } | Kind::Ended)
    }
}

impl fmt::Display for CasError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Store { source, .. } => source.fmt(f),
            Kind::Late { sent: true } => {
                f.write_str("the store did not confirm a swap within the deadline: the call may have been executed")
            }
            Kind::Late { sent: false } => f.write_str("the store did not return the state within the deadline"),
            Kind::Contended => f.write_str(
                "other processes changed the key before every swap, nothing was cleared or settled; try again",
            ),
            Kind::TooLong(error) => error.fmt(f),
            Kind::Overgrown { bytes, longest } => write!(
                f,
                "the state of the key has grown to {bytes} bytes, and the store keeps at most {longest}; use a \
                 different name for each policy, implement Strategy::log_entries for strategies with a log, and use \
                 no moving window for costs that are settled"
            ),
            Kind::Ended => f.write_str(
                "the background task ended without a decision: its runtime was shut down, or a strategy panicked",
            ),
            Kind::NoRuntime => f.write_str("no tokio runtime; await the call inside of one"),
        }
    }
}

impl Error for CasError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &self.0 {
            Kind::Store { source, .. } => Some(&**source),
            _ => None,
        }
    }
}
