//! Policies: the limits that apply to one key.

mod build;
mod cell;
mod decide;
mod into;
mod limit;
mod live;
mod name;
mod shared;
mod text;

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

pub use self::build::PolicyBuilder;
pub use self::decide::Op;
pub use self::into::IntoPolicy;
pub use self::limit::Limit;
pub(crate) use self::limit::SHADOW;
pub use self::live::LivePolicy;
pub use self::shared::SharedPolicy;

/// The limits that apply to each key, with an optional name. A hit is admitted if all limits admit
/// it, and spends its cost from each of them. A refused hit spends nothing.
///
/// A [`Quota`](crate::Quota) or a [`Limit`] converts into a policy. The
/// [text form](Self#impl-FromStr-for-Policy) supports all options except for custom strategies.
/// Cloning a policy is cheap.
///
/// ```
/// use tower_ratelimit::{FixedWindow, MovingWindow, Policy, Quota};
///
/// let free = Policy::named("free")
///     .limit(FixedWindow::new(), Quota::per_second(10))
///     .limit(MovingWindow::new(), Quota::per_day(10_000));
/// let same: Policy = "fixed-window 10/second; moving-window 10000/day".parse()?;
/// assert_eq!(free, same.with_name("free"));
/// assert_eq!(free.to_string().parse(), Ok(free));
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
///
/// # Identity
///
/// The [identity](Self::identity) of a policy is its name. The identity of an unnamed policy is its
/// text, so processes with the same configuration share their states. On one storage, policies with
/// the same identity share their states, and others never do. Within a policy, the state of a limit
/// is identified by the position, the strategy and the period of the limit.
///
/// A *named* policy keeps its identity when its limits change:
///
/// | change | effect on the units already spent |
/// |---|---|
/// | amount of a window or log | they stay spent: with 8 of 10 spent, 0 remain after lowering to 5, and 12 after raising to 20 |
/// | amount and burst (or queue) of a bucket, by the same factor | they are scaled: with 4 of 10 remaining, 8 remain after raising to 20 |
/// | amount of a bucket whose burst (or queue) stays the same | they are scaled so that the time until the bucket is full stays the same, up to that of an empty bucket |
/// | burst of a bucket, or length of a queue | they stay spent, up to an empty bucket: with 15 of 20 spent, 15 remain after raising to 30, and 0 after lowering to 10 |
/// | period, strategy, or position of a limit | they are forgotten: the limit starts with its full quota |
///
/// The burst of a token bucket, and the queue of a leaky bucket, default to the amount. A change of
/// the amount then changes both. An unnamed policy with another text is another policy, and starts
/// with its full quota.
///
/// `retry_after` is exact after any of these changes. A client of a bucket never waits longer than
/// if its last admitted hit had emptied a bucket of the new quota, plus up to 0.2 % of the time in
/// which that bucket fills. A debt that a [charge](crate::RateLimiter::charge) has left counts as at
/// most an empty bucket of the new quota, and can count as less. There are two exceptions, in which
/// the debt stays:
///
/// - Only the burst (or queue) changes, to a smaller one, or by less than a sixteenth. If the units
///   that are owed fit into the new bucket, the bound holds all the same.
/// - The amount changes, and the state does not show it. The probability is about 1 in 4,000 for an
///   amount of a million, and proportional to the amount.
///
/// # Shadow limits
///
/// [`shadow`](Self::shadow) adds a limit that is observed but not enforced. It never refuses a
/// request, and no header field reports it. The text form is
/// `10/second; shadow moving-window 5/second`.
///
/// The middleware checks the shadow limits for each request that the enforced limits admit and that
/// has a cost above 0. It treats each shadow limit as a separate policy
/// ([`shadows`](Self::shadows)), and reports its decisions to the observer. A
/// [`RateLimiter`](crate::RateLimiter) ignores shadow limits.
///
/// The memory storage keeps shadow states next to the enforced states of the same key. Shadow
/// states take no memory from other keys and are evicted first.
#[derive(Clone)]
pub struct Policy(Arc<Inner>);

struct Inner {
    name: Option<Box<str>>,
    limits: Vec<Limit>,
    identity: String,
    digest: u128,
    limit_digests: Vec<u32>,
    /// The name that header fields and responses report for a limit without its own name. If the
    /// policy has several limits, it is the prefix, as `free` in `free-1`.
    called: String,
    shadows: Vec<Policy>,
}

impl Policy {
    /// Returns the [shadow limits](Self#shadow-limits), each as a separate policy with one limit.
    /// A [`RateLimiter`](crate::RateLimiter) for such a policy can peek at its states.
    #[inline]
    pub fn shadows(&self) -> &[Self] {
        &self.0.shadows
    }

    /// Returns `true` if one of the limits can delay an admitted hit.
    pub(crate) fn delays(&self) -> bool {
        self.limits().iter().any(|limit| limit.strategy().delays())
    }

    /// Returns `true` if this is the policy of a shadow limit.
    #[inline]
    pub(crate) fn is_shadow(&self) -> bool {
        self.limit_digests().first().is_some_and(|digest| digest & SHADOW != 0)
    }

    /// Returns the name of the policy, or `None` for an unnamed policy and for those in
    /// [`shadows`](Self::shadows).
    pub fn name(&self) -> Option<&str> {
        self.0.name.as_deref()
    }

    /// Returns the enforced limits, of which there is at least one. [`shadows`](Self::shadows)
    /// returns the shadow limits.
    #[inline]
    pub fn limits(&self) -> &[Limit] {
        &self.0.limits
    }

    /// Returns the name by which header fields and responses report the limit at `position`.
    ///
    /// The first row that applies determines the name:
    ///
    /// | limit | name |
    /// |---|---|
    /// | with a [name of its own](Limit::named) | this name |
    /// | of a policy in [`shadows`](Self::shadows) | the identity of the enclosing policy and a number, as in `free shadow-1` |
    /// | the only limit of the policy | the [identity](Self::identity) of the policy: its name, or its text |
    /// | one of several limits | the identity and the number of the limit, counted from 1, as in `free-1` |
    ///
    /// # Panics
    ///
    /// Panics if there is no limit at this position.
    #[track_caller]
    pub fn limit_name(&self, position: usize) -> Cow<'_, str> {
        match self.limits()[position].name() {
            Some(name) => name.into(),
            None if self.limits().len() == 1 => self.0.called.as_str().into(),
            None => format!("{}-{}", self.0.called, position + 1).into(),
        }
    }

    /// Returns the [name of the limit](Self::limit_name) in double quotes, with the escapes of a
    /// Structured Field string.
    pub(crate) fn quoted_name(&self, position: usize) -> String {
        name::Quoted(&self.limit_name(position)).to_string()
    }

    /// Returns the string that identifies the policy in a storage.
    ///
    /// | policy | identity |
    /// |---|---|
    /// | with a name | the name |
    /// | without a name | the [text](Self#impl-Display-for-Policy) of its enforced limits |
    /// | the result of [`divide`](Self::divide) | the identity of the original policy |
    /// | one of the [`shadows`](Self::shadows) | the identity of the enclosing policy and a number, as in `free·shadow-1` |
    pub fn identity(&self) -> &str {
        &self.0.identity
    }

    /// Returns a 128-bit hash of the [identity](Self::identity), for storages that keep hashes
    /// instead of names.
    ///
    /// The hash may differ between builds of a program, so a storage must not write it to a file or
    /// send it to another process. The policies in [`shadows`](Self::shadows) have the same digest
    /// as this policy, but other [limit digests](Self::limit_digests).
    #[inline]
    pub fn digest(&self) -> u128 {
        self.0.digest
    }

    /// Returns a 32-bit hash for each limit, in the order of [`limits`](Self::limits).
    ///
    /// A hash depends on the position, the strategy and the period of its limit. No two limits of a
    /// policy have the same hash. Storages that keep hashes identify the state of each limit by it.
    /// Like [`digest`](Self::digest), it may differ between builds of a program.
    #[inline]
    pub fn limit_digests(&self) -> &[u32] {
        &self.0.limit_digests
    }
}

/// Compares the [identities](Self::identity) and the [texts](Self#impl-Display-for-Policy), which
/// include shadow limits. Two custom strategies with different settings can have the same text.
impl PartialEq for Policy {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.identity() == other.identity() && self.to_string() == other.to_string()
    }
}

impl Eq for Policy {}

impl fmt::Debug for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Policy({self})")
    }
}
