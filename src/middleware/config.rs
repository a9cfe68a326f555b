//! The layer's configuration, except for its storage and its rejection.

use std::sync::Arc;

use crate::extract::{Caveat, Head, KeyExtractor};
use crate::middleware::options::{ChargeFn, CostFn, PolicySource, Skip};
use crate::observe::Reporter;
use crate::{Headers, Policy};

/// The outcome of a request if the storage fails. The guide on [outages](crate::guide::outages)
/// compares both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a failure either admits or refuses")]
pub enum OnError {
    /// Forwards the request, and its response gets no header fields. The service stays available,
    /// without limits.
    Admit,
    /// Responds with 503 and `Retry-After: 1`. The limits hold, but the service is unavailable.
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
    /// `true` if an admission needs the full decision, not only the numbers of `X-RateLimit-*`.
    wants_decisions: bool,
    /// `true` if every request is a hit of one unit on the same policy, and does not need the full
    /// decision. Such a layer checks no other option for each request.
    is_plain: bool,
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
            is_plain: false,
        }
        .with(|_| ())
    }

    /// Returns the changed configuration, with a fresh log for the new layer.
    pub(crate) fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self.reporter = self.reporter.for_another_layer();
        self.wants_decisions = self.charge.is_some()
            || self.headers.writes_other_fields()
            || self.shares_decision
            || self.reporter.observer.is_some();
        self.is_plain = !self.wants_decisions
            && !self.shadow
            && self.skip.is_empty()
            && self.cost.is_none()
            && self.policies.fixed().is_some_and(|policy| policy.shadows().is_empty());
        self
    }

    /// Returns the policy of a plain layer.
    #[inline]
    pub(crate) fn plain(&self) -> Option<&Policy> {
        if self.is_plain { self.policies.fixed() } else { None }
    }

    /// Returns `true` if the request is not limited.
    #[inline]
    pub(crate) fn skips(&self, head: &Head<'_>) -> bool {
        self.skip.iter().any(|skip| skip.skips(head))
    }

    /// Returns possible mistakes in the setup of the skips and the extractor.
    pub(crate) fn caveats(&self) -> Vec<Caveat> {
        self.skip.iter().map(Skip::caveats).chain([self.key.caveats()]).flatten().collect()
    }

    #[inline]
    pub(crate) fn want_decisions(&self) -> bool {
        self.wants_decisions
    }
}
