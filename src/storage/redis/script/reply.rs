//! The decision in the reply of a script.

use redis::Value;

use super::super::record;
use super::call::{Call, CallMember, ReplyPart};
use crate::decision::Decision;
use crate::policy::{Limit, Op};
use crate::storage::{StorageError, StorageRequest};
use crate::strategy::{Outcome, Status};
use crate::time::Timestamp;

/// The byte of a hit that its own limits admit, while those of another key refuse it. The hit has only
/// peeked.
const ADMITTED_ALONE: u8 = 2;

impl ReplyPart {
    /// Returns the size of the values in bytes. Each is a big-endian number of 8 bytes. `is_spent`
    /// is `true` after a hit that was admitted.
    fn size(self, is_spent: bool) -> usize {
        match self {
            Self::Delay => 8,
            Self::Log if !is_spent => 24,
            Self::Nothing | Self::Log => 0,
        }
    }
}

impl Call {
    /// Returns the decision in a script's reply, or `None` if the reply is malformed or inconsistent.
    pub(in super::super) fn decision(&self, request: StorageRequest<'_>, reply: &Value) -> Option<Decision> {
        let Value::BulkString(reply) = reply else { return None };
        self.members.first()?.decision(request, reply)
    }

    /// Returns the decisions on several keys in a script's reply: the lengths of their parts, and then
    /// the parts.
    pub(in super::super) fn decisions(&self, requests: &[StorageRequest<'_>], reply: &Value) -> Option<Vec<Decision>> {
        let Value::BulkString(reply) = reply else { return None };
        let (lengths, mut parts) = reply.split_at_checked(4 * self.members.len())?;
        let mut decisions = Vec::with_capacity(requests.len());
        for ((member, request), length) in self.members.iter().zip(requests).zip(lengths.as_chunks().0) {
            let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
            let (part, rest) = parts.split_at_checked(length)?;
            decisions.push(member.decision(*request, part)?);
            parts = rest;
        }
        Some(decisions)
    }
}

impl CallMember {
    /// Returns the decision in this member's part of a reply.
    fn decision(&self, mut request: StorageRequest<'_>, reply: &[u8]) -> Option<Decision> {
        let (at, reply) = reply.split_first_chunk()?;
        let (&admitted, reply) = reply.split_first()?;
        if admitted == ADMITTED_ALONE {
            request.op = Op::Peek;
        }
        let is_spent = request.op == Op::Hit && request.cost > 0 && admitted == 1;
        let size = self.reply_parts.iter().map(|part| part.size(is_spent)).sum();
        let (numbers, stored) = reply.split_at_checked(size)?;
        let at = Timestamp::from_micros(u64::from_be_bytes(*at));
        let spends = request.op == Op::Hit && request.cost > 0;
        // The status after a charge is that of a peek with cost 0.
        let cost = if request.op == Op::Charge { 0 } else { request.cost };
        let outcome = |delay| match (spends, admitted) {
            (false, _) => None,
            (true, 1) => Some(Outcome::Spent { delay }),
            (true, _) => Some(Outcome::Refused),
        };
        // The reply contains small states in full. Their strategy computes the status from them,
        // because its integers are exact and Lua's are not.
        let states = record::read(&self.digests, stored);
        let mut numbers = numbers.as_chunks().0.iter().map(|bytes| u64::from_be_bytes(*bytes));
        let mut statuses = Vec::with_capacity(states.len());
        for (position, (limit, part)) in request.policy.limits().iter().zip(&self.reply_parts).enumerate() {
            let state = &states[position];
            statuses.push(match part {
                ReplyPart::Log if is_spent => {
                    let (units, oldest) = record::log(self.digests[position], stored)?;
                    let reset = limit.quota().period_micros().saturating_sub(at.since(oldest)).max(1);
                    log_status(limit, at, cost, outcome(0), units, [reset, 0])
                }
                ReplyPart::Log => {
                    let [units, reset, retry] = [numbers.next()?, numbers.next()?, numbers.next()?];
                    log_status(limit, at, cost, outcome(0), units, [reset, retry])
                }
                ReplyPart::Delay => limit.status(state, at, cost, outcome(numbers.next()?)),
                ReplyPart::Nothing => limit.status(state, at, cost, outcome(0)),
            });
        }
        let decision = Decision::from_statuses(at, request.cost, statuses.into_iter());
        // If the script's answer differs from the one computed from the states, the reply is not
        // usable.
        let is_consistent = !spends || decision.is_admitted() == (admitted == 1);
        is_consistent.then_some(decision)
    }
}

/// Returns the status of a log that contains `units` units. `reset` is the time until more units
/// remain, and `retry` the time until the cost fits, both in microseconds.
fn log_status(
    limit: &Limit,
    at: Timestamp,
    cost: u32,
    outcome: Option<Outcome>,
    units: u64,
    [reset, retry]: [u64; 2],
) -> Status {
    let (capacity, cost) = (limit.capacity(), limit.needed(cost));
    let remaining = u32::try_from(units).map_or(0, |units| capacity.saturating_sub(units));
    match outcome {
        Some(Outcome::Spent { .. } | Outcome::SpentLast { .. }) => {
            Status::admitted(capacity, remaining, reset).spent(at.plus(limit.quota().period_micros()), 0)
        }
        Some(Outcome::Refused) | None if cost > remaining => {
            Status::refused(capacity, remaining, reset, (cost <= capacity).then_some(retry))
        }
        Some(Outcome::Refused) | None => Status::admitted(capacity, remaining, reset),
    }
}

/// Creates the error of a script's reply that has the wrong type.
pub(in super::super) fn unexpected_reply(reply: &Value) -> StorageError {
    StorageError::unexpected_reply("the server", format!("the script returned {reply:?}"))
}
