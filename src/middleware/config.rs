//! The layer's configuration, except for its storage and its rejection.

use std::fmt;
use std::iter::once;
use std::str::FromStr;
use std::sync::Arc;

use crate::decision::Decision;
use crate::error::ConfigError;
use crate::extract::{AllowList, Head, KeyError, KeyExtractor};
use crate::headers::Headers;
use crate::key::Key;
use crate::lint::Lint;
use crate::middleware::options::{CostFn, PolicySource, SettleOptions, SkipFn};
use crate::middleware::together::{MemberPolicy, Together};
use crate::observe::{Event, EventKind, Reporter};
use crate::policy::{Policy, PolicyChanges, SharedPolicy};
use crate::storage::AnyStorage;
use crate::waiting::WaitBounds;

/// The action of a layer if the storage, or the lookup of the policy, fails for a request. The
/// guide on [outages](crate::guide::outages) compares the two variants.
///
/// [`RateLimitLayer::storage`](crate::RateLimitLayer::storage) and
/// [`InFlightLayer::storage`](crate::InFlightLayer::storage) set the action. A layer on which
/// `storage` was not called keeps its counts in memory, which never fails, and uses `Refuse` if a
/// lookup fails.
///
/// A [shadow](crate::RateLimitLayer::shadow) layer forwards every request. If the storage fails, a
/// request with a [cost](crate::RateLimitLayer::cost) of 0 is forwarded too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a failure either admits or refuses")]
pub enum OnError {
    /// Forwards the request, and writes no header fields. The service stays available, without
    /// limits.
    #[doc(alias = "fail open")]
    Admit,
    /// Refuses the request with [`RejectReason::Storage`](crate::RejectReason::Storage), by default
    /// with status 503, and with `Retry-After: 1`. The limits hold, but the service is unavailable.
    #[doc(alias = "fail closed")]
    Refuse,
}

/// Parses `admit` or `refuse`. Upper and lower case are equivalent, and white space around the word
/// is ignored.
impl FromStr for OnError {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        [Self::Admit, Self::Refuse]
            .into_iter()
            .find(|on_error| on_error.word().eq_ignore_ascii_case(text.trim()))
            .ok_or_else(|| ConfigError::new(format!("cannot read the action {text:?}: write \"admit\" or \"refuse\"")))
    }
}

impl fmt::Display for OnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl OnError {
    const fn word(self) -> &'static str {
        match self {
            Self::Admit => "admit",
            Self::Refuse => "refuse",
        }
    }
}

/// A policy of a layer, with its key and its cost.
#[derive(Clone)]
pub(crate) struct LayerMember {
    pub(crate) policies: PolicySource,
    pub(crate) key: Arc<dyn KeyExtractor>,
    pub(crate) cost: Option<Arc<CostFn>>,
}

impl LayerMember {
    /// Returns the policy for hits that a request under `policy` makes later. A live policy of the layer
    /// may change until then. A policy that was chosen for this request is kept.
    pub(crate) fn policy_of_later_hits(&self, policy: &Policy) -> SharedPolicy {
        self.policies.shared().cloned().unwrap_or_else(|| policy.clone().into())
    }
}

#[derive(Clone)]
#[expect(clippy::struct_excessive_bools, reason = "independent options")]
pub(crate) struct LayerConfig {
    pub(crate) skip: Vec<Arc<SkipFn>>,
    pub(crate) allow_lists: Vec<AllowList>,
    pub(crate) first: LayerMember,
    /// The members that are decided together with the first one.
    pub(crate) others: Vec<LayerMember>,
    /// The key that the keys of a request are within.
    pub(crate) outer_key: Option<Arc<dyn KeyExtractor>>,
    pub(crate) settling: Option<Arc<SettleOptions>>,
    pub(crate) on_error: OnError,
    pub(crate) wait: Option<WaitBounds>,
    pub(crate) headers: Headers,
    pub(crate) shadow: bool,
    pub(crate) shares_decision: bool,
    /// `true` if requests have a [`Meter`](crate::Meter).
    pub(crate) meters: bool,
    pub(crate) reporter: Reporter,
    /// `true` if an admission needs the full decision, not only the numbers of `X-RateLimit-*`.
    pub(crate) wants_decisions: bool,
    /// The policy of a plain layer, or `None` if the layer is not plain. A plain layer has one
    /// policy for all requests, and none of the options that `with` checks, such as a cost, a skip
    /// or an observer. Each request is a hit of one unit, and its admission needs no full decision.
    pub(crate) plain: Option<SharedPolicy>,
}

impl LayerConfig {
    pub(crate) fn new(first: LayerMember) -> Self {
        Self {
            skip: Vec::new(),
            allow_lists: Vec::new(),
            first,
            others: Vec::new(),
            outer_key: None,
            settling: None,
            on_error: OnError::Refuse,
            wait: None,
            headers: Headers::default(),
            shadow: false,
            shares_decision: false,
            meters: false,
            reporter: Reporter::default(),
            wants_decisions: false,
            plain: None,
        }
        .with(|_| ())
    }

    /// Returns the changed configuration. The log lines of the new layer are throttled separately.
    pub(crate) fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self.reporter = self.reporter.for_another_layer();
        self.wants_decisions = self.settling.is_some()
            || self.headers.writes_other_fields()
            || self.shares_decision
            || self.reporter.observer.is_some()
            || self.reporter.near_limit.is_some();
        let can_skip = !self.skip.is_empty() || !self.allow_lists.is_empty();
        let has_options = self.wants_decisions
            || self.meters
            || self.shadow
            || self.wait.is_some()
            || can_skip
            || self.first.cost.is_some()
            || self.decides_all();
        self.plain = self.first.policies.shared().filter(|policy| !has_options && policy.can_be_plain()).cloned();
        self
    }

    /// Checks that the storage supports the policies, and all later policies of live ones. With several
    /// members, also checks that it decides on them together.
    pub(crate) fn bind(mut self, storage: &AnyStorage) -> Result<Self, ConfigError> {
        let policy_of = |member: &LayerMember| MemberPolicy::new(member.policies.shared(), member.key.is_global());
        let together = (!self.others.is_empty()).then(|| {
            let members = self.members().map(policy_of).collect();
            Arc::new(Together::new(storage.clone(), members, self.outer_key.is_some()))
        });
        together.as_ref().map_or(Ok(()), |together| together.check(&PolicyChanges::default()))?;
        for member in once(&mut self.first).chain(&mut self.others) {
            member.policies = member.policies.clone().bind(storage, together.clone())?;
        }
        Ok(self)
    }

    /// Returns `true` if a request is decided by the storage's `decide_all`.
    pub(crate) fn decides_all(&self) -> bool {
        !self.others.is_empty() || self.outer_key.is_some()
    }

    /// Panics if the layer has several keys and an option that does not support them.
    #[track_caller]
    pub(crate) fn assert_combines(&mut self) {
        let has_several = self.decides_all();
        assert!(
            !(has_several && self.wait.is_some()),
            "a layer with several keys cannot wait: remove `wait`, or use a layer for each key"
        );
        assert!(
            !(has_several && self.shadow),
            "a layer with several keys cannot be a shadow layer: add shadow limits to its policies, as in \
             \"10/second; shadow 5/second\""
        );
    }

    /// Returns the policies that are decided together, with their keys and costs.
    pub(crate) fn members(&self) -> impl Iterator<Item = &LayerMember> {
        once(&self.first).chain(&self.others)
    }

    /// Returns `true` if `member` limits by a key that the client chooses.
    pub(super) fn has_chosen_key(&self, member: &LayerMember) -> bool {
        let is_chosen = |key: &Arc<dyn KeyExtractor>| key.lints(None).contains(&Lint::LockoutByHeader);
        self.outer_key.as_ref().is_none_or(is_chosen) && is_chosen(&member.key)
    }

    /// Returns `true` if a `skip` or an allow list selects the request.
    #[inline]
    pub(crate) fn skips(&self, head: &Head<'_>) -> bool {
        self.skip.iter().any(|skip| skip(head)) || self.allow_lists.iter().any(|list| list.allows(head))
    }

    /// Returns the cost of the request. Defaults to 1.
    #[inline]
    pub(crate) fn cost_of(&self, head: &Head<'_>) -> Result<u32, KeyError> {
        self.first.cost.as_ref().map_or(Ok(1), |cost| cost(head))
    }

    #[inline]
    pub(crate) fn report(&self, kind: EventKind<'_>, policy: &Policy, key: Option<&Key>) {
        self.reporter.report(&Event { kind, policy, key, shadow: self.shadow });
    }

    /// Like [`report`](Self::report), for a decision that was made without the storage.
    pub(crate) fn report_without_storage(&self, decision: &Decision, policy: &Policy, key: &Key) {
        let (kind, key) = (EventKind::Decided(decision), Some(key));
        self.reporter.report_without_storage(&Event { kind, policy, key, shadow: self.shadow });
    }

    /// Returns the extractors of all keys, also that of the outer key.
    fn extractors(&self) -> impl Iterator<Item = &Arc<dyn KeyExtractor>> {
        self.members().map(|member| &member.key).chain(&self.outer_key)
    }

    /// Returns the lints of the allow lists and of the extractors. See [`KeyExtractor::lints`]. Omits
    /// [`Lint::ForwardedPeer`] if an extractor reads a forwarding field, and
    /// [`Lint::LockoutByHeader`], which depends on the policy.
    pub(crate) fn lints(&self, head: Option<&Head<'_>>) -> impl Iterator<Item = Lint> {
        let is_omitted = |lint: &Lint| match lint {
            Lint::ForwardedPeer => self.extractors().any(KeyExtractor::reads_forwarding),
            Lint::LockoutByHeader => true,
            _ => false,
        };
        let lists = self.allow_lists.iter().flat_map(move |list| list.lints(head));
        let keys = self.extractors().flat_map(move |key| key.lints(head));
        lists.chain(keys).filter(move |lint| !is_omitted(lint))
    }
}
