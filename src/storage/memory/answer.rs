//! The kinds of results of a request, and how they are written.

use crate::decision;
use crate::decision::Decision;
use crate::policy::Limit;
use crate::storage::{StorageRequest, Summary};
use crate::strategy::{Outcome, State, Status};
use crate::time::Timestamp;

/// The kind of result that a caller needs. It determines which hits are stored.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// A full decision. The hit is always stored.
    Decision,
    /// A `bool`, which is `true` if the hit is admitted without a delay. A delayed hit is not
    /// stored.
    Admit,
    /// Like `Admit`, but a refused hit is not stored either, because the caller then requests a
    /// full decision, unless it gets the summary of a refusal that changes nothing.
    TryAdmit,
}

impl Mode {
    /// Returns `true` if a hit with this outcome is stored.
    #[inline]
    pub(super) fn stores(self, refused: bool, delayed: bool) -> bool {
        match self {
            Self::Decision => true,
            Self::Admit => !delayed,
            Self::TryAdmit => !refused && !delayed,
        }
    }
}

/// A request at the instant of its decision.
#[derive(Clone, Copy)]
pub(super) struct Asked<'a> {
    pub(super) request: &'a StorageRequest<'a>,
    pub(super) now: Timestamp,
}

impl Asked<'_> {
    #[inline(always)]
    fn write_status(self, limit: &Limit, state: &State, outcome: Option<Outcome>, status: &mut Status) {
        limit.write_status(state, self.now, self.request.cost, outcome, status);
    }
}

/// Builds the result of a request. The code that decides is generic over this trait, so a caller
/// that needs only a `bool` does not pay for a [`Decision`].
pub(super) trait Answer {
    type Output;

    fn mode(&self) -> Mode;

    /// Returns the result of a refusal, based on a state that the shard has published. Returns
    /// `None` if the state does not refuse the request any more. `state` is a copy that this method
    /// may change.
    fn refuse_again(&mut self, asked: Asked<'_>, limit: &Limit, state: &mut State) -> Option<Self::Output>;

    /// Leaves the summary blank, because a hit was not stored that changes the states. The caller then
    /// requests a full decision, which is stored.
    fn leave_blank(&mut self) {}

    /// Returns the result of a decision on `N` limits. `states` are their states after the
    /// decision, and `effects` are the effects of a hit on them, or `None` for a peek.
    fn by_states<const N: usize>(
        self,
        asked: Asked<'_>,
        states: &[State; N],
        effects: [Option<Outcome>; N],
    ) -> Self::Output;

    /// Returns the result for a new key that is refused because the storage is full. `soonest` is
    /// the time in microseconds until there may be room.
    fn storage_full(self, asked: Asked<'_>, soonest: u64) -> Self::Output;

    /// Converts a decision to the result.
    fn by_decision(self, decision: Decision) -> Self::Output;
}

/// An answer that writes a full [`Decision`]: in place, because decisions are large.
pub(super) struct DecisionAnswer<'a>(pub(super) &'a mut Decision);

impl Answer for DecisionAnswer<'_> {
    type Output = ();

    #[inline(always)]
    fn mode(&self) -> Mode {
        Mode::Decision
    }

    #[inline(always)]
    fn refuse_again(&mut self, asked: Asked<'_>, limit: &Limit, state: &mut State) -> Option<()> {
        let status = &mut self.0.open(1, asked.request.cost)[0];
        asked.write_status(limit, state, None, status);
        if status.is_admitted() {
            return None;
        }
        self.0.conclude(asked.now);
        Some(())
    }

    #[inline(always)]
    fn by_states<const N: usize>(self, asked: Asked<'_>, states: &[State; N], effects: [Option<Outcome>; N]) {
        write_statuses(asked, states, effects, self.0.open(N, asked.request.cost));
        self.0.conclude(asked.now);
    }

    fn storage_full(self, asked: Asked<'_>, soonest: u64) {
        *self.0 = asked.request.policy.refusal(asked.now, asked.request.cost, soonest).storage_full();
    }

    fn by_decision(self, decision: Decision) {
        *self.0 = decision;
    }
}

/// An answer that returns `true` if the hit is admitted without a delay. It then writes the summary
/// if the caller needs one. With a single limit, it also writes the summary of a refusal that changes
/// no state.
pub(super) struct AdmitAnswer<'a> {
    pub(super) mode: Mode,
    pub(super) summary: Option<&'a mut Summary>,
}

impl Answer for AdmitAnswer<'_> {
    type Output = bool;

    #[inline(always)]
    fn mode(&self) -> Mode {
        self.mode
    }

    #[inline(always)]
    fn refuse_again(&mut self, asked: Asked<'_>, limit: &Limit, state: &mut State) -> Option<bool> {
        let is_refused = if let Some(summary) = &mut self.summary {
            summary.at = asked.now;
            asked.write_status(limit, state, None, &mut summary.limit);
            !summary.limit.is_admitted()
        } else {
            // A hit on the copy is cheaper than the computation of a status.
            let cost = asked.request.cost;
            cost > 0 && limit.hit(state, asked.now, cost) == Outcome::Refused
        };
        is_refused.then_some(false)
    }

    fn leave_blank(&mut self) {
        self.summary = None;
    }

    #[inline(always)]
    fn by_states<const N: usize>(self, asked: Asked<'_>, states: &[State; N], effects: [Option<Outcome>; N]) -> bool {
        let is_admitted = effects.iter().flatten().all(Outcome::is_at_once);
        if (is_admitted || N == 1)
            && let Some(summary) = self.summary
        {
            summary.at = asked.now;
            if N == 1 {
                asked.write_status(&asked.request.policy.limits()[0], &states[0], effects[0], &mut summary.limit);
            } else {
                let mut statuses = [Status::BLANK; N];
                write_statuses(asked, states, effects, &mut statuses);
                summary.limit = *decision::shown(&statuses);
            }
        }
        is_admitted
    }

    fn storage_full(self, _: Asked<'_>, _: u64) -> bool {
        false
    }

    fn by_decision(self, decision: Decision) -> bool {
        // If the storage is full, the summary stays blank. Then the caller calls `decide`, which
        // counts the refusal.
        if let Some(summary) = self.summary.filter(|_| !decision.is_storage_full()) {
            *summary = Summary { at: decision.at(), limit: *decision.shown() };
        }
        decision.is_at_once()
    }
}

/// Writes the status of each limit.
#[inline(always)]
fn write_statuses<const N: usize>(
    asked: Asked<'_>,
    states: &[State; N],
    effects: [Option<Outcome>; N],
    statuses: &mut [Status],
) {
    let limits = array_of::<N, _>(asked.request.policy.limits());
    for i in 0..N {
        asked.write_status(&limits[i], &states[i], effects[i], &mut statuses[i]);
    }
}

/// Converts a slice with one element per limit to an array.
#[inline(always)]
pub(super) fn array_of<const N: usize, T>(slice: &[T]) -> &[T; N] {
    slice.try_into().expect("one element per limit")
}
