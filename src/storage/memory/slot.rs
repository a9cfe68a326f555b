use crate::policy::SHADOW;
use crate::strategy::{Outcome, Part, State, Status};
use crate::{Limit, Timestamp};

/// One state of one key. Vacant when `until` is the epoch: such a state says nothing.
///
/// What a strategy writes one after the other does not stand side by side here: the compiler would move it in one piece,
/// and a piece of what was written in parts a moment ago has to wait until the parts have arrived in the cache.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Slot {
    pub(super) hash: u64,
    /// The first amount of the state; if it is a log, where that is.
    pub(super) first: u32,
    /// The rest of the key's hash, mixed with which limit this is the state of.
    pub(super) limit: u32,
    pub(super) until: Timestamp,
    /// The second amount.
    pub(super) second: u32,
    /// How long before `until` a hit would be admitted again, in microseconds rounded down.
    pub(super) admits_before: f32,
}

impl Slot {
    pub(super) fn new(hash: u64, limit: u32, until: Timestamp) -> Self {
        Self { hash, first: 0, limit, until, second: 0, admits_before: f32::INFINITY }
    }

    /// The small state in this slot.
    #[inline]
    pub(super) fn state(&self) -> State {
        State::Counts { until: self.until, amounts: [self.first, self.second] }
    }

    /// Takes over the state of another slot of the same limit: piece by piece, for it was written so.
    #[inline]
    pub(super) fn copy_state(&mut self, of: &Self) {
        (self.until, self.first, self.second, self.admits_before) = (of.until, of.first, of.second, of.admits_before);
    }

    /// Writes a small state. Whether that could be done: what is forgotten is to be removed, and a log stands elsewhere.
    #[inline]
    pub(super) fn update(&mut self, state: &State, now: Timestamp, limit: &Limit, part: Part) -> bool {
        let State::Counts { until, amounts: [first, second] } = *state else { return false };
        if until <= now {
            return false;
        }
        match part {
            None => return true,
            Some(Outcome::Spent { .. }) => self.admits_before = f32::INFINITY,
            // It is known for how long it refuses: unless the quota has changed since it last spent.
            Some(Outcome::Refused) if self.refuses(state) => return true,
            Some(Outcome::SpentLast { .. } | Outcome::Refused) => {
                self.say(until, now, &limit.check(state, now, 1));
            }
        }
        (self.until, self.first, self.second) = (until, first, second);
        true
    }

    /// Takes note of what was said of its state, which is forgotten at `until`. What is only tried out refuses nobody.
    #[inline]
    pub(super) fn say(&mut self, until: Timestamp, now: Timestamp, said: &Status) {
        let refuses_nobody = self.limit & SHADOW != 0;
        self.admits_before = if refuses_nobody { f32::INFINITY } else { Self::admits_before(until, now, said) };
    }

    /// How long before it is forgotten a state of which this was said admits one unit again, rounded down to what an `f32`
    /// can say: rather said to refuse a little too long than to be evicted while it does.
    #[inline]
    fn admits_before(until: Timestamp, now: Timestamp, said: &Status) -> f32 {
        if said.remaining() > 0 {
            return f32::INFINITY;
        }
        #[allow(clippy::cast_precision_loss)] // what is lost is rounded down
        let before = until.since(now).saturating_sub(said.reset_after_micros()) as f32;
        before.next_down().max(0.0)
    }

    /// Whether it holds this state, which has nothing left to spend.
    #[inline]
    pub(super) fn refuses(&self, state: &State) -> bool {
        self.admits_before < f32::INFINITY && self.state() == *state
    }

    #[inline]
    pub(super) fn is_vacant(&self) -> bool {
        self.until == Timestamp::EPOCH
    }

    #[inline]
    pub(super) fn is_expired(&self, now: Timestamp) -> bool {
        self.until <= now
    }

    /// From when on it may make room for others: at once, if its limit is only tried out.
    #[inline]
    pub(super) fn makes_room_from(&self) -> Timestamp {
        if self.limit & SHADOW != 0 { Timestamp::EPOCH } else { self.until }
    }

    /// How long until a hit is admitted, 0 when it would be now.
    #[inline]
    pub(super) fn refuses_for(&self, now: Timestamp) -> u64 {
        if self.admits_before == f32::INFINITY {
            return 0;
        }
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // saturates, and is never negative
        let admits_before = self.admits_before as u64;
        self.until.since(now).saturating_sub(admits_before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_how_long_it_refuses() {
        let (now, until) = (Timestamp::from_micros(1_000), Timestamp::from_micros(1_500));
        let full_until_the_end = Slot { until, ..Slot::default() };
        assert_eq!(full_until_the_end.refuses_for(now), 500);
        assert_eq!(Slot { admits_before: 100.0, ..full_until_the_end }.refuses_for(now), 400);
        assert_eq!(Slot { admits_before: f32::INFINITY, ..full_until_the_end }.refuses_for(now), 0);
    }
}
