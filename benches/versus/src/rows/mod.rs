//! The measurements, one file per kind.

pub mod decisions;
pub mod flood;
pub mod growth;
pub mod memory;
pub mod middleware;
pub mod policies;
pub mod refusals;
pub mod router;
