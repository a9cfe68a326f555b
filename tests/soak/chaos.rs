//! What a soak is made of.

pub(crate) mod client;
pub(crate) mod faults;
pub(crate) mod memory;
