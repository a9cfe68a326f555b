//! The laws of a compare-and-swap store and of the storage over it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::fake_cas_store::FakeCasStore;
use common::{Foreign, policy};
use tower_ratelimit::storage::{Cas, CasStorage, Loaded, ManualClock, Swapped};
use tower_ratelimit::testing::{CasLaws, StorageLaws};
use tower_ratelimit::{BoxError, ElasticWindow, Key, MovingWindow, Policy, Quota, RateLimiter};

fn over(store: &FakeCasStore) -> Cas<FakeCasStore> {
    Cas::new(store.clone()).timeout(Duration::from_secs(20))
}

#[test]
fn fake_cas_store_obeys_the_laws() {
    CasLaws::new(FakeCasStore::default).check();
    CasLaws::new(FakeCasStore::with_clock).check();
}

/// The store fails if a text is longer than the longest one.
#[test]
fn store_of_short_texts_obeys_the_laws() {
    for longest in [20, 200, 65_535] {
        CasLaws::new(|| FakeCasStore::with_max_len(longest)).check();
    }
}

#[test]
fn store_that_recalls_texts_obeys_the_laws() {
    CasLaws::new(Recalling::default).second_handle(Recalling::in_another_process).check();
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

/// A store that recalls the texts of its last loads. It loads after each swap that was stored.
#[derive(Clone, Debug, Default)]
struct Recalling {
    store: FakeCasStore,
    loaded: Arc<Mutex<HashMap<String, Loaded<u64>>>>,
}

impl CasStorage for Recalling {
    type Error = BoxError;
    type Version = u64;

    async fn load(&self, key: &str, deadline: Instant) -> Result<Loaded<u64>, BoxError> {
        let loaded = self.store.load(key, deadline).await?;
        self.loaded.lock().unwrap().insert(key.to_owned(), loaded.clone());
        Ok(loaded)
    }

    async fn swap(
        &self,
        key: &str,
        version: &u64,
        text: &str,
        keep: Duration,
        deadline: Instant,
    ) -> Result<Swapped<u64>, BoxError> {
        self.loaded.lock().unwrap().remove(key);
        let swapped = self.store.swap(key, version, text, keep, deadline).await?;
        if matches!(swapped, Swapped::Stored) {
            self.load(key, deadline).await?;
        }
        Ok(swapped)
    }

    fn recall(&self, key: &str) -> Option<Loaded<u64>> {
        self.loaded.lock().unwrap().get(key).cloned()
    }
}

impl Recalling {
    /// Returns the same store as another process uses it, which recalls its own texts.
    fn in_another_process(&self) -> Self {
        Self { store: self.store.clone(), loaded: Arc::default() }
    }
}

#[test]
fn storage_that_recalls_texts_obeys_the_laws() {
    StorageLaws::new(|clock| Cas::new(Recalling::default()).timeout(Duration::from_secs(20)).clock(clock))
        .second_handle(|storage| {
            let other = storage.store().in_another_process();
            Cas::new(other).timeout(Duration::from_secs(20)).clock(ManualClock::default())
        })
        .scripts(128)
        .check();
}

#[test]
fn store_that_pauses_obeys_the_laws() {
    let pauses = Arc::<AtomicU32>::default();
    CasLaws::new(|| Pausing { store: FakeCasStore::default(), pauses: Arc::clone(&pauses) }).check();
    assert_eq!(pauses.load(Ordering::SeqCst), 2);
}

/// A store that pauses twice while the law of expiry is checked. Both times, a text expires.
#[derive(Clone, Debug)]
struct Pausing {
    store: FakeCasStore,
    pauses: Arc<AtomicU32>,
}

impl Pausing {
    /// Pauses if this is the pause with this number.
    async fn pause(&self, number: u32, length: Duration) -> bool {
        let pauses = self.pauses.compare_exchange(number, number + 1, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if pauses {
            tokio::time::sleep(length).await;
        }
        pauses
    }
}

impl CasStorage for Pausing {
    type Error = BoxError;
    type Version = u64;

    async fn load(&self, key: &str, deadline: Instant) -> Result<Loaded<u64>, BoxError> {
        if key == "seconds, round 1" && self.store.text(key) == "x" {
            self.pause(1, Duration::from_secs(2)).await;
        }
        self.store.load(key, deadline).await
    }

    async fn swap(
        &self,
        key: &str,
        version: &u64,
        text: &str,
        keep: Duration,
        deadline: Instant,
    ) -> Result<Swapped<u64>, BoxError> {
        if self.store.text(key) == "before" && self.pause(0, Duration::from_millis(1_100)).await {
            return Ok(Swapped::Lost(None));
        }
        self.store.swap(key, version, text, keep, deadline).await
    }
}

/// Each process changes the key after the other one has recalled it.
#[tokio::test]
async fn recalled_text_that_is_outdated_does_not_decide() {
    let store = Recalling::default();
    let patient = |store| Cas::new(store).timeout(Duration::from_secs(60));
    let limiter = |store| RateLimiter::with_storage(policy("fixed-window 2/day"), patient(store));
    let (one, two, key) = (limiter(store.clone()), limiter(store.in_another_process()), Key::from("k"));
    for _ in 0..2 {
        assert_eq!(one.hit(&key).await.unwrap().remaining(), 1);
        assert_eq!(two.hit(&key).await.unwrap().remaining(), 0);
        assert!(one.hit(&key).await.unwrap().is_refused(), "`one` recalls that a unit remains");
        two.clear(&key).await.unwrap();
        // `one` recalls that no unit remains.
        assert_eq!(one.hit(&key).await.unwrap().remaining(), 1);
        two.clear(&key).await.unwrap();
    }
}

#[tokio::test]
async fn recalled_text_saves_the_load() {
    let store = Recalling::default();
    let storage = Cas::new(store.clone()).timeout(Duration::from_secs(60));
    let limiter = RateLimiter::with_storage(policy("fixed-window 2/day"), storage);
    // This store loads after each swap.
    for (admitted, loads, swaps) in [(true, 2, 1), (true, 1, 1), (false, 1, 0)] {
        assert_eq!(limiter.hit(&Key::from("k")).await.unwrap().is_admitted(), admitted);
        assert_eq!(store.store.trips(), (loads, swaps), "a refusal is confirmed by a load");
    }
}
