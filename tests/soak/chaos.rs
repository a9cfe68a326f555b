//! The parts of the soak test: clients, faults and memory.

pub(crate) mod client;
pub(crate) mod faults;
pub(crate) mod memory;
