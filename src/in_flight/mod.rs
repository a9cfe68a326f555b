//! A limit of the requests in flight: each takes slots of its key until its response has ended.
//!
//! The future of a request holds its slots, then the body of its response does. Both share them with
//! the [`Permit`] in the request's extensions. The last owner that is dropped gives the slots back, so
//! this happens once, whatever ends the request.

mod admission;
mod body;
mod claims;
mod future;
mod layer;
mod metrics;
mod permit;
mod renewing;
mod row;
mod service;
mod slots;
mod table;
mod waiting;

pub use self::body::InFlightBody;
pub use self::future::InFlightFuture;
pub use self::layer::InFlightLayer;
pub use self::permit::Permit;
pub use self::service::InFlight;
pub use self::slots::{LiveSlots, Slots, SlotsSource, slots_by};
