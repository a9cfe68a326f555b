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
use common::servers::with_timeout;
use tower_ratelimit::Global;
use tower_ratelimit::storage::EtcdStorage;

/// A timeout that only a hanging test reaches.
const LONG: Duration = Duration::from_secs(60);

/// Limits that no test reaches.
const PLENTY: &str = "fixed-window 10000/day; moving-window 1000/day";

fn storage(url: &str) -> EtcdStorage {
    EtcdStorage::new(&with_timeout(url, LONG)).unwrap_or_else(|error| panic!("{error}"))
}

fn hasty(url: &str) -> EtcdStorage {
    EtcdStorage::new(&with_timeout(url, DEADLINE)).unwrap_or_else(|error| panic!("{error}"))
}

fn entry_points(url: &str) -> EntryPoints {
    EntryPoints::new(&policy(PLENTY), hasty(url), Global::new)
}
