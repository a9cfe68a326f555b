//! Events for the log. They name keys only after `RateLimitLayer::log_keys`.

use std::error::Error;
use std::iter::successors;
use std::time::Duration;

use super::throttle::Throttle;
use super::{Event, EventKind};
use crate::Key;
use crate::lint::Lint;
use crate::storage::BreakerError;

/// So many bytes of a key are logged.
const MAX_KEY: usize = 256;

/// The log of one layer. An outage writes a line when it begins, one a second while it
/// lasts, and one when it has ended.
#[derive(Debug)]
pub(super) struct Log {
    storage_failures: Throttle,
    refund_failures: Throttle,
    setup_mistakes: Throttle,
}

impl Default for Log {
    fn default() -> Self {
        let (second, minute) = (Duration::from_secs(1), Duration::from_secs(60));
        Self {
            storage_failures: Throttle::new(second),
            refund_failures: Throttle::new(second),
            setup_mistakes: Throttle::new(minute),
        }
    }
}

impl Log {
    #[inline]
    pub(super) fn event(&self, event: &Event<'_>, with_key: bool) {
        if let EventKind::Decided(decision) = event.kind {
            if let Some(failed) = self.storage_failures.ended() {
                tracing::info!(policy = event.policy.identity(), failed, "the rate limit storage answers again");
            }
            if decision.is_admitted() {
                return;
            }
        }
        self.out_of_the_ordinary(event, with_key);
    }

    fn out_of_the_ordinary(&self, event: &Event<'_>, with_key: bool) {
        let (policy, outcome, shadow) = (event.policy.identity(), event.outcome(), event.shadow);
        // As text, which is written in quotes: a key cannot look like other fields.
        let key = event.key.filter(|_| with_key).map(shortened);
        let key = key.as_deref();
        match event.kind {
            EventKind::Decided(decision) => {
                let retry_after = decision.retry_after().map(tracing::field::debug);
                tracing::debug!(
                    policy,
                    outcome,
                    shadow,
                    cost = decision.cost(),
                    retry_after,
                    key,
                    "a request was refused"
                );
            }
            EventKind::Failed { error, .. } if is_known(&**error) => {
                let error = chain(&**error);
                tracing::debug!(policy, outcome, shadow, error, key, "the rate limit storage was not asked");
            }
            EventKind::Failed { error, .. } => {
                if let Some(failed) = self.storage_failures.due() {
                    let error = chain(&**error);
                    tracing::warn!(policy, outcome, shadow, failed, error, key, "the rate limit storage failed");
                }
            }
            EventKind::KeyError(missing) if missing.is_clients_fault() => {
                tracing::debug!(policy, outcome, shadow, reason = missing.reason(), "a request could not be limited");
            }
            EventKind::KeyError(missing) => {
                if let Some(requests) = self.setup_mistakes.due() {
                    let reason = missing.reason();
                    tracing::error!(policy, outcome, shadow, requests, reason, "requests cannot be limited");
                }
            }
            EventKind::NotRefunded(error) => {
                if let Some(failed) = self.refund_failures.due() {
                    let error = chain(&**error);
                    tracing::warn!(policy, outcome, shadow, failed, error, key, "a hit could not be refunded");
                }
            }
            EventKind::Refunded(_) => tracing::trace!(policy, outcome, shadow, key, "a hit was refunded"),
        }
    }
}

/// The key in printable ASCII. A client may choose it, so a long one is cut off.
fn shortened(key: &Key) -> String {
    let bytes = key.as_bytes();
    match bytes.get(..MAX_KEY) {
        Some(start) if bytes.len() > MAX_KEY => format!("{}... ({} bytes)", start.escape_ascii(), bytes.len()),
        _ => bytes.escape_ascii().to_string(),
    }
}

/// The text of an error and of its sources, each once: many errors repeat their source.
fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    for source in successors(error.source(), |&source| source.source()) {
        let source = source.to_string();
        if !text.contains(&source) {
            text = [&text, ": ", &source].concat();
        }
    }
    text
}

/// True for the error of an open breaker. Its cause was logged when the breaker opened.
fn is_known(error: &(dyn Error + 'static)) -> bool {
    let mut sources = successors(Some(error), |error: &&(dyn Error + 'static)| Error::source(*error));
    sources.any(|error| error.downcast_ref().is_some_and(BreakerError::is_circuit_open))
}

pub(super) fn lint(lint: Lint) {
    tracing::warn!(code = lint.code(), docs = lint.docs(), "{lint}");
}
