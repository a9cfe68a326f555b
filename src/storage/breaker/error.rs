use std::error::Error;
use std::fmt;

use super::circuit::Shared;
use crate::{BoxError, ConfigError};

/// The error of a [`Breaker`](super::Breaker). Its [`source`](Error::source) is the error of a
/// storage.
#[derive(Clone, Debug)]
pub struct BreakerError {
    kind: Kind,
    source: Option<Shared>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The primary failed.
    Primary,
    /// The breaker was open.
    LeftAlone,
    /// The fallback failed too.
    Fallback,
    /// The policy cannot be divided.
    Share,
}

impl BreakerError {
    pub(super) fn primary(error: Shared) -> Self {
        Self { kind: Kind::Primary, source: Some(error) }
    }

    pub(super) fn left_alone(last: Option<Shared>) -> Self {
        Self { kind: Kind::LeftAlone, source: last }
    }

    pub(super) fn fallback(error: impl Into<BoxError>) -> Self {
        Self { kind: Kind::Fallback, source: Some(error.into().into()) }
    }

    pub(super) fn divide(error: ConfigError) -> Self {
        Self { kind: Kind::Share, source: Some(std::sync::Arc::new(error)) }
    }

    /// Returns `true` if the breaker was open. The hit was not counted, and the source is the last
    /// error of the primary.
    pub fn is_circuit_open(&self) -> bool {
        self.kind == Kind::LeftAlone
    }
}

impl fmt::Display for BreakerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            Kind::Primary => "the storage failed",
            Kind::LeftAlone => "the storage is left alone for now, since it kept failing",
            Kind::Fallback => "the storage did not decide, and its fallback failed",
            Kind::Share => "the fallback cannot keep a share of the policy",
        })?;
        self.source.as_ref().map_or(Ok(()), |source| write!(f, ": {source}"))
    }
}

impl Error for BreakerError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &self.source {
            Some(source) => Some(&**source),
            None => None,
        }
    }
}
