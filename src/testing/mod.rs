//! The laws, for ours and for anybody's strategy and storage (feature `testing`).
//!
//! | what is yours | prove it with |
//! |---|---|
//! | a [`Strategy`](crate::strategy::Strategy) | [`StrategyLaws`] |
//! | a [`Storage`](crate::Storage) | [`StorageLaws`] |
//! | a [`CasStorage`](crate::storage::CasStorage) | [`CasLaws`], then [`StorageLaws`] of a [`Cas`](crate::storage::Cas) over it |
//!
//! A failure names the law that is broken, in at most ten lines. Where scripts are random it shows the smallest script that
//! breaks the law. `PROPTEST_CASES` sets how many scripts are tried.
//!
//! ```no_run
//! use tower_ratelimit::{FixedWindow, testing};
//!
//! // In a test: FixedWindow promises fewer than twice the amount in any period.
//! testing::StrategyLaws::new(FixedWindow::new()).promise(|quota| 2 * u64::from(quota.amount()) - 1).check();
//! ```

mod at_once;
mod changes;
mod desk;
mod each_change;
mod each_hit;
mod generate;
mod large;
mod laws;
mod like_the_model;
mod model;
mod one_by_one;
mod storage;
mod swaps;

pub use self::at_once::{concurrent_hits_are_exact, concurrent_refunds_are_exact};
pub use self::laws::StrategyLaws;
pub use self::like_the_model::{decides_like_the_model, policies_of_one_name_share_only_what_is_the_same};
pub use self::model::Model;
pub use self::storage::StorageLaws;
pub use self::swaps::CasLaws;
