//! A storage that decides, waits, fails or hangs as configured.

use std::fmt;
use std::future::{pending, poll_fn};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;
use tower_ratelimit::storage::{
    KeyPage, KeysRequest, ManualClock, StorageError, StorageErrorKind, StorageFuture, StorageRequest,
};
use tower_ratelimit::{ConfigError, Decision, Key, MemoryStorage, Op, Policy, Storage};

use crate::memory_with_manual_clock;

/// The error of a [`FakeStorage`] that fails. No response may contain it.
pub const FAILURE: &str = "secret-host:6379 is down";

fn failure() -> StorageError {
    StorageError::new(StorageErrorKind::Other, FAILURE)
}

/// The behavior of a [`FakeStorage`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behavior {
    Works,
    /// Is ready after this many pending polls. A decision is executed at the first poll, a clear or
    /// refund after the last one.
    WorksAfterPolls(u32),
    /// Works after this time.
    WorksAfter(Duration),
    Fails,
    /// Counts, then fails.
    FailsAfterCounting,
    FailsAfter(Duration),
    Hangs,
    /// Peeks work. Hits, clears and refunds fail.
    OnlyReads,
}

type Script = dyn Fn(StorageRequest<'_>) -> Option<Result<Decision, StorageError>> + Send + Sync;

/// Wraps a storage like a remote server. `try_admit` always returns `false`.
///
/// Its futures do nothing until they are polled. Clones share their settings, counts and gate.
///
/// While its gate is closed, a call of a storage that [`Works`](Behavior::Works) or
/// [`FailsAfterCounting`](Behavior::FailsAfterCounting) is executed at its first poll, and returns
/// when the gate opens.
#[derive(Clone)]
pub struct FakeStorage<St = MemoryStorage> {
    inner: St,
    shared: Arc<Shared>,
    script: Option<Arc<Script>>,
    largest: Option<u32>,
}

struct Shared {
    decisions: AtomicU64,
    changes: AtomicU64,
    deciding: Mutex<Behavior>,
    changing: Mutex<Behavior>,
    is_open: watch::Sender<bool>,
    works_when_open: AtomicBool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Operation {
    Decide(Op),
    Change,
}

/// A storage that is ready at the third poll, so it is pending in `call` and in the first poll of
/// the response.
pub fn slow<St: Storage + Clone>(inner: St) -> FakeStorage<St> {
    let storage = FakeStorage::around(inner);
    storage.set(Behavior::WorksAfterPolls(2));
    storage
}

/// A storage that fails until it is [set](FakeStorage::set) to something else.
pub fn failing() -> FakeStorage {
    FakeStorage::in_memory(Behavior::Fails).0
}

impl FakeStorage {
    /// A memory storage with this behavior, and its clock.
    pub fn in_memory(behavior: Behavior) -> (Self, ManualClock) {
        let (memory, clock) = memory_with_manual_clock();
        let storage = Self::around(memory);
        storage.set(behavior);
        (storage, clock)
    }

    /// A storage whose decisions come from `script`. If `script` returns `None`, the memory storage
    /// decides.
    pub fn scripted(
        script: impl Fn(StorageRequest<'_>) -> Option<Result<Decision, StorageError>> + Send + Sync + 'static,
    ) -> (Self, ManualClock) {
        let (storage, clock) = Self::in_memory(Behavior::Works);
        (Self { script: Some(Arc::new(script)), ..storage }, clock)
    }
}

impl<St: Storage + Clone> FakeStorage<St> {
    /// Wraps a storage that works.
    pub fn around(inner: St) -> Self {
        let shared = Shared {
            decisions: AtomicU64::new(0),
            changes: AtomicU64::new(0),
            deciding: Mutex::new(Behavior::Works),
            changing: Mutex::new(Behavior::Works),
            is_open: watch::Sender::new(true),
            works_when_open: AtomicBool::new(false),
        };
        Self { inner, shared: Arc::new(shared), script: None, largest: None }
    }

    /// Rejects policies whose first limit has a larger capacity.
    #[must_use]
    pub fn holding_at_most(self, capacity: u32) -> Self {
        Self { largest: Some(capacity), ..self }
    }

    pub fn inner(&self) -> &St {
        &self.inner
    }

    /// Sets the behavior of all calls from now on.
    pub fn set(&self, behavior: Behavior) {
        *self.shared.deciding.lock().unwrap() = behavior;
        self.set_changes(behavior);
    }

    /// Sets the behavior of clears and refunds from now on.
    pub fn set_changes(&self, behavior: Behavior) {
        *self.shared.changing.lock().unwrap() = behavior;
    }

    pub fn open(&self) {
        self.shared.is_open.send_replace(true);
    }

    pub fn close(&self) {
        self.shared.is_open.send_replace(false);
    }

    /// Executes calls when the gate opens (`true`), or at their first poll (`false`, the default).
    pub fn work_when_open(&self, when_open: bool) {
        self.shared.works_when_open.store(when_open, Ordering::SeqCst);
    }

    /// Returns the number of decisions.
    pub fn decisions(&self) -> u64 {
        self.shared.decisions.load(Ordering::SeqCst)
    }

    /// Returns the number of decisions and resets it.
    pub fn take_decisions(&self) -> u64 {
        self.shared.decisions.swap(0, Ordering::SeqCst)
    }

    /// Returns the number of clears and refunds.
    pub fn changes(&self) -> u64 {
        self.shared.changes.load(Ordering::SeqCst)
    }

    /// Returns the number of clears and refunds, and resets it.
    pub fn take_changes(&self) -> u64 {
        self.shared.changes.swap(0, Ordering::SeqCst)
    }

    fn answer<T: Send + 'static>(
        &self,
        operation: Operation,
        work: impl Future<Output = Result<T, StorageError>> + Send + 'static,
    ) -> StorageFuture<T> {
        let shared = Arc::clone(&self.shared);
        let behavior = shared.behavior(operation);
        StorageFuture::new(async move {
            match behavior {
                Behavior::Works => shared.through_the_gate(work).await,
                Behavior::WorksAfterPolls(polls) if operation == Operation::Change => {
                    pend(polls).await;
                    work.await
                }
                Behavior::WorksAfterPolls(polls) => {
                    let answer = work.await;
                    pend(polls).await;
                    answer
                }
                Behavior::WorksAfter(time) => {
                    sleep(time).await;
                    work.await
                }
                Behavior::OnlyReads if operation == Operation::Decide(Op::Peek) => work.await,
                Behavior::Fails | Behavior::OnlyReads => Err(failure()),
                Behavior::FailsAfterCounting => {
                    drop(shared.through_the_gate(work).await);
                    Err(failure())
                }
                Behavior::FailsAfter(time) => {
                    sleep(time).await;
                    Err(failure())
                }
                Behavior::Hangs => pending().await,
            }
        })
    }
}

impl Shared {
    fn behavior(&self, operation: Operation) -> Behavior {
        let (of, calls) = match operation {
            Operation::Decide(_) => (&self.deciding, &self.decisions),
            Operation::Change => (&self.changing, &self.changes),
        };
        calls.fetch_add(1, Ordering::SeqCst);
        *of.lock().unwrap()
    }

    async fn through_the_gate<T>(&self, work: impl Future<Output = T>) -> T {
        if self.works_when_open.load(Ordering::SeqCst) {
            self.wait_until_open().await;
            return work.await;
        }
        let answer = work.await;
        self.wait_until_open().await;
        answer
    }

    async fn wait_until_open(&self) {
        let mut is_open = self.is_open.subscribe();
        // Checked first, because `wait_for` may yield even if the gate is open, which tests that
        // poll by hand would notice.
        let is_closed = !*is_open.borrow();
        if is_closed {
            is_open.wait_for(|open| *open).await.map(drop).expect("the sender lives as long as the storage");
        }
    }
}

impl<St: Storage + Clone> Storage for FakeStorage<St> {
    fn decide(&self, request: StorageRequest<'_>) -> StorageFuture<Decision> {
        let (inner, script) = (self.inner.clone(), self.script.clone());
        let (policy, key, op, cost) = (request.policy.clone(), request.key.clone(), request.op, request.cost);
        self.answer(Operation::Decide(op), async move {
            let request = StorageRequest::new(&policy, &key, op, cost);
            match script.and_then(|script| script(request)) {
                Some(answer) => answer,
                None => inner.decide(request).await,
            }
        })
    }

    fn clear(&self, policy: &Policy, key: &Key) -> StorageFuture<()> {
        let (inner, policy, key) = (self.inner.clone(), policy.clone(), key.clone());
        self.answer(Operation::Change, async move { inner.clear(&policy, &key).await })
    }

    fn settle(&self, policy: &Policy, key: &Key, decision: &Decision, actual: u32) -> StorageFuture<()> {
        let (inner, policy, key, decision) = (self.inner.clone(), policy.clone(), key.clone(), decision.clone());
        self.answer(Operation::Change, async move { inner.settle(&policy, &key, &decision, actual).await })
    }

    /// Behaves as a peek does, and is not counted.
    fn check(&self) -> StorageFuture<()> {
        let checked = self.answer(Operation::Decide(Op::Peek), std::future::ready(Ok(())));
        self.shared.decisions.fetch_sub(1, Ordering::SeqCst);
        checked
    }

    /// Behaves as a clear does.
    fn clear_all(&self) -> StorageFuture<u64> {
        let inner = self.inner.clone();
        self.answer(Operation::Change, async move { inner.clear_all().await })
    }

    /// Behaves as a peek does.
    fn keys(&self, request: KeysRequest<'_>) -> StorageFuture<KeyPage> {
        let listed = self.inner.keys(request);
        self.answer(Operation::Decide(Op::Peek), listed)
    }

    fn validate(&self, policy: &Policy) -> Result<(), ConfigError> {
        match self.largest {
            Some(largest) if policy.limits()[0].capacity() > largest => {
                Err(ConfigError::new(format!("at most {largest}")))
            }
            _ => self.inner.validate(policy),
        }
    }
}

impl<St: fmt::Debug> fmt::Debug for FakeStorage<St> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FakeStorage").field("inner", &self.inner).finish_non_exhaustive()
    }
}

/// Returns `Pending` for this many polls.
async fn pend(mut polls: u32) {
    poll_fn(|cx| {
        if polls == 0 {
            return Poll::Ready(());
        }
        polls -= 1;
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
