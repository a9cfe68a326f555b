//! What the script answers, as a decision.

use redis::Value;

use super::keys;
use crate::storage::Ask;
use crate::strategy::{Outcome, State, Status};
use crate::{Decision, Limit, Op, Timestamp};

/// The numbers of one limit.
type Numbers = [u64; 4];

/// The decision that the script's answer says. `None` when it says something else.
pub(super) fn decision(ask: Ask<'_>, reply: &Value) -> Option<Decision> {
    let Value::Array(values) = reply else { return None };
    let numbers: Vec<u64> = values.iter().map(number).collect::<Option<_>>()?;
    let (&[at, admitted], numbers) = numbers.split_first_chunk::<2>()?;
    let (limits, rest) = numbers.as_chunks::<4>();
    if limits.len() != ask.policy.limits().len() || !rest.is_empty() {
        return None;
    }
    let at = Timestamp::from_micros(at);
    let spends = ask.op == Op::Hit && ask.cost > 0;
    let outcome = |delay| match (spends, admitted) {
        (false, _) => None,
        (true, 1) => Some(Outcome::Spent { delay }),
        (true, _) => Some(Outcome::Refused),
    };
    let statuses = ask.policy.limits().iter().zip(limits).enumerate().map(|(position, (limit, numbers))| {
        if keys::is_log(ask.policy, position) {
            of_log(limit, at, ask.cost, outcome(0), *numbers)
        } else {
            of_small(limit, at, ask.cost, outcome(numbers[3]), *numbers)
        }
    });
    Some(Decision::of_limits(at, ask.cost, statuses))
}

/// Of a small state there is all of it, so its strategy says what it means: exactly, whatever Lua's numbers can hold.
fn of_small(limit: &Limit, at: Timestamp, cost: u32, outcome: Option<Outcome>, [until, a, b, _]: Numbers) -> Status {
    let amount = |number| u32::try_from(number).unwrap_or(u32::MAX);
    let state = match until {
        0 => State::Fresh,
        _ => State::Counts { until: Timestamp::from_micros(until), amounts: [amount(a), amount(b)] },
    };
    limit.answer(&state, at, cost, outcome)
}

/// Of a log there are the units in it, and when more remain and the cost fits.
fn of_log(
    limit: &Limit,
    at: Timestamp,
    cost: u32,
    outcome: Option<Outcome>,
    [units, reset, retry, _]: Numbers,
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
