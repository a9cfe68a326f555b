//! The units of a slice, and the share of a slice that may be leased.

use crate::decision::Decision;
use crate::key::Key;
use crate::policy::{Limit, Policy};
use crate::strategy::{State, Status};
use crate::time::Timestamp;

/// Units that the storage has admitted, and that this process spends until the lease ends.
#[derive(Debug)]
pub(super) struct Lease {
    pub(super) policy: Policy,
    pub(super) key: Key,
    /// The decision on the whole slice.
    slice: Decision,
    pub(super) unspent: u32,
    /// The local time at which the slice was requested. The storage has decided at this time or
    /// later, so that a lease never ends too late.
    sent: Timestamp,
    end: Timestamp,
    /// For each limit, the time in which it refills the units of the slice. It is zero for windows.
    refills: Vec<u64>,
}

impl Lease {
    /// Creates a lease of `micros` microseconds from a slice that was requested at `sent`. It ends
    /// earlier with a window, in which the storage forgets all units at the same time.
    pub(super) fn new(policy: &Policy, key: &Key, slice: Decision, sent: Timestamp, micros: u64) -> Self {
        let refills: Vec<_> = policy.limits().iter().map(|limit| refill(limit, slice.at(), slice.cost())).collect();
        let limits = policy.limits().iter().zip(slice.statuses());
        let windows = limits.zip(&refills).filter(|(_, refill)| **refill == 0);
        let end = windows.map(|((limit, status), _)| window_left(limit, status, slice.at())).fold(micros, u64::min);
        let (policy, key, unspent) = (policy.clone(), key.clone(), slice.cost());
        Self { policy, key, slice, unspent, sent, end: sent.plus(end), refills }
    }

    /// Returns the microseconds until the lease ends, or `None` if it has ended. A clock that goes
    /// back ends it.
    pub(super) fn time_left(&self, now: Timestamp) -> Option<u64> {
        (self.sent <= now && now < self.end).then(|| self.end.since(now))
    }

    /// Spends units if there are enough. The caller checks that the lease has not ended.
    pub(super) fn take(&mut self, cost: u32) -> Option<Decision> {
        self.unspent = self.unspent.checked_sub(cost)?;
        Some(self.part(cost))
    }

    /// Spends units if there are enough, for a charge, which is not refundable.
    pub(super) fn charge(&mut self, units: u32) -> Option<Decision> {
        let mut charged = self.take(units)?;
        charged.statuses_mut().iter_mut().for_each(|status| *status = status.spent(Timestamp::EPOCH, 0));
        Some(charged)
    }

    /// Returns the decision on units of this slice, which are part of the slice's hit. The unspent
    /// units count as remaining.
    fn part(&self, cost: u32) -> Decision {
        let mut part = self.slice.clone().of_cost(cost);
        for (status, refill) in part.statuses_mut().iter_mut().zip(&self.refills) {
            // A bucket refills the units that are spent first before the unspent ones.
            let behind = u128::from(*refill) * u128::from(self.unspent) / u128::from(self.slice.cost().max(1));
            #[allow(clippy::cast_possible_truncation, reason = "at most the refill time of the slice")]
            let until = status.until().minus(behind as u64);
            *status = with_unspent(status, self.unspent).spent(until, anchor(status));
        }
        part
    }

    /// Puts units of a hit back. Returns `false` if the hit was not part of this slice.
    pub(super) fn put_back(&mut self, hit: &Decision, units: u32) -> bool {
        let unspent = self.unspent.saturating_add(units);
        let is_part = hit.at() == self.slice.at()
            && hit.statuses().iter().map(anchor).eq(self.slice.statuses().iter().map(anchor));
        let fits = is_part && unspent <= self.slice.cost();
        if fits {
            self.unspent = unspent;
        }
        fits
    }

    /// Returns the hit of the whole slice and its actual cost, for a settlement that refunds the
    /// unspent units. Returns `None` if there are none, or if the storage has forgotten them.
    ///
    /// A bucket has refilled a part of the slice since. The hit expires when an idle bucket would
    /// have refilled all of it, so a refund never includes units that the bucket has refilled.
    pub(super) fn leftover(&self, now: Timestamp) -> Option<(Decision, u32)> {
        let mut hit = self.slice.clone();
        for (status, refill) in hit.statuses_mut().iter_mut().zip(&self.refills) {
            let until = if *refill > 0 { status.until().min(self.slice.at().plus(*refill)) } else { status.until() };
            *status = status.spent(until, anchor(status));
        }
        let owed = hit.at().plus(now.since(self.sent));
        let has_expired = hit.statuses().iter().all(|status| status.until() <= owed);
        (self.unspent > 0 && !has_expired).then(|| (hit, self.slice.cost() - self.unspent))
    }
}

/// Returns the time in microseconds until the window of a slice ends. A node whose clock is behind
/// states `at` by its own clock, but not the end of the window, so their difference can be too long.
fn window_left(limit: &Limit, status: &Status, at: Timestamp) -> u64 {
    let longest = if limit.is_fixed_window() { status.reset_after_micros() } else { limit.quota().period_micros() };
    status.until().since(at).min(longest)
}

/// Returns the mark of the window or bucket in which a hit was spent.
fn anchor(status: &Status) -> u32 {
    status.hit(Timestamp::EPOCH, 0).anchor
}

/// Returns the status with units that a process has leased and not spent.
pub(super) fn with_unspent(status: &Status, unspent: u32) -> Status {
    let remaining = status.remaining().saturating_add(unspent).min(status.capacity());
    let reset = if remaining == status.capacity() { 0 } else { status.reset_after_micros() };
    Status::admitted(status.capacity(), remaining, reset)
}

/// Returns the time in microseconds that the limit takes to refill `units`, or zero if all units of a
/// window become available at the same time: the time by which they move the instant at which the
/// state of a key with another unit is forgotten.
pub(super) fn refill(limit: &Limit, at: Timestamp, units: u32) -> u64 {
    let forgotten = |units: u32| {
        let mut state = State::Fresh;
        limit.strategy().charge(limit.quota(), &mut state, at, units);
        state.until()
    };
    forgotten(units.saturating_add(1)).since(forgotten(1))
}
