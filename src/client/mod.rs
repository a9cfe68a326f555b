//! Clients that keep to the limits of other servers.

mod error;
mod fields;
mod gate;
mod grpc;
mod layer;
mod pauses;
mod service;
mod values;

pub use self::error::ClientLimitError;
pub use self::layer::ClientLimitLayer;
pub use self::service::{ClientLimit, ClientLimitFuture, CopyRequest, NoRetry};
