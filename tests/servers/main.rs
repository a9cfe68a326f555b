//! Storages on real servers, which the tests start.

mod clock_skew;
mod combined_swaps;
mod connecting;
mod etcd;
mod faults;
mod keys;
mod long_logs;
mod memcached;
mod postgres;
mod redis;
mod round_trips;
mod several_keys;
mod sqlite;
mod wrappers;
