//! Events for the log. None names a key unless that was asked for.

use std::error::Error;
use std::iter::successors;

use super::{Event, What};
use crate::Key;
use crate::lint::Lint;
use crate::storage::BreakerError;

/// So many bytes of a key are logged.
const MAX_KEY: usize = 256;

#[inline]
pub(super) fn event(event: &Event<'_>, with_key: bool) {
    match event.what {
        What::Decided(decision) if decision.is_admitted() => {}
        _ => out_of_the_ordinary(event, with_key),
    }
}

fn out_of_the_ordinary(event: &Event<'_>, with_key: bool) {
    let (policy, outcome, shadow) = (event.policy.identity(), event.outcome(), event.shadow);
    // As text, which is written in quotes: a key cannot look like other fields.
    let key = event.key.filter(|_| with_key).map(shortened);
    let key = key.as_deref();
    match event.what {
        What::Decided(decision) => {
            let retry_after = decision.retry_after().map(tracing::field::debug);
            tracing::debug!(policy, outcome, shadow, cost = decision.cost(), retry_after, key, "a request was refused");
        }
        What::Failed { error, .. } if is_known(&**error) => {
            let error: &(dyn Error + 'static) = &**error;
            tracing::debug!(policy, outcome, shadow, error, key, "the rate limit storage was not asked");
        }
        What::Failed { error, .. } => {
            let error: &(dyn Error + 'static) = &**error;
            tracing::warn!(policy, outcome, shadow, error, key, "the rate limit storage failed");
        }
        What::Missing(missing) if missing.is_clients_fault() => {
            tracing::debug!(policy, outcome, shadow, reason = missing.reason(), "a request could not be limited");
        }
        What::Missing(missing) => {
            tracing::error!(policy, outcome, shadow, reason = missing.reason(), "requests cannot be limited");
        }
        What::NotRefunded(error) => {
            let error: &(dyn Error + 'static) = &**error;
            tracing::warn!(policy, outcome, shadow, error, key, "a hit could not be given back");
        }
        What::Refunded(_) => tracing::trace!(policy, outcome, shadow, key, "a hit was given back"),
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

/// Whether it was told when a breaker opened: a line for each request would be told by an outage.
fn is_known(error: &(dyn Error + 'static)) -> bool {
    let mut sources = successors(Some(error), |error: &&(dyn Error + 'static)| Error::source(*error));
    sources.any(|error| error.downcast_ref().is_some_and(BreakerError::is_left_alone))
}

pub(super) fn lint(lint: Lint) {
    tracing::warn!(code = lint.code(), docs = lint.docs(), "{lint}");
}
