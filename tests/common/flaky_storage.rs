//! A storage that does what it is told to: works, fails, hangs.

use std::future::{pending, ready};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::sleep;
use tower_ratelimit::storage::{Ask, ManualClock};
use tower_ratelimit::{Decision, Key, MemoryStorage, Op, Policy, RateLimiter, Storage};

use crate::standing;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mood {
    Works,
    Fails,
    /// It counts, and says that it failed.
    FailsAfterCounting,
    FailsAfter(Duration),
    WorksAfter(Duration),
    Hangs,
    /// It can be read from, and not be written to.
    OnlyReads,
}

/// A memory storage in a mood, as far away as a server. Clones are in the same one.
#[derive(Clone, Debug)]
pub struct Moody {
    pub memory: MemoryStorage,
    mood: Arc<Mutex<Mood>>,
    decisions: Arc<AtomicUsize>,
    changes: Arc<AtomicUsize>,
}

type Answer<T> = Pin<Box<dyn Future<Output = Result<T, &'static str>> + Send>>;

impl Moody {
    pub fn new(mood: Mood) -> (Self, ManualClock) {
        let (memory, clock) = standing();
        let moody =
            Self { memory, mood: Arc::new(Mutex::new(mood)), decisions: Arc::default(), changes: Arc::default() };
        (moody, clock)
    }

    pub fn set(&self, mood: Mood) {
        *self.mood.lock().unwrap() = mood;
    }

    /// How often it was asked to decide.
    pub fn decisions(&self) -> usize {
        self.decisions.load(Ordering::SeqCst)
    }

    /// How often it was asked to clear or to give back.
    pub fn changes(&self) -> usize {
        self.changes.load(Ordering::SeqCst)
    }

    fn answer<T: Send + 'static>(
        &self,
        writes: bool,
        work: impl FnOnce(&MemoryStorage) -> T + Send + 'static,
    ) -> Answer<T> {
        let (mood, memory) = (*self.mood.lock().unwrap(), self.memory.clone());
        match mood {
            Mood::Works => Box::pin(ready(Ok(work(&memory)))),
            Mood::OnlyReads if !writes => Box::pin(ready(Ok(work(&memory)))),
            Mood::Fails | Mood::OnlyReads => Box::pin(ready(Err("it fails"))),
            Mood::FailsAfterCounting => {
                work(&memory);
                Box::pin(ready(Err("it fails after counting")))
            }
            Mood::FailsAfter(time) => Box::pin(async move {
                sleep(time).await;
                Err("it fails late")
            }),
            Mood::WorksAfter(time) => Box::pin(async move {
                sleep(time).await;
                Ok(work(&memory))
            }),
            Mood::Hangs => Box::pin(pending()),
        }
    }
}

impl Storage for Moody {
    type Error = &'static str;
    type Decided = Answer<Decision>;
    type Done = Answer<()>;

    fn decide(&self, ask: Ask<'_>) -> Self::Decided {
        self.decisions.fetch_add(1, Ordering::SeqCst);
        let (policy, key, op, cost) = (ask.policy.clone(), ask.key.clone(), ask.op, ask.cost);
        self.answer(op == Op::Hit, move |memory| {
            let Ok(decision) = memory.decide(Ask::new(&policy, &key, op, cost)).into_inner();
            decision
        })
    }

    fn clear(&self, policy: &Policy, key: &Key) -> Self::Done {
        self.changes.fetch_add(1, Ordering::SeqCst);
        let (policy, key) = (policy.clone(), key.clone());
        self.answer(true, move |memory| {
            let Ok(()) = memory.clear(&policy, &key).into_inner();
        })
    }

    fn refund(&self, policy: &Policy, key: &Key, decision: &Decision) -> Self::Done {
        self.changes.fetch_add(1, Ordering::SeqCst);
        let (policy, key, decision) = (policy.clone(), key.clone(), decision.clone());
        self.answer(true, move |memory| {
            let Ok(()) = memory.refund(&policy, &key, &decision).into_inner();
        })
    }
}

/// What the first limit has counted for everybody in this memory.
pub fn counted(memory: &MemoryStorage, policy: &Policy) -> u32 {
    let Ok(peek) = RateLimiter::with_storage(policy.clone(), memory.clone()).peek(&Key::everybody()).into_inner();
    peek.capacity() - peek.remaining()
}
