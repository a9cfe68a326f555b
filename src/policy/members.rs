//! Decisions of several policies that are made together, each for a key of its own.

use super::{Op, Policy};
use crate::decision::Decision;
use crate::strategy::State;
use crate::time::Timestamp;

/// One of several policies that are decided together: the policy, the states of its key, and the
/// operation. [`Policy::decide_all`] takes several members.
#[derive(Debug)]
#[expect(clippy::exhaustive_structs, reason = "a storage fills in every field")]
pub struct Member<'a> {
    /// The policy whose limits apply.
    pub policy: &'a Policy,
    /// The states of the limits, as for [`Policy::decide`].
    pub states: &'a mut [State],
    /// The time of the decision. Members may have different times, because a storage may keep a
    /// time for each key.
    pub now: Timestamp,
    /// The operation.
    pub op: Op,
    /// The number of units to spend.
    pub cost: u32,
}

impl Member<'_> {
    /// Returns `false` if this member is a hit that its policy refuses.
    pub(crate) fn admits(&self) -> bool {
        let Self { policy, ref states, now, op, cost } = *self;
        op != Op::Hit || policy.admits(states, now, cost)
    }

    /// Decides this member. If `all_admit` is `false`, another member may refuse, so a hit that this
    /// member admits only peeks.
    pub(crate) fn decide(&mut self, all_admit: bool) -> Decision {
        let op = if self.op == Op::Hit && !all_admit && self.admits() { Op::Peek } else { self.op };
        self.policy.decide(self.states, self.now, op, self.cost)
    }
}

impl Policy {
    /// Decides several policies together: all hits spend, or none does. A storage calls this
    /// function in [`Storage::decide_all`](crate::Storage::decide_all), between loading and storing
    /// the states of all keys. Returns the decisions in the order of the members.
    ///
    /// | verdicts of the policies | effect |
    /// |---|---|
    /// | all hits are admitted | each hit spends its cost, as [`decide`](Self::decide) does |
    /// | at least one hit is refused | these hits are refused as by `decide`. The states of the other hits do not change, and their decisions are those of a peek |
    ///
    /// Peeks and charges of other members neither refuse a hit nor depend on one.
    ///
    /// ```
    /// use tower_ratelimit::storage::Member;
    /// use tower_ratelimit::strategy::State;
    /// use tower_ratelimit::{Op, Policy, Timestamp};
    ///
    /// let (user, tenant): (Policy, Policy) = ("fixed-window 5/minute".parse()?, "fixed-window 1/minute".parse()?);
    /// let now = Timestamp::from_micros(1_000_000);
    /// let (mut of_user, mut of_tenant) = ([State::Fresh], [State::Fresh]);
    /// let mut hit = || {
    ///     let user = Member { policy: &user, states: &mut of_user, now, op: Op::Hit, cost: 1 };
    ///     let tenant = Member { policy: &tenant, states: &mut of_tenant, now, op: Op::Hit, cost: 1 };
    ///     let decisions = Policy::decide_all(&mut [user, tenant]);
    ///     decisions.iter().map(|decision| (decision.is_admitted(), decision.remaining())).collect::<Vec<_>>()
    /// };
    /// assert_eq!(hit(), [(true, 4), (true, 0)]);
    /// // The tenant refuses, so the user has spent nothing.
    /// assert_eq!(hit(), [(true, 4), (false, 0)]);
    /// # Ok::<(), tower_ratelimit::ConfigError>(())
    /// ```
    ///
    /// # Panics
    ///
    /// Panics if the number of states of a member differs from the number of its limits.
    pub fn decide_all(members: &mut [Member<'_>]) -> Vec<Decision> {
        let all_admit = members.iter().all(Member::admits);
        members.iter_mut().map(|member| member.decide(all_admit)).collect()
    }
}
