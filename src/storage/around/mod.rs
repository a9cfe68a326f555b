//! Storages around a storage, of any kind: what they add holds for ours and for anybody's.

mod breaker;
mod deadline;
mod leases;
mod refusals;
mod table;
mod tally;

#[cfg(feature = "metrics")]
pub(crate) use self::breaker::PATHS;
pub use self::breaker::{Breaker, BreakerError, Circuit, CircuitState, NoFallback, Phase};
pub use self::deadline::{Deadline, DeadlineError};
pub use self::leases::{LeaseError, Leases};
pub use self::refusals::RefusalCache;
