//! Test suites for strategies and storages (feature `testing`).
//!
//! | implementation of | test suite |
//! |---|---|
//! | [`Strategy`](crate::strategy::Strategy) | [`StrategyLaws`] |
//! | [`Storage`](crate::Storage) | [`StorageLaws`] |
//! | [`CasStorage`](crate::storage::CasStorage) | [`CasLaws`], then [`StorageLaws`] of a [`Cas`](crate::storage::Cas) around it |
//!
//! A suite checks laws. The functions of this module check single laws of a storage. Many laws are
//! checked with scripts, which are random sequences of requests. The environment variable
//! `PROPTEST_CASES` sets the number of scripts per law, which defaults to 256.
//!
//! A suite panics at the first broken law. The message names the law, and has at most ten lines.
//! For a law with scripts, it also contains the smallest script that breaks the law.
//!
//! ```no_run
//! use tower_ratelimit::{FixedWindow, testing};
//!
//! // In a test: a fixed window admits fewer than twice the amount in any period.
//! testing::StrategyLaws::new(FixedWindow::new()).promise(|quota| 2 * u64::from(quota.amount()) - 1).check();
//! ```

mod cas;
mod changes;
mod concurrency;
mod harness;
mod listing;
mod members;
mod model;
mod scripts;
mod sequential;
mod slots;
mod storage;
mod strategy;
mod strategy_laws;

pub use self::cas::CasLaws;
pub use self::concurrency::concurrent_hits_are_exact;
pub use self::members::members_decide_like_the_model;
pub use self::model::{Model, decides_like_the_model};
pub use self::storage::StorageLaws;
pub use self::strategy::StrategyLaws;
