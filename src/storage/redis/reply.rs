//! Converts a script's reply to a decision.

use redis::Value;

use super::record;
use super::script::{Call, ReplyPart};
use crate::decision::Decision;
use crate::policy::{Limit, Op};
use crate::storage::StorageRequest;
use crate::strategy::{Outcome, Status};
use crate::time::Timestamp;

/// Returns the decision in a script's reply, or `None` if the reply is malformed or inconsistent.
pub(super) fn decision(request: StorageRequest<'_>, call: &Call, reply: &Value) -> Option<Decision> {
    let Value::BulkString(reply) = reply else { return None };
    let (at, reply) = reply.split_first_chunk()?;
    let (&admitted, reply) = reply.split_first()?;
    let is_spent = request.op == Op::Hit && request.cost > 0 && admitted == 1;
    let size = call.reply_parts().iter().map(|part| part.size(is_spent)).sum();
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
    let states = record::read(call.digests(), stored);
    let mut numbers = numbers.as_chunks().0.iter().map(|bytes| u64::from_be_bytes(*bytes));
    let mut statuses = Vec::with_capacity(states.len());
    for (position, (limit, part)) in request.policy.limits().iter().zip(call.reply_parts()).enumerate() {
        let state = &states[position];
        statuses.push(match part {
            ReplyPart::Log if is_spent => {
                let (units, oldest) = record::log(call.digests()[position], stored)?;
                let reset = limit.quota().period_micros().saturating_sub(at.since(oldest)).max(1);
                log_status(limit, at, cost, outcome(0), units, [reset, 0])
            }
            ReplyPart::Log => {
                let [units, reset, retry] = [numbers.next()?, numbers.next()?, numbers.next()?];
                log_status(limit, at, cost, outcome(0), units, [reset, retry])
            }
            ReplyPart::Delay => limit.answer(state, at, cost, outcome(numbers.next()?)),
            ReplyPart::Nothing => limit.answer(state, at, cost, outcome(0)),
        });
    }
    let decision = Decision::of_limits(at, request.cost, statuses.into_iter());
    // If the script's answer differs from the one computed from the states, the reply is not
    // usable.
    let is_consistent = !spends || decision.is_admitted() == (admitted == 1);
    is_consistent.then_some(decision)
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
    let capacity = limit.capacity();
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
