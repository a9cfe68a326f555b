//! The way to the members that a URL names: made without any I/O, connected when it is used, and again after failures.

mod connection;
mod member;
mod members;

pub(super) use self::members::Members;
