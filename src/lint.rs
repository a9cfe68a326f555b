//! Lints: warnings about a layer's configuration, reported once for each layer.

use std::fmt;

/// A warning about a setting of a layer that is probably a mistake.
///
/// A layer reports each lint once: to [`RateLimitLayer::on_lint`](crate::RateLimitLayer::on_lint),
/// and as a warning in the log (feature `tracing`) with the [code](Self::code) and the
/// [documentation](Self::docs) of the lint. A lint does not change the layer's behavior.
///
/// A layer looks for lints when it is applied to a service, in its first 1,024 limited requests,
/// and after each change of a [`LivePolicy`](crate::LivePolicy).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Lint {
    /// `RL001`: IPv6 clients are distinguished by more than 64 bits of their addresses.
    ///
    /// One client usually has a whole /64, which is 2^64 addresses. Such a client gets several
    /// quotas, up to one for each address, and can fill the storage with keys. Set
    /// [`ipv6_prefix`](crate::PeerIp::ipv6_prefix) to at most 64, which is the default.
    Ipv6PerAddress,
    /// `RL002`: a [`ClientIp`](crate::ClientIp) trusts every IPv4 address, or every IPv6 address,
    /// as a proxy.
    ///
    /// Each client counts as a proxy and can choose its own key with the forwarding header. List
    /// the networks of your proxies with [`behind`](crate::ClientIp::behind), or set their number
    /// with [`behind_hops`](crate::ClientIp::behind_hops).
    TrustsEveryAddress,
    /// `RL003`: a request has a forwarding header, but the layer uses the address of the peer, as
    /// the key or in an [`AllowList`](crate::extract::AllowList).
    ///
    /// Behind a proxy, the peer is the proxy. Then all clients share one quota, and an allow list
    /// exempts either all of them or none. Use [`ClientIp`](crate::ClientIp) with the proxy's
    /// network. Without a proxy, ignore this lint, because a client has sent the header itself.
    ///
    /// Forwarding headers are `Forwarded`, `X-Forwarded-For`, `X-Real-IP` and `CF-Connecting-IP`. A
    /// layer whose key is read from one of them, at least for some requests, does not report this
    /// lint.
    ForwardedPeer,
    /// `RL004`: a request passed through the same layer twice, and spent its cost twice.
    ///
    /// The usual cause is a layer that was added to a router and also to one of its routes. Remove
    /// one of the two. A layer and its clones count as the same layer. Layers that were created or
    /// configured separately do not, even if they share a storage.
    ///
    /// The layer checks one in 64 of its first 1,024 limited requests. So it may report this lint
    /// late, or not at all.
    SameLayerTwice,
    /// `RL005`: a trusted proxy did not send the field that [`ClientIp`](crate::ClientIp) reads.
    ///
    /// All clients of that proxy share its key, and so one quota. Configure the proxy to send the
    /// field, or select the field that it sends with [`header`](crate::ClientIp::header) or
    /// [`forwarded`](crate::ClientIp::forwarded). If only health checks by the proxy itself lack
    /// the field, ignore this lint.
    ForwardingFieldMissing {
        /// The name of another forwarding field that the request has, in lower case, or `None`.
        found: Option<&'static str>,
    },
    /// `RL006`: an elastic window is combined with
    /// [`charge_when`](crate::RateLimitLayer::charge_when),
    /// [`settle`](crate::RateLimitLayer::settle) or
    /// [`settle_later`](crate::RateLimitLayer::settle_later).
    ///
    /// Each hit moves the window's end, and a refund does not move it back. So requests that are
    /// refunded prevent the units of earlier requests from expiring. For example, the policy
    /// `elastic-window 5/minute` counts failed logins. A client with one failed login per hour, and
    /// one successful request every 30 seconds, is locked out after five hours. Use a
    /// [`Lockout`](crate::Lockout) to count failures.
    ElasticWindowRefunded,
    /// `RL007`: fewer than 10,000 clients can fill the memory storage by exhausting the policy's
    /// quota.
    ///
    /// By default, a full memory storage refuses new clients, so a few addresses could lock out all
    /// others. The usual cause is a moving window with a large amount, whose log takes several
    /// bytes per hit. Raise [`max_bytes`](crate::storage::MemoryStorageBuilder::max_bytes), or use
    /// another strategy, such as the [`SlidingWindowCounter`](crate::SlidingWindowCounter).
    SmallStorage {
        /// The estimated number of clients that fill the storage.
        clients: u64,
    },
    /// `RL008`: an aligned window of weeks, months or years does not follow the calendar.
    ///
    /// Aligned windows start at multiples of the period since 1970-01-01, which was a Thursday, in
    /// UTC. So an aligned week starts on Thursday, a month is a block of 30 days, and a year is a
    /// block of 365 days. If blocks are intended, ignore this lint. Otherwise use a
    /// [`CalendarWindow`](crate::CalendarWindow), which the guide [Quotas by day and
    /// month](crate::guide::quotas_by_day_and_month) explains.
    AlignedCalendar,
    /// `RL009`: the only key of a [`Lockout`](crate::Lockout) is a header field, which the client
    /// chooses.
    ///
    /// A client can lock out another one by sending the value of the other, such as the name of an
    /// account. It can also avoid its own lock by sending a new value. Join the field with the
    /// address, as in `Header::new("x-account").and(PeerIp::new())`. If an outer layer has verified
    /// the value, use [`Extension`](crate::extract::Extension), or ignore this lint.
    LockoutByHeader,
}

/// Expands to the number, the code and the documentation path of a lint.
macro_rules! entry {
    ($number:literal, $variant:ident) => {
        ($number, concat!("RL00", $number), concat!("tower_ratelimit/enum.Lint.html#variant.", stringify!($variant)))
    };
}

impl Lint {
    const fn entry(self) -> (u32, &'static str, &'static str) {
        match self {
            Self::Ipv6PerAddress => entry!(1, Ipv6PerAddress),
            Self::TrustsEveryAddress => entry!(2, TrustsEveryAddress),
            Self::ForwardedPeer => entry!(3, ForwardedPeer),
            Self::SameLayerTwice => entry!(4, SameLayerTwice),
            Self::ForwardingFieldMissing { .. } => entry!(5, ForwardingFieldMissing),
            Self::ElasticWindowRefunded => entry!(6, ElasticWindowRefunded),
            Self::SmallStorage { .. } => entry!(7, SmallStorage),
            Self::AlignedCalendar => entry!(8, AlignedCalendar),
            Self::LockoutByHeader => entry!(9, LockoutByHeader),
        }
    }

    /// Returns the code, such as `RL001`.
    pub const fn code(self) -> &'static str {
        self.entry().1
    }

    /// Returns the path of the lint's description, relative to the root of the crate's
    /// documentation, such as `tower_ratelimit/enum.Lint.html#variant.SmallStorage`.
    pub const fn docs(self) -> &'static str {
        self.entry().2
    }

    /// Returns the lint's bit in the set of reported lints.
    pub(crate) const fn bit(self) -> u32 {
        1 << self.entry().0
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
            Self::SameLayerTwice => "a request passed through the same layer twice and spent its cost twice",
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
                "an elastic window whose hits are refunded locks out well-behaved clients: use a lockout"
            }
            Self::SmallStorage { clients } => {
                return write!(f, "{clients} clients with an exhausted quota fill the storage: raise max_bytes");
            }
            Self::AlignedCalendar => {
                "an aligned week starts on Thursday, and an aligned month or year is a block of 30 or 365 days: \
                 use a calendar window"
            }
            Self::LockoutByHeader => {
                "the only key of a lockout is a header field, so anyone can lock out others: add PeerIp to the key"
            }
        })
    }
}
