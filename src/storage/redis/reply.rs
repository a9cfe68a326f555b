//! What the script answers, as a decision.

use redis::Value;

use super::script::Told;
use crate::storage::{StorageRequest, text};
use crate::strategy::{Outcome, Status};
use crate::{Decision, Limit, Op, Timestamp};

/// The decision that the script's answer says. `None` when it says something else, or what cannot be.
pub(super) fn decision(ask: StorageRequest<'_>, told: &[Told], reply: &Value) -> Option<Decision> {
    let Value::Array(values) = reply else { return None };
    let [Value::Int(at), Value::Int(admitted), Value::BulkString(stored), numbers @ ..] = values.as_slice() else {
        return None;
    };
    let at = Timestamp::from_micros(u64::try_from(*at).ok()?);
    let spends = ask.op == Op::Hit && ask.cost > 0;
    let outcome = |delay| match (spends, admitted) {
        (false, _) => None,
        (true, 1) => Some(Outcome::Spent { delay }),
        (true, _) => Some(Outcome::Refused),
    };
    // Of a small state there is all of it, so its strategy says what it means: exactly, whatever Lua's numbers can hold.
    let states = text::read(ask.policy, &String::from_utf8_lossy(stored));
    let mut numbers = numbers.iter().map(number);
    let mut statuses = Vec::with_capacity(states.len());
    for ((limit, state), told) in ask.policy.limits().iter().zip(&states).zip(told) {
        statuses.push(match told {
            Told::Log => {
                let [units, reset, retry] = [numbers.next()??, numbers.next()??, numbers.next()??];
                of_log(limit, at, ask.cost, outcome(0), units, [reset, retry])
            }
            Told::Delay => limit.answer(state, at, ask.cost, outcome(numbers.next()??)),
            Told::Nothing => limit.answer(state, at, ask.cost, outcome(0)),
        });
    }
    let decision = Decision::of_limits(at, ask.cost, statuses.into_iter());
    // Where the script and the states disagree, neither is to be believed.
    let agrees = !spends || decision.is_admitted() == (*admitted == 1);
    (numbers.next().is_none() && agrees).then_some(decision)
}

/// Of a log there are the units in it, and how long until more remain and until the cost fits.
fn of_log(
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

fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Int(number) => u64::try_from(*number).ok(),
        _ => None,
    }
}
