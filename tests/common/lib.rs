//! Helpers that the integration tests share: requests, storages, strategies, real servers and the
//! golden vectors.

#![allow(
    missing_docs,
    missing_debug_implementations,
    clippy::exhaustive_enums,
    clippy::exhaustive_structs,
    clippy::missing_errors_doc,
    clippy::missing_panics_doc,
    reason = "only the tests of this package use it"
)]

pub mod certificates;
mod errors;
pub mod example_process;
pub mod fake_cas_store;
mod fake_storage;
pub mod fleets;
pub mod harness;
mod laws;
#[cfg(feature = "laws")]
pub mod members;
pub mod pages;
mod poll;
pub mod random;
mod requests;
mod responses;
#[cfg(feature = "servers")]
pub mod servers;
mod storages;
mod strategies;
pub mod time;
pub mod vectors;

pub use self::errors::{message, panic_message};
pub use self::fake_storage::{Behavior, FAILURE, FakeStorage, failing, slow};
pub use self::laws::{assert_breaks, assert_each_breaks};
pub use self::poll::{now, outside_of_a_runtime, poll};
pub use self::requests::{AnswersWithStatus, Inner, admitted_at_once, ask, get, status, with};
pub use self::responses::{numbers, remaining, retry_after};
pub use self::storages::{T0, counted, decide, hit, memory, memory_with_manual_clock, settle, spend, start_hit};
pub use self::strategies::{EVERY_STRATEGY, Foreign, KEEPING, STRATEGY_NAMES, foreign, policy};
