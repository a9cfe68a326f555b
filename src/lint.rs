//! What is probably not meant so, told once when a layer starts.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use http::Request;

use crate::extract::{Caveat, FORWARDING};

/// Something about how a layer is set up that works and is probably not meant so.
///
/// Each is told once for each layer, as a warning in the log (feature `tracing`) with its [code](Self::code) and where it is
/// explained, and to the [`Observer`](crate::Observer). Nothing else comes of it. What only requests can show is looked for in
/// the first 1,024 that are limited after a start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Lint {
    /// `RL001`: IPv6 clients are told apart by more than 64 bits of their addresses.
    ///
    /// One client usually has all of a /64, which is 2^64 addresses: it gets a new quota with each, and fills the storage
    /// with keys. Leave [`ipv6_prefix`](crate::PeerIp::ipv6_prefix) at 64, or lower it.
    Ipv6PerAddress,
    /// `RL002`: the trusted proxies of a [`ClientIp`](crate::ClientIp) are every address there is.
    ///
    /// Then each client counts as a proxy, and what it writes into the forwarding header is believed: it chooses its key.
    /// Name the networks that your proxies are in, or how many there are.
    TrustsEveryAddress,
    /// `RL003`: requests come with a forwarding header, and clients are known by the peer's address.
    ///
    /// Behind a proxy the peer is the proxy, and all clients together share one quota (or are all allowed, by an
    /// [`AllowList`](crate::extract::AllowList)). Use [`ClientIp`](crate::ClientIp) with the proxy's network. If nothing stands in
    /// front, a client made the header up, and all is well.
    ForwardedPeer,
    /// `RL004`: a request came to the same layer twice.
    ///
    /// It is charged twice then. Usually a layer was put on a router and again on one of its routes. Meant are clones of one
    /// layer; of two that were made or changed apart nobody knows that they are to be one, also if they share a storage.
    SameLayerTwice,
    /// `RL005`: the storage is full once fewer than 10,000 clients have used up the policy's quota.
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
            Self::SmallStorage { .. } => "RL005",
        }
    }

    /// Where in the crate's documentation it is explained.
    pub const fn docs(self) -> &'static str {
        match self {
            Self::Ipv6PerAddress => "tower_ratelimit/enum.Lint.html#variant.Ipv6PerAddress",
            Self::TrustsEveryAddress => "tower_ratelimit/enum.Lint.html#variant.TrustsEveryAddress",
            Self::ForwardedPeer => "tower_ratelimit/enum.Lint.html#variant.ForwardedPeer",
            Self::SameLayerTwice => "tower_ratelimit/enum.Lint.html#variant.SameLayerTwice",
            Self::SmallStorage { .. } => "tower_ratelimit/enum.Lint.html#variant.SmallStorage",
        }
    }
}

impl fmt::Display for Lint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ipv6PerAddress => {
                "IPv6 clients are told apart by more than 64 bits, and each has that many addresses"
            }
            Self::TrustsEveryAddress => "every address is trusted as a proxy, so clients choose their own keys",
            Self::ForwardedPeer => "requests come through a proxy, whose address all clients then have",
            Self::SameLayerTwice => "a request came to the same layer twice, and is charged twice",
            Self::SmallStorage { clients } => {
                return write!(f, "{clients} clients that have used up their quota fill the storage; raise max_bytes");
            }
        })
    }
}

/// How many requests are looked at after a start.
const LOOKED_AT: u32 = 1_024;

/// What has been told, and how many requests are still to be looked at.
#[derive(Debug)]
pub(crate) struct Lints {
    started: AtomicBool,
    left: AtomicU32,
    forwarded: AtomicBool,
    twice: AtomicBool,
}

impl Default for Lints {
    fn default() -> Self {
        Self {
            started: AtomicBool::new(false),
            left: AtomicU32::new(LOOKED_AT),
            forwarded: AtomicBool::new(false),
            twice: AtomicBool::new(false),
        }
    }
}

/// The layers a request has come through, as far as they were still looking.
#[derive(Clone, Default)]
struct Through(Vec<usize>);

impl Lints {
    /// What can be said before the first request.
    pub(crate) fn at_start(&self, caveats: impl FnOnce() -> Vec<Caveat>, tell: impl Fn(Lint)) {
        if self.started.swap(true, Ordering::Relaxed) {
            return;
        }
        let caveats = caveats();
        for (caveat, lint) in
            [(Caveat::Ipv6PerAddress, Lint::Ipv6PerAddress), (Caveat::TrustsEveryAddress, Lint::TrustsEveryAddress)]
        {
            if caveats.contains(&caveat) {
                tell(lint);
            }
        }
        for caveat in caveats {
            if let Caveat::SmallStorage { clients } = caveat {
                tell(Lint::SmallStorage { clients });
            }
        }
    }

    /// Whether a request is to be [looked at](Self::look): the first ones are.
    #[inline]
    pub(crate) fn are_looking(&self) -> bool {
        self.left.load(Ordering::Relaxed) > 0
    }

    #[cold]
    pub(crate) fn look<B>(&self, request: &mut Request<B>, caveats: impl FnOnce() -> Vec<Caveat>, tell: impl Fn(Lint)) {
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).ok();
        let is_forwarded = || FORWARDING.iter().any(|name| request.headers().contains_key(name));
        let only_peer = || {
            let caveats = caveats();
            caveats.contains(&Caveat::OnlyPeer) && !caveats.contains(&Caveat::ReadsForwarding)
        };
        if !self.forwarded.load(Ordering::Relaxed)
            && is_forwarded()
            && only_peer()
            && !self.forwarded.swap(true, Ordering::Relaxed)
        {
            tell(Lint::ForwardedPeer);
        }
        let me = std::ptr::from_ref(self).addr();
        let through = request.extensions_mut().get_or_insert_with(Through::default);
        if !through.0.contains(&me) {
            through.0.push(me);
        } else if !self.twice.swap(true, Ordering::Relaxed) {
            tell(Lint::SameLayerTwice);
        }
    }
}
