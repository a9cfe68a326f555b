//! Rate limiting.
mod decision;
mod error;
mod key;
mod limiter;
mod policy;
mod quota;
pub mod storage;
pub mod strategy;
mod text;
mod time;

pub use self::decision::Decision;
pub use self::error::{BoxError, ConfigError};
pub use self::key::Key;
pub use self::limiter::RateLimiter;
pub use self::policy::{Limit, Op, Policy, PolicyBuilder};
pub use self::quota::Quota;
#[doc(no_inline)]
pub use self::storage::{MemoryStorage, Storage};
#[doc(no_inline)]
pub use self::strategy::{ElasticWindow, FixedWindow, LeakyBucket, MovingWindow, SlidingWindowCounter, TokenBucket};
pub use self::time::Timestamp;
