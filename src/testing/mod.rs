//! The laws as property tests, for ours and for anybody's strategy and storage (feature `testing`).
//!
//! A failure shows the smallest script of hits that breaks the law. `PROPTEST_CASES` says how many scripts are tried.
//!
//! ```no_run
//! use tower_ratelimit::{FixedWindow, testing};
//!
//! // In a test: FixedWindow promises fewer than twice the amount in any period.
//! testing::Laws::new(FixedWindow::new()).promise(|quota| 2 * u64::from(quota.amount()) - 1).check();
//! ```

mod generate;
mod laws;
mod model;
mod storage;

pub use self::laws::Laws;
pub use self::model::Model;
pub use self::storage::{concurrent_hits_are_exact, decides_like_the_model};
