//! A look-up in flight, for which several requests can wait.

use std::sync::Arc;

use tokio::sync::watch;

use super::{Finding, LookupError, Tenant};

/// The result of a look-up, or `None` until it has completed.
type Completion = Option<Result<Arc<Tenant>, LookupError>>;

/// The handle of a request that waits for a look-up in flight.
#[derive(Clone)]
pub(super) struct Flight(watch::Receiver<Completion>);

/// The handle of the task of a look-up in flight, which sends the result to the requests.
pub(super) struct FlightSender(watch::Sender<Completion>);

pub(super) fn start() -> (FlightSender, Flight) {
    let (sender, receiver) = watch::channel(None);
    (FlightSender(sender), Flight(receiver))
}

impl FlightSender {
    pub(super) fn complete(self, result: Result<Arc<Tenant>, LookupError>) {
        self.0.send_replace(Some(result));
    }
}

impl Flight {
    pub(super) fn wait(mut self) -> Finding {
        Box::pin(async move {
            // The sender is dropped without a result if the task of the look-up ends early.
            let completed = self.0.wait_for(Option::is_some).await.map_err(|_| LookupError::panicked())?;
            completed.clone().unwrap_or_else(|| Err(LookupError::panicked()))
        })
    }
}
