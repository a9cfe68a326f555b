//! A look-up in flight, for which several requests can wait.

use std::sync::Arc;

use tokio::sync::watch;

use super::{Finding, LookupError, Tenant};

type Landed = Option<Result<Arc<Tenant>, LookupError>>;

/// The receiving end, held by the requests that wait for the result.
#[derive(Clone)]
pub(super) struct Flight(watch::Receiver<Landed>);

/// The sending end, held by the task of the look-up.
pub(super) struct Pilot(watch::Sender<Landed>);

pub(super) fn start() -> (Pilot, Flight) {
    let (sender, receiver) = watch::channel(None);
    (Pilot(sender), Flight(receiver))
}

impl Pilot {
    pub(super) fn land(self, result: Result<Arc<Tenant>, LookupError>) {
        self.0.send_replace(Some(result));
    }
}

impl Flight {
    pub(super) fn wait(mut self) -> Finding {
        Box::pin(async move {
            // The sender is dropped without a result if the task of the look-up ends early.
            let landed = self.0.wait_for(Option::is_some).await.map_err(|_| LookupError::panicked())?;
            landed.clone().unwrap_or_else(|| Err(LookupError::panicked()))
        })
    }
}
