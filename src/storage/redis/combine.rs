//! Combines hits that wait at the same time into one call of a script.
//!
//! A script call costs the server a few microseconds besides the decision, for example to read the
//! clock, and the client a reply. One call for several hits divides these costs between them.
//!
//! A hit without company is sent at once. If other hits of the storage are in flight, the first one
//! yields to the runtime once, and takes all hits that have arrived in the meantime along. The hits
//! of a call are decided in order, each as by a call of its own.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redis::Value;
use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::{Instant, timeout_at};

use super::error::is_script_missing;
use super::link::Link;
use super::script::{Call, Combined};
use crate::storage::{StorageError, StorageErrorKind};

/// The most hits in one call.
///
/// Other clients of the server wait for the whole call, which takes about 4 us per hit. More hits
/// per call gain little.
const MOST: usize = 16;

/// A hit waits for others only if at least this many hits are in flight.
const COMPANY: usize = 4;

/// The hits of one storage that wait to be sent.
#[derive(Debug, Default)]
pub(super) struct Combiner {
    in_flight: AtomicUsize,
    waiting: Mutex<Vec<Hit>>,
}

/// A hit that waits.
#[derive(Debug)]
struct Hit {
    call: Arc<Call>,
    deadline: Instant,
    outcome: oneshot::Sender<Outcome>,
}

/// The result of a hit, or `None` if the hit has not counted and must be sent in a call of its own.
type Outcome = Option<Result<Value, StorageError>>;

/// Counts a hit in flight until it is dropped.
struct InFlight<'a>(&'a AtomicUsize);

/// The hit that sends all waiting ones. If it is dropped before that, each is sent in a call of its
/// own.
struct Leader<'a>(Option<&'a Combiner>);

impl Combiner {
    /// Runs the script of a call, together with those of other hits where possible.
    ///
    /// The future can be dropped at any time, without an effect on other hits.
    pub(super) async fn run(&self, link: &Link, call: &Arc<Call>, deadline: Instant) -> Result<Value, StorageError> {
        let company = self.in_flight.fetch_add(1, Ordering::Relaxed);
        let _in_flight = InFlight(&self.in_flight);
        if company >= COMPANY
            && call.can_be_combined()
            && let Some(server) = link.single_server()
            && let Some(result) = self.join(link, server, call, deadline).await
        {
            return result;
        }
        run_alone(link, call, deadline).await
    }

    /// Waits for other hits, and sends all of them.
    async fn join(&self, link: &Link, server: &str, call: &Arc<Call>, deadline: Instant) -> Outcome {
        let (outcome, received) = oneshot::channel();
        let is_first = {
            let mut waiting = self.waiting();
            waiting.push(Hit { call: Arc::clone(call), deadline, outcome });
            waiting.len() == 1
        };
        if is_first {
            let leader = Leader(Some(self));
            yield_now().await;
            leader.send(link);
        }
        match timeout_at(deadline, received).await {
            Ok(Ok(outcome)) => outcome,
            // The runtime that sent the call has ended. The server may have executed it.
            Ok(Err(_)) => Some(Err(StorageError::connection_lost(server, "the runtime of another caller has ended"))),
            Err(_) => Some(Err(StorageError::timed_out(server))),
        }
    }

    fn waiting(&self) -> MutexGuard<'_, Vec<Hit>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Leader<'_> {
    fn send(mut self, link: &Link) {
        let Some(combiner) = self.0.take() else { return };
        let mut waiting = std::mem::take(&mut *combiner.waiting());
        while let Some(first) = waiting.first().map(|hit| Arc::clone(&hit.call)) {
            let hits: Vec<Hit> = waiting.extract_if(.., |hit| hit.call.matches(&first)).take(MOST).collect();
            if hits.len() > 1 {
                tokio::spawn(send(link.clone(), hits));
            } else {
                hits.into_iter().for_each(Hit::send_alone);
            }
        }
    }
}

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        if let Some(combiner) = self.0 {
            std::mem::take(&mut *combiner.waiting()).into_iter().for_each(Hit::send_alone);
        }
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Hit {
    fn send_alone(self) {
        self.complete(None);
    }

    fn complete(self, outcome: Outcome) {
        // A caller that has left needs no outcome.
        _ = self.outcome.send(outcome);
    }
}

/// Sends hits in one call, and distributes the replies.
async fn send(link: Link, hits: Vec<Hit>) {
    let calls: Vec<&Call> = hits.iter().map(|hit| &*hit.call).collect();
    let combined = Combined::new(&calls);
    // Each caller has a timeout of its own.
    let Some(deadline) = hits.iter().map(|hit| hit.deadline).max() else { return };
    let reply = match link.run(&combined.by_hash(), deadline).await {
        Err(error) if is_script_missing(&error) => link.run(&combined.by_text(), deadline).await,
        other => other,
    };
    match reply {
        Ok(Value::Array(replies)) if replies.len() == hits.len() => {
            for (hit, reply) in hits.into_iter().zip(replies) {
                // A hit that failed has counted nothing. A call of its own returns the error.
                hit.complete((reply != Value::Nil).then_some(Ok(reply)));
            }
        }
        // The server refused the call, so it executed nothing. One key may be the cause.
        Err(error) if error.kind() == StorageErrorKind::Refused => hits.into_iter().for_each(Hit::send_alone),
        Err(error) => hits.into_iter().for_each(|hit| hit.complete(Some(Err(error.clone())))),
        // The caller reports the unexpected reply.
        Ok(other) => hits.into_iter().for_each(|hit| hit.complete(Some(Ok(other.clone())))),
    }
}

/// Runs the script by its hash, or sends its text if the server has not cached it.
pub(super) async fn run_alone(link: &Link, call: &Call, deadline: Instant) -> Result<Value, StorageError> {
    match link.run(&call.by_hash(), deadline).await {
        Err(error) if is_script_missing(&error) => link.run(&call.by_text(), deadline).await,
        other => other,
    }
}
