//! Storages on real servers, which the tests start.

mod etcd;
mod etcd_faults;
mod etcd_tls;
mod long_logs;
mod memcached;
mod memcached_faults;
mod memcached_link;
mod redis;
mod redis_faults;
mod redis_link;
mod redis_states;
mod redis_tls;
mod redis_twins;
mod round_trips;
mod wrappers;
