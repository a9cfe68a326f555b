//! Storages to put others around: they count what they are asked, and answer when they are let.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::sync::watch;
use tower_ratelimit::storage::{Ask, Clock, ManualClock, Shown};
use tower_ratelimit::{BoxError, Decision, Key, Policy, Storage, Timestamp};

/// A million times as fast: a microsecond later all that a cache knows is over, so its numbers are the model's.
#[derive(Debug)]
pub struct Hasty(pub ManualClock);

impl Clock for Hasty {
    fn now(&self) -> Timestamp {
        let passed = self.0.now().since(ManualClock::default().now());
        Timestamp::EPOCH.plus(u64::from(u32::MAX)).plus(passed.saturating_mul(1_000_000))
    }
}

/// Counts what it is asked to decide, costs added up, and what it is told to change. While its gate is shut, whatever it is asked
/// is decided when that is first polled, and answered when the gate is open; with `decides_late`, it is decided then, too.
#[derive(Clone, Debug)]
pub struct Watched<St> {
    inner: St,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    asked: AtomicU64,
    changed: AtomicU64,
    open: watch::Sender<bool>,
    decides_late: AtomicBool,
    fails: AtomicBool,
}

impl<St: Storage> Watched<St> {
    pub fn new(inner: St) -> Self {
        let (asked, changed, open) = (0.into(), 0.into(), watch::Sender::new(true));
        let (decides_late, fails) = (false.into(), false.into());
        Self { inner, shared: Arc::new(Shared { asked, changed, open, decides_late, fails }) }
    }

    /// How often it was asked since this was last called.
    pub fn asked(&self) -> u64 {
        self.shared.asked.swap(0, Ordering::SeqCst)
    }

    /// How often it was told to clear or to give back since this was last called.
    pub fn changed(&self) -> u64 {
        self.shared.changed.swap(0, Ordering::SeqCst)
    }

    pub fn open(&self, open: bool) {
        self.shared.open.send_replace(open);
    }

    pub fn decides_late(&self, late: bool) {
        self.shared.decides_late.store(late, Ordering::SeqCst);
    }

    pub fn fails(&self, fails: bool) {
        self.shared.fails.store(fails, Ordering::SeqCst);
    }

    pub fn inner(&self) -> &St {
        &self.inner
    }

    fn when_open<T: Send + 'static>(
        &self,
        what: impl Future<Output = Result<T, St::Error>> + Send + 'static,
    ) -> Pin<Box<dyn Future<Output = Result<T, BoxError>> + Send>> {
        let shared = Arc::clone(&self.shared);
        Box::pin(async move {
            let mut open = shared.open.subscribe();
            let (mut what, mut early) = (Some(what), None);
            if !shared.decides_late.load(Ordering::SeqCst) {
                early = Some(what.take().unwrap().await);
            }
            open.wait_for(|open| *open).await?;
            let answer = match early {
                Some(answer) => answer,
                None => what.unwrap().await,
            };
            if shared.fails.load(Ordering::SeqCst) {
                return Err("the server is down".into());
            }
            answer.map_err(Into::into)
        })
    }
}

impl<St: Storage> Storage for Watched<St> {
    type Error = BoxError;
    type Decided = Pin<Box<dyn Future<Output = Result<Decision, BoxError>> + Send>>;
    type Done = Pin<Box<dyn Future<Output = Result<(), BoxError>> + Send>>;

    fn decide(&self, ask: Ask<'_>) -> Self::Decided {
        self.shared.asked.fetch_add(1, Ordering::SeqCst);
        let (inner, policy, key) = (self.inner.clone(), ask.policy.clone(), ask.key.clone());
        let (op, cost) = (ask.op, ask.cost);
        self.when_open(async move { inner.decide(Ask::new(&policy, &key, op, cost)).await })
    }

    fn hit_at_once(&self, _: Ask<'_>, _: Option<&mut Shown>) -> bool {
        false
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::Done {
        self.shared.changed.fetch_add(1, Ordering::SeqCst);
        let (inner, policy, key) = (self.inner.clone(), policy.clone(), key.clone());
        self.when_open(async move { inner.clear(&policy, &key).await })
    }

    fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> Self::Done {
        self.shared.changed.fetch_add(1, Ordering::SeqCst);
        let (inner, policy, key, decision) = (self.inner.clone(), policy.clone(), key.clone(), decision.clone());
        self.when_open(async move { inner.refund(&policy, &key, &decision).await })
    }
}
