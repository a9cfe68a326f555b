//! The limiter without HTTP: the memory storage, compare-and-swap storages, refunds, changed
//! quotas.

mod acquire;
mod calendar;
mod cas;
mod cas_skew;
mod cas_versions;
mod coarse_clock;
mod divided_quotas;
mod full_storage;
mod live_policies;
mod live_policy;
mod lockout;
mod lockout_model;
mod memory;
mod memory_bounds;
mod quota_changes;
mod refund;
mod registered_schemes;
mod reservation;
mod serde;
mod settle;
mod several_keys;
mod text;
mod upstream;
mod values;
mod vectors;
