//! Rate limiting.
mod decision;
mod error;
pub mod extract;
mod future;
mod headers;
mod key;
mod layer;
mod limiter;
mod per_request;
mod policy;
mod quota;
mod rejection;
mod service;
pub mod storage;
pub mod strategy;
#[cfg(feature = "testing")]
pub mod testing;
mod text;
mod time;

pub use self::decision::Decision;
pub use self::error::{BoxError, ConfigError};
#[doc(no_inline)]
pub use self::extract::{Global, Header, KeyExtractor, PeerIp};
pub use self::future::ResponseFuture;
pub use self::headers::Headers;
pub use self::key::Key;
pub use self::layer::{OnError, RateLimitLayer};
pub use self::limiter::RateLimiter;
pub use self::per_request::{IntoCost, Policies, policy_by};
pub use self::policy::{Limit, Op, Policy, PolicyBuilder};
pub use self::quota::Quota;
pub use self::rejection::{EmptyRejection, Refused, Rejection, TextRejection};
pub use self::service::RateLimit;
#[doc(no_inline)]
pub use self::storage::{MemoryStorage, Storage};
#[doc(no_inline)]
pub use self::strategy::{ElasticWindow, FixedWindow, LeakyBucket, MovingWindow, SlidingWindowCounter, TokenBucket};
pub use self::time::Timestamp;
