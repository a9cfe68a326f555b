//! The connections to the members of a URL.
//!
//! Creating [`Members`] does no I/O. They connect on first use, and reconnect after a failure.

mod connection;
mod member;
mod members;

pub(super) use self::members::Members;
