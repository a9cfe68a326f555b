//! What the benchmarks share: keys in an order, limiters that know them, and a service to put layers around.

#![allow(dead_code, reason = "each benchmark takes what it needs")]

pub(crate) mod hits;
pub(crate) mod limiters;
pub(crate) mod services;
