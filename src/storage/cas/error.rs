use std::error::Error;
use std::fmt;
use std::sync::Arc;

use crate::{BoxError, ConfigError};

/// Why [`Cas`](super::Cas) could not decide, clear or give back. Its [`source`](Error::source) is what the store said.
///
/// A hit that lost every swap is no error. It is refused as [contended](crate::Decision::is_contended).
#[derive(Clone, Debug)]
pub struct CasError(Kind);

#[derive(Clone, Debug)]
enum Kind {
    /// The store failed, to load or to swap.
    Store {
        source: Arc<dyn Error + Send + Sync>,
        swapping: bool,
    },
    /// The deadline passed.
    Late {
        sent: bool,
    },
    /// Other processes changed the key before every swap. Nothing was stored.
    Contended,
    /// The policy may need more than the store can keep.
    TooLong(ConfigError),
    /// The text to be stored is longer than the store can keep.
    Overgrown {
        bytes: usize,
        longest: usize,
    },
    /// What was to decide has ended before it did.
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

    /// Whether the store did not answer within the deadline.
    pub fn is_timeout(&self) -> bool {
        matches!(self.0, Kind::Late { .. })
    }

    /// Returns `true` if the call may have been executed: the hit counted, the units refunded, the key
    /// cleared. It was sent to the store, and the store did not confirm it. It is not sent again, since
    /// it could be executed twice.
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
            Kind::Late { sent: false } => f.write_str("the store did not say what it has within the deadline"),
            Kind::Contended => f.write_str(
                "other processes changed the key before every swap, so nothing was cleared or refunded: try again",
            ),
            Kind::TooLong(error) => error.fmt(f),
            Kind::Overgrown { bytes, longest } => write!(
                f,
                "what is remembered under the policy's name has grown to {bytes} bytes, and the store keeps at most \
                 {longest}: give differing policies names of their own, or say how long a log may be (Strategy::log_entries)"
            ),
            Kind::Ended => f.write_str("the runtime that was to decide has ended, or a strategy has panicked"),
            Kind::NoRuntime => f.write_str("there is no runtime of tokio's here: await this inside of one"),
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
