use std::error::Error;
use std::fmt;

use super::circuit::SharedError;
use crate::{BoxError, ConfigError};

/// The error of a [`Breaker`](super::Breaker). Its [`source`](Error::source) is the error of the
/// primary or of the fallback.
#[derive(Clone, Debug)]
pub struct BreakerError {
    kind: Kind,
    source: Option<SharedError>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The primary failed.
    Primary,
    /// The primary was not called, because the circuit was open.
    Open,
    /// The fallback failed, after the primary had failed or was not called.
    Fallback,
    /// The policy cannot be divided.
    Divide,
}

impl BreakerError {
    pub(super) fn primary(error: SharedError) -> Self {
        Self { kind: Kind::Primary, source: Some(error) }
    }

    pub(super) fn circuit_open(last: Option<SharedError>) -> Self {
        Self { kind: Kind::Open, source: last }
    }

    pub(super) fn fallback(error: impl Into<BoxError>) -> Self {
        Self { kind: Kind::Fallback, source: Some(error.into().into()) }
    }

    pub(super) fn divide(error: ConfigError) -> Self {
        Self { kind: Kind::Divide, source: Some(std::sync::Arc::new(error)) }
    }

    /// Returns `true` if the breaker was open. In this case, the hit was not counted, and the source
    /// is the last error of the primary.
    pub fn is_circuit_open(&self) -> bool {
        self.kind == Kind::Open
    }
}

impl fmt::Display for BreakerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            Kind::Primary => "rate limit storage failed",
            Kind::Open => "rate limit storage is not called while the circuit breaker is open",
            Kind::Fallback => "rate limit storage and its fallback failed",
            Kind::Divide => "cannot divide the policy among the replicas for the fallback",
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
