//! A look-up in flight, for which several requests can wait.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::LookupResult;

/// The handle of a request that waits for a look-up in flight.
#[derive(Clone)]
pub(super) struct Flight {
    /// `None` until the look-up has completed.
    result: watch::Receiver<Option<LookupResult>>,
    /// The instant of its timeout. `None` for never.
    ends: Option<Instant>,
}

/// Sends the result of a look-up to the requests that wait for it.
pub(super) struct FlightSender(watch::Sender<Option<LookupResult>>);

pub(super) fn start(timeout: Duration) -> (FlightSender, Flight) {
    let (sender, result) = watch::channel(None);
    (FlightSender(sender), Flight { result, ends: Instant::now().checked_add(timeout) })
}

impl FlightSender {
    pub(super) fn complete(&self, result: LookupResult) {
        self.0.send_replace(Some(result));
    }
}

impl Flight {
    /// Returns `true` after the timeout. The task of the look-up has then failed to end it, because
    /// its runtime does not run.
    pub(super) fn is_overdue(&self) -> bool {
        self.ends.is_some_and(|ends| ends <= Instant::now())
    }

    pub(super) fn is(&self, other: &Self) -> bool {
        self.result.same_channel(&other.result)
    }

    /// Waits for the result. Returns `None` if the task of the look-up ended early, because its
    /// runtime has ended.
    pub(super) async fn result(mut self) -> Option<LookupResult> {
        self.result.wait_for(Option::is_some).await.ok()?.clone()
    }
}
