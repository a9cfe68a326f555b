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

/// The limits that apply to one key. A hit is admitted only if all of them admit it, and a refused
/// hit spends nothing.
///
/// A [`Quota`](crate::Quota) or a [`Limit`] converts into a policy, and the text form supports all options.
/// Cloning is cheap.
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
/// The name of a policy is its identity in a storage. Policies with the same name on one storage
/// share their states, others never do. The identity of an unnamed policy is its text, so processes
/// with the same configuration share states. A limit is identified by its position, its strategy
/// and its period.
///
/// A *named* policy keeps its identity when its configuration changes. The effect on its stored
/// states:
///
/// | change | effect on the units already spent |
/// |---|---|
/// | amount of a window or log | kept: with 8 of 10 spent, 0 remain after lowering to 5, and 12 after raising to 20 |
/// | amount of a bucket, with its burst | scaled: with 4 of 10 remaining, 8 remain after raising to 20 |
/// | amount of a bucket, without its burst | the time until the bucket is full is kept, up to that of an empty bucket |
/// | burst of a bucket, or length of a queue | kept if possible: with 5 of 20 remaining, 0 remain after lowering to 15 |
/// | period, strategy, or position of a limit | reset: the limit starts with its full quota |
///
/// An unnamed policy with another text is another policy, and starts with its full quota.
///
/// `retry_after` is exact after any of these changes. A client of a bucket never waits longer than
/// if its last admitted hit had emptied a bucket of the new quota (plus up to 0.2 % of the time in
/// which that bucket fills).
///
/// # Shadow limits
///
/// [`shadow`](Self::shadow) adds a limit that is observed but not enforced. It never refuses a
/// request, and no header field reports it. The text form is `10/second; shadow moving-window
/// 5/second`.
///
/// The middleware checks shadow limits for the requests that the enforced limits admit. It counts
/// each shadow limit as a separate policy ([`shadows`](Self::shadows)) and reports the decisions to
/// its observer. The memory storage keeps shadow states next to the enforced states of the same
/// key. Shadow states take no memory from other keys and are evicted first.
#[derive(Clone)]
pub struct Policy(Arc<Inner>);

struct Inner {
    name: Option<Box<str>>,
    limits: Vec<Limit>,
    identity: String,
    digest: u128,
    limit_digests: Vec<u32>,
    /// The default name of a single limit on the wire. With several limits, the start of their
    /// default names.
    called: String,
    shadows: Vec<Policy>,
}

impl Policy {
    /// Returns the shadow limits, each as a separate policy, for example to peek at their states.
    #[inline]
    pub fn shadows(&self) -> &[Self] {
        &self.0.shadows
    }

    /// Returns `true` if an admitted hit can be delayed.
    pub(crate) fn delays(&self) -> bool {
        self.limits().iter().any(|limit| limit.strategy().delays())
    }

    /// Returns `true` if this is the policy of a shadow limit.
    #[inline]
    pub(crate) fn is_shadow(&self) -> bool {
        self.limit_digests().first().is_some_and(|digest| digest & SHADOW != 0)
    }

    /// Returns the name, or `None` for an unnamed policy.
    pub fn name(&self) -> Option<&str> {
        self.0.name.as_deref()
    }

    /// Returns the enforced limits, at least one.
    #[inline]
    pub fn limits(&self) -> &[Limit] {
        &self.0.limits
    }

    /// Returns the name by which header fields and responses report the limit at `position`.
    ///
    /// This is the limit's own name if it has one. Otherwise it is the name of the policy, or its
    /// text if the policy has no name. If the policy has several limits, the limit's number
    /// follows, counted from 1, as in `free-1`.
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

    /// Returns the name of the limit in double quotes.
    pub(crate) fn quoted_name(&self, position: usize) -> String {
        name::Quoted(&self.limit_name(position)).to_string()
    }

    /// Returns the string that identifies the policy in a storage: its name, or its
    /// [text](Self#impl-Display-for-Policy) if it has no name.
    pub fn identity(&self) -> &str {
        &self.0.identity
    }

    /// Returns a 128-bit hash of the [identity](Self::identity), for storages that keep hashes
    /// instead of names. The hash may change between builds of a program.
    ///
    /// The policies in [`shadows`](Self::shadows) have the digest of this policy. Their
    /// [limit digests](Self::limit_digests) differ.
    #[inline]
    pub fn digest(&self) -> u128 {
        self.0.digest
    }

    /// Returns a 32-bit digest of the position, strategy and period of each limit. It distinguishes
    /// the states of the limits, and changes with the strategy or period of a limit.
    #[inline]
    pub fn limit_digests(&self) -> &[u32] {
        &self.0.limit_digests
    }
}

/// Compares the names and the texts of the limits, including shadow limits.
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
