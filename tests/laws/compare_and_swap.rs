//! The laws of a compare-and-swap store and of the storage over it.

use std::time::Duration;

use common::Foreign;
use common::fake_cas_store::FakeCasStore;
use tower_ratelimit::storage::{Cas, ManualClock};
use tower_ratelimit::testing::{CasLaws, StorageLaws};
use tower_ratelimit::{ElasticWindow, MovingWindow, Policy, Quota};

fn over(store: &FakeCasStore) -> Cas<FakeCasStore> {
    Cas::new(store.clone()).deadline(Duration::from_secs(20))
}

#[test]
fn fake_store_compares_and_swaps() {
    CasLaws::new(FakeCasStore::default).check();
    CasLaws::new(FakeCasStore::with_clock).check();
}

#[test]
fn compare_and_swap_storage_obeys_the_laws() {
    StorageLaws::new(|clock| over(&FakeCasStore::default()).clock(clock))
        .second_handle(|storage| over(storage.store()).clock(ManualClock::default()))
        .and_policies([
            Policy::new(Foreign, Quota::per_second(2)).limit(MovingWindow::new(), Quota::per_minute(5)),
            Policy::new(Foreign, Quota::per_second(3)).limit(ElasticWindow::new(), Quota::per_minute(5)),
        ])
        .scripts(128)
        .check();
}
