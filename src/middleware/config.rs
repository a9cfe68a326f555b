//! All that a layer was told, but for where it keeps things and how it answers.

use std::sync::Arc;

use crate::Headers;
use crate::extract::{Caveat, Head, KeyExtractor};
use crate::middleware::options::{ChargeFn, CostFn, PolicySource, Skip};
use crate::observe::Reporter;

/// Decides requests while the storage fails. The guide on [outages](crate::guide::outages) compares
/// both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a failure either admits or refuses")]
pub enum OnError {
    /// Passes the request on without rate-limit header fields. The service stays up, without
    /// limits.
    Admit,
    /// Answers 503 with `Retry-PostResponse: 1`. The limits hold, and the service is down.
    Refuse,
}

#[derive(Clone)]
pub(crate) struct LayerConfig {
    pub(crate) skip: Vec<Arc<dyn Skip>>,
    pub(crate) policies: PolicySource,
    pub(crate) key: Arc<dyn KeyExtractor>,
    pub(crate) cost: Option<Arc<CostFn>>,
    pub(crate) charge: Option<Arc<ChargeFn>>,
    pub(crate) on_error: OnError,
    pub(crate) headers: Headers,
    pub(crate) shadow: bool,
    pub(crate) shares_decision: bool,
    pub(crate) reporter: Reporter,
    /// Whether anybody wants more of an admission than the numbers that are shown.
    wants_decisions: bool,
}

impl LayerConfig {
    pub(crate) fn new(policies: PolicySource, key: Arc<dyn KeyExtractor>) -> Self {
        Self {
            skip: Vec::new(),
            policies,
            key,
            cost: None,
            charge: None,
            on_error: OnError::Refuse,
            headers: Headers::default(),
            shadow: false,
            shares_decision: false,
            reporter: Reporter::default(),
            wants_decisions: false,
        }
    }

    /// The same with one rule changed, for another layer.
    pub(crate) fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self.reporter = self.reporter.for_another_layer();
        self.wants_decisions = self.charge.is_some()
            || self.headers.tell_more()
            || self.shares_decision
            || self.reporter.observer.is_some();
        self
    }

    /// Whether the request passes without being counted.
    #[inline]
    pub(crate) fn skips(&self, head: &Head<'_>) -> bool {
        self.skip.iter().any(|skip| skip.skips(head))
    }

    /// What may be wrong with how it is set up.
    pub(crate) fn caveats(&self) -> Vec<Caveat> {
        self.skip.iter().map(Skip::caveats).chain([self.key.caveats()]).flatten().collect()
    }

    #[inline]
    pub(crate) fn want_decisions(&self) -> bool {
        self.wants_decisions
    }
}
