//! Shared by the benchmarks: sequences of keys, limiters with known keys, and a service for layers.

#![allow(dead_code, reason = "each benchmark uses a part of it")]

pub(crate) mod hits;
pub(crate) mod limiters;
pub(crate) mod services;
