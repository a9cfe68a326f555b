//! Lints: warnings about a layer's configuration, reported once for each layer.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use http::Request;

use crate::extract::{Caveat, FORWARDING, Head, KeyExtractor};

/// A warning about a setting of a layer that is probably a mistake.
///
/// A layer reports each lint once, as a warning in the log (feature `tracing`) with its
/// [code](Self::code) and [documentation](Self::docs), and to the [`Observer`](crate::Observer). A
/// lint does not change the layer's behavior. Some lints are detected by inspecting the first 1,024
/// limited requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Lint {
    /// `RL001`: IPv6 clients are distinguished by more than 64 bits of their addresses.
    ///
    /// One client usually has a whole /64, which is 2^64 addresses. It gets a new quota with each
    /// address, and can fill the storage with keys. Set
    /// [`ipv6_prefix`](crate::PeerIp::ipv6_prefix) to at most 64, which is the default.
    Ipv6PerAddress,
    /// `RL002`: a [`ClientIp`](crate::ClientIp) trusts every address as a proxy.
    ///
    /// Each client counts as a proxy and can choose its own key with the forwarding header. List
    /// the networks of your proxies, or set their number.
    TrustsEveryAddress,
    /// `RL003`: requests have a forwarding header, but the key is the peer's address.
    ///
    /// Behind a proxy the peer is the proxy, and all clients share one quota. An
    /// [`AllowList`](crate::extract::AllowList) by the peer's address would allow all of them. Use
    /// [`ClientIp`](crate::ClientIp) with the proxy's network. Without a proxy, ignore this lint: a
    /// client sent the header itself.
    ForwardedPeer,
    /// `RL004`: a request passed through the same layer twice, and was charged twice.
    ///
    /// The usual cause is a layer that was added to a router and also to one of its routes. Clones
    /// count as one layer. Layers that were created or configured separately do not, even if they
    /// share a storage.
    SameLayerTwice,
    /// `RL005`: a trusted proxy did not send the field that [`ClientIp`](crate::ClientIp) reads.
    ///
    /// All clients of that proxy share its key, and so one quota. Configure the proxy to send the
    /// field, or select the field that it sends with [`header`](crate::ClientIp::header) or
    /// [`forwarded`](crate::ClientIp::forwarded). Health checks by the proxy itself are harmless.
    ForwardingFieldMissing {
        /// Another forwarding field that the request has.
        found: Option<&'static str>,
    },
    /// `RL006`: an elastic window is combined with
    /// [`charge_when`](crate::RateLimitLayer::charge_when).
    ///
    /// Each hit moves the window's end, and a refund does not move it back. So requests that are
    /// not charged prevent old charges from expiring. Example: with `5/minute`, one failed login
    /// per hour and a successful request every 30 seconds, a client is locked out after five hours.
    /// Use a [`MovingWindow`](crate::MovingWindow) to count failures.
    ElasticWindowRefunded,
    /// `RL007`: fewer than 10,000 clients can fill the storage by exhausting the policy's quota.
    ///
    /// A full storage refuses new clients, so a few addresses could lock out all others. The usual
    /// cause is a moving window with a large amount, whose log takes up to six bytes per hit. Raise
    /// [`max_bytes`](crate::storage::MemoryStorageBuilder::max_bytes), or use another strategy,
    /// such as the sliding window counter.
    SmallStorage {
        /// The number of clients that fill the storage.
        clients: u64,
    },
}

impl Lint {
    /// Returns the code, such as `RL001`.
    pub const fn code(self) -> &'static str {
        match self {
            Self::Ipv6PerAddress => "RL001",
            Self::TrustsEveryAddress => "RL002",
            Self::ForwardedPeer => "RL003",
            Self::SameLayerTwice => "RL004",
            Self::ForwardingFieldMissing { .. } => "RL005",
            Self::ElasticWindowRefunded => "RL006",
            Self::SmallStorage { .. } => "RL007",
        }
    }

    /// Returns the path of the lint's page in the crate's documentation.
    pub const fn docs(self) -> &'static str {
        match self {
            Self::Ipv6PerAddress => "tower_ratelimit/enum.Lint.html#variant.Ipv6PerAddress",
            Self::TrustsEveryAddress => "tower_ratelimit/enum.Lint.html#variant.TrustsEveryAddress",
            Self::ForwardedPeer => "tower_ratelimit/enum.Lint.html#variant.ForwardedPeer",
            Self::SameLayerTwice => "tower_ratelimit/enum.Lint.html#variant.SameLayerTwice",
            Self::ForwardingFieldMissing { .. } => "tower_ratelimit/enum.Lint.html#variant.ForwardingFieldMissing",
            Self::ElasticWindowRefunded => "tower_ratelimit/enum.Lint.html#variant.ElasticWindowRefunded",
            Self::SmallStorage { .. } => "tower_ratelimit/enum.Lint.html#variant.SmallStorage",
        }
    }

    /// Returns the lint's bit in the set of reported lints.
    const fn bit(self) -> u32 {
        1 << match self {
            Self::Ipv6PerAddress => 0,
            Self::TrustsEveryAddress => 1,
            Self::ForwardedPeer => 2,
            Self::SameLayerTwice => 3,
            Self::ForwardingFieldMissing { .. } => 4,
            Self::ElasticWindowRefunded => 5,
            Self::SmallStorage { .. } => 6,
        }
    }
}

impl fmt::Display for Lint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ipv6PerAddress => {
                "IPv6 clients are distinguished by more than 64 bits, but one client usually has a whole /64"
            }
            Self::TrustsEveryAddress => "every address is trusted as a proxy, so clients choose their own keys",
            Self::ForwardedPeer => "requests have a forwarding header, but the key is the peer's address: use ClientIp",
            Self::SameLayerTwice => "a request passed through the same layer twice and was charged twice",
            Self::ForwardingFieldMissing { found: None } => {
                "a trusted proxy did not send the forwarding field, so its clients share one quota"
            }
            Self::ForwardingFieldMissing { found: Some(found) } => {
                return write!(
                    f,
                    "a trusted proxy did not send the configured forwarding field, so its clients share one quota; \
                     it sent {found:?}"
                );
            }
            Self::ElasticWindowRefunded => {
                "an elastic window with charge_when locks out well-behaved clients: use a moving window"
            }
            Self::SmallStorage { clients } => {
                return write!(f, "{clients} clients with an exhausted quota fill the storage: raise max_bytes");
            }
        })
    }
}

/// The number of requests that are inspected after the start.
const INSPECTED_REQUESTS: u32 = 1_024;

/// The lints that a layer has reported, and the number of requests that it still inspects.
#[derive(Debug)]
pub(crate) struct Lints {
    started: AtomicBool,
    left: AtomicU32,
    reported: AtomicU32,
}

impl Default for Lints {
    fn default() -> Self {
        Self { started: AtomicBool::new(false), left: AtomicU32::new(INSPECTED_REQUESTS), reported: AtomicU32::new(0) }
    }
}

/// A request extension with the layers that have inspected the request.
#[derive(Clone, Default)]
struct PassedLayers(Vec<usize>);

impl Lints {
    /// Reports the lints that need no request.
    pub(crate) fn at_start(&self, caveats: impl FnOnce() -> Vec<Caveat>, report: impl Fn(Lint)) {
        if self.started.swap(true, Ordering::Relaxed) {
            return;
        }
        let caveats = caveats();
        for (caveat, lint) in
            [(Caveat::Ipv6PerAddress, Lint::Ipv6PerAddress), (Caveat::TrustsEveryAddress, Lint::TrustsEveryAddress)]
        {
            if caveats.contains(&caveat) {
                self.report_once(lint, &report);
            }
        }
    }

    /// Returns `true` for the first requests, which are to be [inspected](Self::inspect).
    #[inline]
    pub(crate) fn is_inspecting(&self) -> bool {
        self.left.load(Ordering::Relaxed) > 0
    }

    #[cold]
    pub(crate) fn inspect<B>(
        &self,
        request: &mut Request<B>,
        key: &dyn KeyExtractor,
        caveats: impl FnOnce() -> Vec<Caveat>,
        report: impl Fn(Lint),
    ) {
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).ok();
        let is_forwarded = || FORWARDING.iter().any(|name| request.headers().contains_key(name));
        let only_peer = || {
            let caveats = caveats();
            caveats.contains(&Caveat::OnlyPeer) && !caveats.contains(&Caveat::ReadsForwarding)
        };
        if !self.has_reported(Lint::ForwardedPeer) && is_forwarded() && only_peer() {
            self.report_once(Lint::ForwardedPeer, &report);
        }
        for caveat in key.caveats_of(&Head::of(request)) {
            if let Caveat::ForwardingFieldMissing { found } = caveat {
                self.report_once(Lint::ForwardingFieldMissing { found }, &report);
            }
        }
        let me = std::ptr::from_ref(self).addr();
        let passed = request.extensions_mut().get_or_insert_with(PassedLayers::default);
        if passed.0.contains(&me) {
            self.report_once(Lint::SameLayerTwice, &report);
        } else {
            passed.0.push(me);
        }
    }

    fn has_reported(&self, lint: Lint) -> bool {
        self.reported.load(Ordering::Relaxed) & lint.bit() != 0
    }

    pub(crate) fn report_once(&self, lint: Lint, report: impl Fn(Lint)) {
        if self.reported.fetch_or(lint.bit(), Ordering::Relaxed) & lint.bit() == 0 {
            report(lint);
        }
    }
}
