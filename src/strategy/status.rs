//! The numbers of a limit after a decision: for responses, for settlements, and for locks.

use std::fmt;
use std::time::Duration;

use super::State;
use crate::time::Timestamp;

/// The `retry_after` of a hit that can never be admitted.
const NEVER: u64 = u64::MAX;

/// The result of a hit or peek for one limit: the admission or refusal, the remaining units, and
/// the times until a retry and a reset. See [`Decision::statuses`](crate::Decision::statuses).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    flags: StatusFlags,
    capacity: u32,
    remaining: u32,
    anchor: u32,
    reset_after: u64,
    /// The delay of an admitted hit, or the `retry_after` of a refused one, in microseconds.
    wait: u64,
    until: Timestamp,
}

/// Flags, 32 bits wide, so that a status has no padding, which makes copies faster.
#[derive(Clone, Copy, PartialEq, Eq)]
struct StatusFlags(u32);

impl StatusFlags {
    const ADMITTED: Self = Self(0);
    const REFUSED: Self = Self(1);
    /// The units of the limit do not count in the decision.
    const UNCOUNTED: Self = Self(1 << 1);
    /// A lockout is locked. The anchor contains its level.
    const LOCKED: Self = Self(1 << 2);
    /// The decision has started the lock.
    const NEW_LOCK: Self = Self(1 << 3);

    const fn has(self, flag: Self) -> bool {
        self.0 & flag.0 != 0
    }

    const fn with(self, flag: Self) -> Self {
        Self(self.0 | flag.0)
    }
}

impl fmt::Debug for StatusFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.has(Self::REFUSED) { "Refused" } else { "Admitted" })?;
        f.write_str(if self.has(Self::LOCKED) { ", locked" } else { "" })
    }
}

impl Status {
    /// A placeholder to be overwritten.
    pub(crate) const BLANK: Self = Self::admitted(0, 0, 0);

    /// Creates the status of a limit that admits. `capacity` and `remaining` are in units.
    /// `reset_after` is the time in microseconds until more units remain, or 0 if the whole
    /// capacity remains.
    #[inline]
    pub const fn admitted(capacity: u32, remaining: u32, reset_after: u64) -> Self {
        let (until, anchor) = (Timestamp::EPOCH, 0);
        Self { flags: StatusFlags::ADMITTED, capacity, remaining, anchor, reset_after, wait: 0, until }
    }

    /// Creates the status of a limit that refuses. The first three values are as in
    /// [`admitted`](Self::admitted). `retry_after` is the time in microseconds until the same hit
    /// would be admitted if the key gets no other hits, or `None` if the hit can never be admitted.
    #[inline]
    pub const fn refused(capacity: u32, remaining: u32, reset_after: u64, retry_after: Option<u64>) -> Self {
        let wait = match retry_after {
            Some(wait) => wait,
            None => NEVER,
        };
        let (until, anchor) = (Timestamp::EPOCH, 0);
        Self { flags: StatusFlags::REFUSED, capacity, remaining, anchor, reset_after, wait, until }
    }

    /// Marks the units of this limit as not counted in the decision. If another limit refuses the hit,
    /// the `retry_after` of the decision is at least `wait` microseconds.
    pub(super) const fn uncounted(self, wait: u64) -> Self {
        Self { flags: self.flags.with(StatusFlags::UNCOUNTED), wait, ..self }
    }

    /// Marks this limit as locked. `mark` is the second amount of the state.
    pub(super) const fn locked(self, mark: u32) -> Self {
        Self { flags: self.flags.with(StatusFlags::LOCKED), anchor: mark, ..self }
    }

    /// Returns the status of the next hit, if this decision has started the lock by refusing a hit:
    /// the lock refuses it.
    pub(crate) const fn of_next_hit(self) -> Self {
        if !self.flags.has(StatusFlags::NEW_LOCK) {
            return self;
        }
        let flags = StatusFlags(self.flags.0 & !StatusFlags::NEW_LOCK.0);
        Self { flags: flags.with(StatusFlags::REFUSED), ..self }
    }

    /// Sets the lock to that of another status, which had it before. Its units count in the decision
    /// if those of the other status do.
    pub(crate) const fn with_lock_of(self, other: &Self) -> Self {
        let flags = other.flags.0 & (StatusFlags::LOCKED.0 | StatusFlags::UNCOUNTED.0);
        if flags == 0 {
            self
        } else {
            Self { flags: self.flags.with(StatusFlags(flags)), anchor: other.anchor, ..self }
        }
    }

    /// Marks the lock of this limit as started by this decision.
    pub(super) const fn newly_locked(self) -> Self {
        Self { flags: self.flags.with(StatusFlags::NEW_LOCK), ..self }
    }

    /// Sets the delay of an admitted hit, in microseconds. Do not call it on the status of a limit
    /// that refuses, because it would replace the `retry_after`.
    #[must_use]
    #[inline]
    pub const fn delayed(self, delay: u64) -> Self {
        Self { wait: delay, ..self }
    }

    /// Sets the data that a refund of this admitted hit needs: [`Hit::until`] and [`Hit::anchor`].
    /// Call it only in a storage that builds a `Status` from the reply of its server and has no
    /// [`State`]. Otherwise, [`Limit::status`](crate::Limit::status) sets the data.
    #[must_use]
    pub const fn spent(self, until: Timestamp, anchor: u32) -> Self {
        Self { anchor, until, ..self }
    }

    /// Sets the delay of an admitted hit, and the data of its state that a refund needs.
    #[inline]
    pub(crate) fn set_spent(&mut self, delay: u64, state: &State) {
        if self.flags.has(StatusFlags::UNCOUNTED) {
            return;
        }
        if self.flags.has(StatusFlags::LOCKED) {
            *self = self.newly_locked();
        }
        self.wait = delay;
        self.until = state.until();
        self.anchor = match *state {
            State::Counts { amounts: [_, anchor], .. } => anchor,
            State::Fresh | State::Log(_) => 0,
        };
    }

    /// Adds `micros` microseconds to the `retry_after` of a refusal, if it has one.
    pub(crate) fn lengthen_wait(&mut self, micros: u64) {
        if self.has_retry() {
            self.wait = self.wait.saturating_add(micros).min(NEVER - 1);
        }
    }

    /// Returns `true` if the `retry_after` of a refusal depends on the wait of this limit, which
    /// may have admitted the hit and started a lock.
    const fn has_retry(&self) -> bool {
        let is_new_lock = self.flags.has(StatusFlags::UNCOUNTED) && self.wait > 0;
        (self.flags.has(StatusFlags::REFUSED) || is_new_lock) && self.wait != NEVER
    }

    /// Subtracts `micros` microseconds from `reset_after` and `retry_after`, as if nothing else was
    /// decided since. A time that would fall to zero becomes 1 microsecond.
    pub(crate) fn pass(&mut self, micros: u64) {
        if self.reset_after > 0 {
            self.reset_after = self.reset_after.saturating_sub(micros).max(1);
        }
        if self.has_retry() {
            self.wait = self.wait.saturating_sub(micros).max(1);
        }
    }

    /// Turns an admission into a refusal if its delay exceeds `max_delay` microseconds. The excess
    /// becomes its `retry_after`. The hit cannot be refunded any more, even if it stays admitted.
    pub(crate) fn refuse_delay(&mut self, max_delay: u64) {
        let excess = self.delay_micros().saturating_sub(max_delay);
        // The hit has no lock, because it is refunded.
        let flags = StatusFlags(self.flags.0 & StatusFlags::UNCOUNTED.0);
        let flags = if excess > 0 { flags.with(StatusFlags::REFUSED) } else { flags };
        *self = Self { flags, wait: excess, until: Timestamp::EPOCH, ..*self };
    }

    /// Turns an admission into a refusal with a `retry_after` of 1 microsecond.
    pub(crate) fn refuse_turn(&mut self) {
        let flags = self.flags.with(StatusFlags::REFUSED);
        *self = Self { flags, wait: 1, until: Timestamp::EPOCH, ..*self };
    }

    /// Returns `true` if this limit admits. Another limit of the policy may refuse.
    #[inline]
    pub const fn is_admitted(&self) -> bool {
        !self.flags.has(StatusFlags::REFUSED)
    }

    /// Returns the lock if this limit is a [`Lockout`](crate::Lockout) that is locked after this
    /// decision.
    pub const fn lock(&self) -> Option<Lock> {
        if !self.flags.has(StatusFlags::LOCKED) {
            return None;
        }
        Some(Lock::new(level(self.anchor), self.reset_after, self.flags.has(StatusFlags::NEW_LOCK)))
    }

    /// Returns `true` if the units of this limit count in the decision. Those of a lockout by
    /// refusals count only while it is locked.
    #[inline]
    pub(crate) const fn is_counted(&self) -> bool {
        !self.flags.has(StatusFlags::UNCOUNTED) || self.flags.has(StatusFlags::LOCKED)
    }

    /// Returns the remaining units that count in the decision.
    #[inline]
    pub(crate) const fn counted_remaining(&self) -> u32 {
        if self.is_counted() { self.remaining } else { u32::MAX }
    }

    /// Returns the capacity that counts in the decision.
    #[inline]
    pub(crate) const fn counted_capacity(&self) -> u32 {
        if self.flags.has(StatusFlags::UNCOUNTED) { u32::MAX } else { self.capacity }
    }

    /// Returns the number of units that can be spent at one instant if nothing has been spent.
    #[inline]
    pub const fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Returns the number of units that can be spent after this decision, at the same instant.
    #[inline]
    pub const fn remaining(&self) -> u32 {
        self.remaining
    }

    /// Returns the time until more units remain if the key gets no other hits, or zero if the whole
    /// capacity remains.
    pub const fn reset_after(&self) -> Duration {
        Duration::from_micros(self.reset_after)
    }

    /// Returns the time until this limit would admit a refused hit if the key gets no other hits.
    /// Returns `None` if this limit admits the hit, or if the hit can never be admitted, because its
    /// cost exceeds the capacity minus the units that the limit [keeps](crate::Limit::keep).
    pub const fn retry_after(&self) -> Option<Duration> {
        match self.wait {
            NEVER => None,
            _ if self.is_admitted() => None,
            wait => Some(Duration::from_micros(wait)),
        }
    }

    /// Returns the delay of an admitted hit, or zero for a refused hit. Of the built-in strategies,
    /// only the leaky bucket delays hits.
    pub const fn delay(&self) -> Duration {
        Duration::from_micros(self.delay_micros())
    }

    /// Returns [`reset_after`](Self::reset_after) in microseconds.
    #[inline]
    pub const fn reset_after_micros(&self) -> u64 {
        self.reset_after
    }

    pub(crate) const fn delay_micros(&self) -> u64 {
        if self.flags.has(StatusFlags::REFUSED.with(StatusFlags::UNCOUNTED)) { 0 } else { self.wait }
    }

    /// Returns the microseconds until a refused hit would be admitted, `u64::MAX` for never, or 0
    /// if it was admitted.
    pub(crate) const fn retry_micros(&self) -> u64 {
        if self.flags.has(StatusFlags::REFUSED.with(StatusFlags::UNCOUNTED)) { self.wait } else { 0 }
    }

    /// Returns the instant at which a spent hit expires. It is the epoch if nothing was spent.
    pub(crate) const fn until(&self) -> Timestamp {
        self.until
    }

    /// Returns the data that [`Strategy::refund`](super::Strategy::refund) needs to refund this
    /// hit. `at` and `cost` are the time and the cost of its decision.
    pub const fn hit(&self, at: Timestamp, cost: u32) -> Hit {
        Hit { at, cost, until: self.until, anchor: self.anchor }
    }
}

/// The data of an admitted hit that one limit needs to refund its units, in part or in full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Hit {
    /// The instant at which the hit was admitted.
    pub at: Timestamp,
    /// The cost of the hit in units.
    pub cost: u32,
    /// The instant from which the hit has no effect: [`State::until`] of the state after the hit.
    /// It is the epoch if the hit has spent nothing.
    pub until: Timestamp,
    /// The second amount of the state after the hit, or 0 for a log. Strategies use it to detect
    /// that the state no longer contains the hit, because another window has started.
    pub anchor: u32,
}

/// The position of a lockout's level in the second amount of its state. The run is in the bits below.
pub(super) const LEVEL_SHIFT: u32 = 24;

/// The highest level of a lockout. The locks of a factor of 2 or more reach the longest lock earlier.
pub(super) const MAX_LEVEL: u32 = (1 << 6) - 1;

/// A lock of a [`Lockout`](crate::Lockout). See [`Status::lock`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lock {
    level: u32,
    ends_after: u64,
    is_new: bool,
}

impl Lock {
    const fn new(level: u32, ends_after: u64, is_new: bool) -> Self {
        Self { level, ends_after, is_new }
    }

    /// Returns the level of the lock: the number of earlier locks of the key that are not
    /// forgotten. It is 0 for the first lock. It does not rise after a lock of the longest
    /// duration, so it is always 0 without [escalation](crate::Lockout::escalating). It is at most
    /// 63.
    pub const fn level(&self) -> u32 {
        self.level
    }

    /// Returns the time from the decision to the end of the lock.
    pub const fn ends_after(&self) -> Duration {
        Duration::from_micros(self.ends_after)
    }

    /// Returns `true` if the hit of this decision has started the lock. Returns `false` for the
    /// decision on a charge.
    pub const fn is_new(&self) -> bool {
        self.is_new
    }
}

/// Returns the level in the second amount of a state.
pub(super) const fn level(mark: u32) -> u32 {
    mark >> LEVEL_SHIFT & MAX_LEVEL
}
