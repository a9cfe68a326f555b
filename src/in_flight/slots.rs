//! The number of slots of a key.

use std::fmt;

use crate::error::{ConfigError, or_panic};
use crate::extract::Head;
use crate::middleware::{IntoPolicySource, PolicySource, policy_by};
use crate::policy::{Limit, LivePolicy, Policy};
use crate::quota::Quota;
use crate::strategy::InFlightLimit;

/// The number of slots of each key in an [`InFlightLayer`](crate::InFlightLayer), with a name.
///
/// A `u32` converts into slots with the name `in-flight`. A request whose cost exceeds the number
/// is always refused, so 0 slots refuse every request that costs at least 1.
///
/// The name identifies the limit in header fields, events and metrics. Slots with the same name share
/// their counts, within a layer and its clones, even if their numbers differ.
///
/// ```
/// use tower_ratelimit::{InFlightLayer, PeerIp, Slots};
///
/// let exports = InFlightLayer::new(Slots::new(2).with_name("exports"), PeerIp::new());
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Slots(Policy);

impl Slots {
    /// Creates slots with this number and the name `in-flight`. Cloning slots is cheaper than
    /// creating them.
    pub fn new(slots: u32) -> Self {
        Self(Policy::new(InFlightLimit(slots), Quota::per_second(1)).with_name(InFlightLimit::NAME))
    }

    /// Sets the name, which identifies the limit in header fields, events and metrics. Defaults to
    /// `in-flight`.
    ///
    /// # Panics
    ///
    /// Panics if the name is empty or not printable ASCII. [`try_with_name`](Self::try_with_name)
    /// returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn with_name(self, name: impl Into<String>) -> Self {
        or_panic(self.try_with_name(name))
    }

    /// Like [`with_name`](Self::with_name), but returns an error instead of panicking.
    ///
    /// # Errors
    ///
    /// Returns an error if the name is empty or not printable ASCII.
    pub fn try_with_name(self, name: impl Into<String>) -> Result<Self, ConfigError> {
        self.0.try_with_name(name).map(Self)
    }

    /// Returns the number of slots.
    pub fn number(&self) -> u32 {
        number_of_slots(&self.0)
    }
}

/// Returns the number of slots of a policy that was made from [`Slots`].
#[inline]
pub(super) fn number_of_slots(policy: &Policy) -> u32 {
    policy.limits().first().map_or(0, Limit::capacity)
}

impl From<u32> for Slots {
    fn from(slots: u32) -> Self {
        Self::new(slots)
    }
}

impl fmt::Debug for Slots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slots({})", self.0)
    }
}

/// [`Slots`] whose number can be changed while the program runs. Layers follow its changes. Clones are
/// handles to the same slots.
///
/// A change takes effect from the next request. If the number is lowered, the requests in flight
/// keep their slots, and new requests are refused until enough others have ended.
///
/// ```
/// use tower_ratelimit::{InFlightLayer, LiveSlots, PeerIp};
///
/// let live = LiveSlots::new(20);
/// let layer = InFlightLayer::new(live.clone(), PeerIp::new());
/// live.set(10);
/// assert_eq!(live.get().number(), 10);
/// ```
#[derive(Clone, Debug)]
pub struct LiveSlots(LivePolicy);

impl LiveSlots {
    /// Creates live slots whose number is that of `slots`.
    pub fn new(slots: impl Into<Slots>) -> Self {
        Self(LivePolicy::new(slots.into().0))
    }

    /// Returns the current slots.
    pub fn get(&self) -> Slots {
        Slots(self.0.get())
    }

    /// Replaces the slots. Keep the name, because slots with another name have other counts.
    pub fn set(&self, slots: impl Into<Slots>) {
        // Layers register no validation, because every storage supports every number.
        or_panic(self.0.set(slots.into().0));
    }
}

/// The source of the [`Slots`] of each request: a fixed number, [`LiveSlots`], or the closure of
/// [`slots_by`].
///
/// A `u32`, [`Slots`] and [`LiveSlots`] convert into a `SlotsSource`.
#[derive(Clone, Debug)]
pub struct SlotsSource(pub(super) PolicySource);

impl From<u32> for SlotsSource {
    fn from(slots: u32) -> Self {
        Slots::new(slots).into()
    }
}

impl From<Slots> for SlotsSource {
    fn from(slots: Slots) -> Self {
        Self(slots.0.into_policy_source())
    }
}

impl From<LiveSlots> for SlotsSource {
    fn from(slots: LiveSlots) -> Self {
        Self(slots.0.into_policy_source())
    }
}

/// Chooses the slots of each request by its head, for example for tiers or tenants.
///
/// The closure returns [`Slots`] or an `Option<Slots>`. `None` means that the request is not
/// limited. Create the slots once and clone them, which is cheap.
///
/// ```
/// use tower_ratelimit::extract::{Extension, Head};
/// use tower_ratelimit::{InFlightLayer, Key, Slots, slots_by};
///
/// /// Inserted into the extensions by the authentication layer.
/// #[derive(Clone)]
/// struct User {
///     id: u64,
///     has_paid: bool,
/// }
///
/// let (free, paid) = (Slots::new(2), Slots::new(20));
/// let tier = move |head: &Head<'_>| {
///     let has_paid = head.extensions.get::<User>().is_some_and(|user| user.has_paid);
///     if has_paid { paid.clone() } else { free.clone() }
/// };
/// let layer = InFlightLayer::new(slots_by(tier), Extension::new(|user: &User| Key::from(user.id)));
/// ```
pub fn slots_by<F, T>(choose: F) -> SlotsSource
where
    F: Fn(&Head<'_>) -> T + Send + Sync + 'static,
    T: Into<Option<Slots>>,
{
    SlotsSource(policy_by(move |head: &Head<'_>| choose(head).into().map(|slots| slots.0)))
}
