//! Settings of a layer that work and that were probably not meant, reported once for each layer.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use http::Request;

use crate::extract::{Caveat, FORWARDING, Head, KeyExtractor};

/// A setting of a layer that works and that was probably not meant.
///
/// A layer reports each lint once: as a warning in the log (feature `tracing`) with its
/// [code](Self::code) and a link to its explanation, and to the [`Observer`](crate::Observer). It
/// changes nothing else. Lints that only requests can show are looked for in the first 1,024
/// requests that are limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Lint {
    /// `RL001`: IPv6 clients are distinguished by more than 64 bits of their addresses.
    ///
    /// One client usually has all of a /64, which is 2^64 addresses. It gets a new quota with each
    /// address and fills the storage with keys. Leave [`ipv6_prefix`](crate::PeerIp::ipv6_prefix) at
    /// 64, or lower it.
    Ipv6PerAddress,
    /// `RL002`: a [`ClientIp`](crate::ClientIp) trusts every address as a proxy.
    ///
    /// Each client then counts as a proxy and chooses its own key by what it writes into the
    /// forwarding header. Name the networks of your proxies, or how many proxies there are.
    TrustsEveryAddress,
    /// `RL003`: requests carry a forwarding header, and clients are known by the peer's address.
    ///
    /// Behind a proxy the peer is the proxy, and all clients share one quota (or are all allowed by
    /// an [`AllowList`](crate::extract::AllowList)). Use [`ClientIp`](crate::ClientIp) with the
    /// proxy's network. Without a proxy, a client sent the header itself, and nothing is wrong.
    ForwardedPeer,
    /// `RL004`: a request came to the same layer twice, and was charged twice.
    ///
    /// Usually the layer was put on a router and again on one of its routes. Clones count as one
    /// layer. Layers that were made or changed separately do not, also if they share a storage.
    SameLayerTwice,
    /// `RL005`: a trusted proxy did not send the field that [`ClientIp`](crate::ClientIp) reads.
    ///
    /// All clients of that proxy share its key, and so one quota. Set the proxy up to send the
    /// field, or read the field that it does send by [`header`](crate::ClientIp::header) or
    /// [`forwarded`](crate::ClientIp::forwarded). A health check by the proxy itself is harmless.
    ForwardingFieldMissing {
        /// Another forwarding field that the request has.
        found: Option<&'static str>,
    },
    /// `RL006`: an elastic window is combined with
    /// [`charge_when`](crate::RateLimitLayer::charge_when).
    ///
    /// Each hit moves the window's end, and giving the hit back does not move the end back. So a
    /// client whose requests are not charged keeps its old charges alive: with `5/minute`, one
    /// failed login an hour and a success every 30 seconds, it is locked out after five hours. Use a
    /// [`MovingWindow`](crate::MovingWindow) to count failures.
    ElasticWindowRefunded,
    /// `RL007`: the storage is full once fewer than 10,000 clients have used up the policy's quota.
    ///
    /// It refuses new clients then, so a few addresses keep all others out. Most often the policy has
    /// a moving window of a large amount, whose log takes up to six bytes for each hit. Raise
    /// [`max_bytes`](crate::storage::MemoryStorageBuilder::max_bytes), or use another strategy, such
    /// as the sliding window counter.
    SmallStorage {
        /// The number of clients that fill the storage.
        clients: u64,
    },
}

impl Lint {
    /// Its code: `RL001` and so on.
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

    /// The page of the crate's documentation that explains it.
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

    /// Its bit in the set of lints that a layer has reported.
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
                "IPv6 clients are distinguished by more than 64 bits, and each client has that many addresses"
            }
            Self::TrustsEveryAddress => "every address is trusted as a proxy, so clients choose their own keys",
            Self::ForwardedPeer => "requests come through a proxy, and all its clients have the proxy's address",
            Self::SameLayerTwice => "a request came to the same layer twice and was charged twice",
            Self::ForwardingFieldMissing { found: None } => {
                "a trusted proxy did not send the forwarding field, so its clients share one quota"
            }
            Self::ForwardingFieldMissing { found: Some(found) } => {
                return write!(
                    f,
                    "a trusted proxy did not send the configured forwarding field, so its clients share one quota; \
                     it did send {found:?}"
                );
            }
            Self::ElasticWindowRefunded => {
                "an elastic window with charge_when locks clients out that behave: use a moving window"
            }
            Self::SmallStorage { clients } => {
                return write!(f, "{clients} clients that have used up their quota fill the storage; raise max_bytes");
            }
        })
    }
}

/// How many requests are looked at after a start.
const INSPECTED_REQUESTS: u32 = 1_024;

/// The lints that a layer has reported, and how many requests are still to be looked at.
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

/// The layers a request has come through, as far as they were still looking.
#[derive(Clone, Default)]
struct PassedLayers(Vec<usize>);

impl Lints {
    /// Reports what can be known before the first request.
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

    /// Whether a request is to be [looked at](Self::inspect): the first ones are.
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
