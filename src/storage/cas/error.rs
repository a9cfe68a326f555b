use std::error::Error;
use std::fmt;
use std::sync::Arc;

use crate::{BoxError, ConfigError};

/// Why [`Cas`](super::Cas) could not decide, clear or give back. Its [`source`](Error::source) is what the store said.
///
/// That others were faster all the time is no error of a hit, which is refused as [contended](crate::Decision::is_contended).
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
    /// Others changed the key all the time.
    Contended {
        sent: bool,
    },
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

    pub(super) fn contended(sent: bool) -> Self {
        Self(Kind::Contended { sent })
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

    /// Whether a hit may have been counted all the same, a refund given back, a key cleared: it was sent to the store, and what
    /// became of it is not known. It is not sent again, since then it might be counted twice.
    pub fn may_have_counted(&self) -> bool {
        matches!(
            self.0,
            Kind::Store { swapping: true, .. }
                | Kind::Late { sent: true }
                | Kind::Contended { sent: true }
                | Kind::Ended
        )
    }
}

impl fmt::Display for CasError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Store { source, .. } => source.fmt(f),
            Kind::Late { sent: true } => f.write_str("the store did not answer within the deadline"),
            Kind::Late { sent: false } => f.write_str("the store did not say what it has within the deadline"),
            Kind::Contended { sent: false } => {
                f.write_str("others changed the key all the time: nothing is cleared or given back")
            }
            Kind::Contended { sent: true } => f.write_str(
                "others changed the key all the time, and the last attempt was not answered within the deadline",
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
