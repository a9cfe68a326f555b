//! A call that another task or thread executes, and the caller that may leave at its deadline.

use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use crate::sync::unpoisoned;
use crate::time::Timestamp;

/// The side of a call that executes it and answers the caller.
#[derive(Debug)]
pub(super) struct Ticket<A> {
    stage: Arc<Mutex<CallStage>>,
    answer: oneshot::Sender<A>,
}

/// The caller's side of a call. If it is dropped, the executing side decides if it still executes the
/// call. Groups of Redis hits and leases skip one that has not begun, and all other storages execute
/// it if they begin before its deadline.
#[derive(Debug)]
pub(super) struct Caller<A> {
    stage: Arc<Mutex<CallStage>>,
    answer: oneshot::Receiver<A>,
}

/// The progress of a call, which both sides share.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CallStage {
    /// `true` if the call is being executed. Its effect is unknown until it is answered.
    pub(super) is_begun: bool,
    /// The last time at which other calls or processes were known to delay this one, if any.
    pub(super) contended: Option<Timestamp>,
    /// `true` if the caller has left. A call that has not begun by then is never executed.
    has_left: bool,
}

/// The reason why a call has no answer.
#[derive(Debug)]
pub(super) enum Unanswered {
    /// The executing side was dropped.
    Dropped,
    /// The deadline has passed.
    Late(CallStage),
}

impl<A> Ticket<A> {
    /// Creates both sides of a call.
    pub(super) fn new() -> (Self, Caller<A>) {
        let (sender, answer) = oneshot::channel();
        let stage = Arc::default();
        (Self { stage: Arc::clone(&stage), answer: sender }, Caller { stage, answer })
    }

    pub(super) fn stage(&self) -> CallStage {
        *self.lock()
    }

    /// Returns `true` unless the caller has left at its deadline.
    pub(super) fn is_awaited(&self) -> bool {
        !self.lock().has_left
    }

    /// Returns `true` if the caller was dropped.
    pub(super) fn is_dropped(&self) -> bool {
        self.answer.is_closed()
    }

    /// Marks the call as being executed. Returns `false` if the caller has left.
    pub(super) fn begin(&self) -> bool {
        let mut stage = self.lock();
        stage.is_begun = !stage.has_left;
        stage.is_begun
    }

    /// Marks the call as not executed.
    pub(super) fn take_back(&self) {
        self.lock().is_begun = false;
    }

    /// Records that other calls or processes delay this one.
    pub(super) fn set_contended(&self, at: Timestamp) {
        self.lock().contended = Some(at);
    }

    /// Answers the caller, if it still waits.
    pub(super) fn answer(self, answer: A) {
        // At its deadline, the caller checks for an answer under the same lock.
        let _stage = unpoisoned(self.stage.lock());
        let _ = self.answer.send(answer);
    }

    fn lock(&self) -> MutexGuard<'_, CallStage> {
        unpoisoned(self.stage.lock())
    }
}

impl<A> Caller<A> {
    /// Waits for the answer, for as long as the executing side needs. Returns `None` if that side was
    /// dropped.
    pub(super) async fn answer(self) -> Option<A> {
        self.answer.await.ok()
    }

    /// Waits for the answer until `deadline`.
    pub(super) async fn wait(mut self, deadline: Instant) -> Result<A, Unanswered> {
        if let Ok(answer) = timeout_at(deadline, &mut self.answer).await {
            return answer.map_err(|_| Unanswered::Dropped);
        }
        let mut stage = unpoisoned(self.stage.lock());
        self.answer.try_recv().map_err(|_| {
            stage.has_left = true;
            Unanswered::Late(*stage)
        })
    }
}
