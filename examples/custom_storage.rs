//! A custom storage: a compare-and-swap store over a map in memory.
//!
//! `cargo run --example custom_storage` opens it by a URL, and makes three hits on a limit of two per
//! minute.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tower_ratelimit::storage::{AnyStorage, Cas, CasStorage, Loaded, Swapped};
use tower_ratelimit::{BoxError, Key, Quota, RateLimiter};

/// A map of texts. Each write has a unique number, which is the version of its text.
#[derive(Clone, Debug, Default)]
struct Texts(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    texts: HashMap<String, Entry>,
    writes: u64,
}

#[derive(Clone, Debug)]
struct Entry {
    text: String,
    version: u64,
    expires: Instant,
}

impl Texts {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn load(&self, key: &str) -> Loaded<u64> {
        let (text, version) = self.texts.get(key).map(|entry| (entry.text.clone(), entry.version)).unwrap_or_default();
        Loaded { text, version, now: None }
    }
}

impl CasStorage for Texts {
    type Error = Infallible;
    type Version = u64;

    async fn load(&self, key: &str, _: Instant) -> Result<Loaded<u64>, Infallible> {
        Ok(self.lock().load(key))
    }

    async fn swap(
        &self,
        key: &str,
        version: &u64,
        text: &str,
        time_to_live: Duration,
        _: Instant,
    ) -> Result<Swapped<u64>, Infallible> {
        // The lock makes the comparison and the write one atomic step.
        let mut inner = self.lock();
        let current = inner.load(key);
        if current.version != *version {
            return Ok(Swapped::Lost(Some(current)));
        }
        inner.writes += 1;
        if text.is_empty() {
            inner.texts.remove(key);
        } else {
            let now = Instant::now();
            let entry = Entry { text: text.to_owned(), version: inner.writes, expires: now + time_to_live };
            inner.texts.insert(key.to_owned(), entry);
            // A real store would let its entries expire by themselves.
            if inner.writes.is_multiple_of(1_024) {
                inner.texts.retain(|_, entry| entry.expires > now);
            }
        }
        Ok(Swapped::Stored)
    }
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    AnyStorage::register("texts", |_| Ok(Cas::new(Texts::default())));
    let storage: AnyStorage = "texts://".parse()?;
    let limiter = RateLimiter::with_storage(Quota::per_minute(2), storage);
    for _ in 0..3 {
        let decision = limiter.hit(&Key::from("alice")).await?;
        println!("alice is {}", if decision.is_admitted() { "admitted" } else { "refused" });
    }
    Ok(())
}

#[cfg(all(test, feature = "testing"))]
mod tests {
    use tower_ratelimit::storage::ManualClock;
    use tower_ratelimit::testing::{CasLaws, StorageLaws};

    use super::*;

    #[test]
    fn store_compares_and_swaps() {
        CasLaws::new(Texts::default).second_handle(Texts::clone).check();
    }

    /// The long timeout is for slow machines.
    fn over(store: Texts) -> Cas<Texts> {
        Cas::new(store).timeout(Duration::from_secs(20))
    }

    #[test]
    fn storage_obeys_the_laws() {
        StorageLaws::new(|clock| over(Texts::default()).clock(clock))
            // Decides on its own, as another process does.
            .second_handle(|storage| over(storage.store().clone()).clock(ManualClock::default()))
            .scripts(64)
            .check();
    }
}
