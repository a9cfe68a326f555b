//! Finds the lints of a layer.

use http::Request;

use super::admission::LayerState;
use crate::lint::Lint;
use crate::strategy::Strategy;
use crate::{ElasticWindow, Limit, Policy, Storage};

/// A layer warns if fewer exhausted clients than this fill the storage.
const FEW_CLIENTS: u64 = 10_000;

impl<St: Storage, R> LayerState<St, R> {
    /// Reports the lints that need no request.
    pub(crate) fn start(&self) {
        self.lints.at_start(|| self.config.caveats(), |lint| self.config.reporter.warn(lint));
        if let Some(policy) = self.config.policies.shared() {
            self.lint_policy(&policy.read());
        }
    }

    /// Reports the lints that need a request.
    #[cold]
    pub(super) fn inspect<B>(&self, request: &mut Request<B>, policy: &Policy) {
        let config = &self.config;
        self.lints.inspect(request, &*config.key, || config.caveats(), |lint| config.reporter.warn(lint));
        if config.policies.shared().is_none() {
            self.lint_policy(policy);
        }
    }

    pub(super) fn lint_policy(&self, policy: &Policy) {
        if self.config.charge.is_some() && policy.limits().iter().any(is_elastic) {
            self.lints.report_once(Lint::ElasticWindowRefunded, |lint| self.config.reporter.warn(lint));
        }
        if let Some(clients) = self.storage.clients_to_fill(policy).filter(|clients| *clients < FEW_CLIENTS) {
            self.lints.report_once(Lint::SmallStorage { clients }, |lint| self.config.reporter.warn(lint));
        }
    }
}

fn is_elastic(limit: &Limit) -> bool {
    limit.strategy().name() == ElasticWindow::new().name()
}
