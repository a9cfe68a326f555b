//! etcd: decisions on one member and on three, logins, leases, TLS, and a full server.

mod decisions;
mod leases;
mod login;
mod members;
mod space;
mod tls;

use std::time::Duration;

use common::harness::{DEADLINE, EntryPoints};
use common::policy;
use tower_ratelimit::Global;
use tower_ratelimit::storage::EtcdStorage;

/// A timeout that only a hanging test reaches.
const LONG: Duration = Duration::from_secs(60);

/// Limits that no test reaches.
const PLENTY: &str = "fixed-window 10000/day; moving-window 1000/day";

fn storage(url: &str) -> EtcdStorage {
    EtcdStorage::new(url).unwrap_or_else(|error| panic!("{error}")).timeout(LONG)
}

fn entry_points(url: &str) -> EntryPoints {
    EntryPoints::new(&policy(PLENTY), storage(url).timeout(DEADLINE), || Global)
}
