//! The scripts that decide, refund and clear on the server: one for each combination of strategies.
//!
//! What the server spends besides the decision, and how scripts avoid it:
//!
//! - The numbers of a call are one packed argument, because text would cost 2 to 3 µs. It begins
//!   with a zero byte, because an error that quotes other bytes is not valid UTF-8.
//! - A reply is one string, because converting a table takes 0.7 µs.
//! - If the expiry of a key has not changed, its states are written with `SETRANGE`, which keeps
//!   it. `SET` with an expiry takes 0.9 µs more. With several keys, `SET` with `KEEPTTL` writes them.
//!   Expiries are rounded up to half a second, so a hot key sets its own about twice a second.
//! - A template is repeated for each limit, because tables cost more than deciding. From the ninth
//!   limit on the script uses tables, because a Lua function has a limited number of variables.
//! - Functions that are rarely needed are created when a script needs them, because creating each
//!   takes 0.1 µs per call.
//!
//! A script writes the small states last. Before it changes an entry of a log in place, it runs the
//! commands that are still to come. So a missing right leaves nothing half done.
//!
//! A log of up to 12,288 places grows by being rewritten, which takes up to 0.8 ms of the server's
//! time. Longer logs grow in place. That takes less time, but `SETRANGE` makes Redis allocate twice
//! the bytes of a string of less than 1 MB.

mod assembled;
mod call;
mod reply;

use std::collections::HashMap;
use std::sync::{Arc, RwLock};

use self::call::{AssembledScript, CallMember, ReplyPart, Text};
pub(super) use self::call::{Call, Combined, ScriptId};
pub(super) use self::reply::unexpected_reply;
use super::{key_names, record};
use crate::decision::Decision;
use crate::policy::{Limit, Op, Policy};
use crate::storage::{StorageRequest, names};
use crate::strategy::Script as StrategyScript;
use crate::sync::unpoisoned;
use crate::time::Timestamp;

/// The minimum time by which a key outlives its state, in milliseconds.
pub(super) const GRACE: u32 = 500;

/// The expiry of a key is rounded up to a multiple of this time, in microseconds. A hit that does
/// not change the rounded expiry need not set it.
const STEP: u32 = 500_000;

/// The operation of a script.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum ScriptKind {
    Hit,
    Peek,
    Charge,
    Refund,
    Clear,
}

/// The time of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScriptTime {
    /// Replaces the server's time, in tests.
    pub(super) own: Option<Timestamp>,
    /// The time for which strategies prepare their arguments. The server's may differ.
    pub(super) near: Timestamp,
}

/// The scripts that have been assembled, by operation and limits.
#[derive(Clone, Debug, Default)]
pub(super) struct Scripts(Arc<RwLock<ScriptCache>>);

type ScriptCache = HashMap<Vec<Shape>, Arc<AssembledScript>>;

/// The properties of a limit on which the text of a script depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    /// The number of the member in a call for several keys, from 0, and its operation.
    member: usize,
    kind: ScriptKind,
    name: &'static str,
    /// The address of the strategy's static list of Lua sources. It is compared and hashed instead
    /// of the list.
    sources: usize,
    arguments: usize,
    delays: bool,
    keeps: bool,
    counts_refusals: bool,
}

/// The part of a script for one key: an operation on its limits. A script has several members if it
/// decides on several keys together.
struct ScriptMember {
    kind: ScriptKind,
    parts: Vec<ScriptPart>,
    /// The index of the small states in `KEYS`.
    key: usize,
    /// `true` if the script has no other member.
    is_alone: bool,
}

/// The properties of a limit from which the text of a script is assembled.
struct ScriptPart {
    /// The number of the limit in the script, from 0.
    position: usize,
    /// The prefix of the names of its functions.
    function: String,
    /// The index of its digest in the packed arguments, from 1. The arguments of its strategy
    /// follow.
    first: usize,
    /// The number of the arguments of its strategy.
    arguments: usize,
    /// The number of these arguments that are for the cost. If the limit keeps units, the units that a hit
    /// needs and the arguments for these follow.
    for_cost: usize,
    /// The number of values of the refunded hit (its end and its anchor) that follow these
    /// arguments. 0 unless the script is a refund.
    hit_values: usize,
    /// The index of its log in `KEYS`.
    key: usize,
    sources: &'static [&'static str],
    is_log: bool,
    delays: bool,
    counts_refusals: bool,
}

impl Scripts {
    /// Returns the call that decides on a request, or `None` if a strategy has no script.
    pub(super) fn call_for(&self, prefix: &str, request: StorageRequest<'_>, time: ScriptTime) -> Option<Call> {
        self.call(kind_of(&request), prefix, request, time, None)
    }

    /// Returns the call that decides on hits and peeks of several keys together, or `None` if a strategy
    /// has no script.
    pub(super) fn call_for_all(&self, prefix: &str, members: &[StorageRequest<'_>], time: ScriptTime) -> Option<Call> {
        let prepared = members.iter().map(|request| Prepared::new(kind_of(request), prefix, *request, time, None));
        let prepared = prepared.collect::<Option<Vec<_>>>()?;
        Some(self.prepared_call(prepared, time))
    }

    /// Returns the digests that identify the records of the policy's limits.
    pub(super) fn digests(policy: &Policy) -> Vec<u32> {
        let now = Timestamp::wall_clock();
        let is_log = |limit| strategy_script(limit, now, 1).is_some_and(|script| is_log(&script));
        record::digests(policy, policy.limits().iter().map(is_log))
    }

    /// Returns `true` if all strategies of the policy have a script.
    pub(super) fn support(policy: &Policy) -> bool {
        let now = Timestamp::wall_clock();
        policy.limits().iter().all(|limit| strategy_script(limit, now, 1).is_some())
    }

    /// Returns the call that runs this operation, or `None` if a strategy has no script. The operation in
    /// `request` is ignored. For a refund, `refunded` is the decision on the hit, and the cost of `request`
    /// is the number of units to give back.
    pub(super) fn call(
        &self,
        kind: ScriptKind,
        prefix: &str,
        request: StorageRequest<'_>,
        time: ScriptTime,
        refunded: Option<&Decision>,
    ) -> Option<Call> {
        Some(self.prepared_call(vec![Prepared::new(kind, prefix, request, time, refunded)?], time))
    }

    fn prepared_call(&self, prepared: Vec<Prepared<'_>>, time: ScriptTime) -> Call {
        let script = self.script(&prepared);
        Call { script, members: prepared.into_iter().map(|prepared| prepared.member).collect(), now: time.own }
    }

    fn script(&self, prepared: &[Prepared<'_>]) -> Arc<AssembledScript> {
        let shapes = prepared.iter().enumerate().flat_map(|(member, prepared)| prepared.shapes(member));
        let id: Vec<Shape> = shapes.collect();
        let cached = unpoisoned(self.0.read()).get(&id).cloned();
        cached.unwrap_or_else(|| {
            let members = members(prepared);
            let single = Text::new(assembled::text(&members));
            let combined = assembled::combined_text(&members).map(Text::new);
            let script = Arc::new(AssembledScript { single, combined });
            unpoisoned(self.0.write()).insert(id, Arc::clone(&script));
            script
        })
    }
}

/// The part of a call for one key, with the properties from which its script is assembled.
struct Prepared<'a> {
    kind: ScriptKind,
    limits: &'a [Limit],
    scripts: Vec<StrategyScript>,
    member: CallMember,
}

impl<'a> Prepared<'a> {
    /// Returns `None` if a strategy has no script.
    fn new(
        kind: ScriptKind,
        prefix: &str,
        request: StorageRequest<'a>,
        time: ScriptTime,
        refunded: Option<&Decision>,
    ) -> Option<Self> {
        let limits = request.policy.limits();
        let scripts: Vec<StrategyScript> =
            limits.iter().map(|limit| strategy_script(limit, time.near, request.cost)).collect::<Option<_>>()?;
        let mut keys = vec![key_names::states_key(prefix, request.policy, request.key)];
        let digests = record::digests(request.policy, scripts.iter().map(is_log));
        let mut arguments = Arguments(Vec::with_capacity(8 * (2 + limits.len() * 9)));
        arguments.push(request.cost.into());
        if let Some(hit) = refunded {
            arguments.push(hit.at().as_micros());
        }
        for (position, script) in scripts.iter().enumerate() {
            if is_log(script) {
                keys.push(key_names::log_key(&keys[0], &names::tag(request.policy, position)));
            }
            arguments.push(digests[position].into());
            script.arguments.iter().for_each(|&argument| arguments.push(argument));
            if let Some(decision) = refunded {
                // The policy may have more limits than at the time of the hit.
                let hit = decision.statuses().get(position).map(|limit| limit.hit(decision.at(), decision.cost()));
                let (until, anchor) = hit.map_or((0, 0), |hit| (hit.until.as_micros(), hit.anchor));
                arguments.push(until);
                arguments.push(anchor.into());
            }
        }
        let reply_parts = scripts.iter().map(reply_part).collect();
        let member = CallMember { keys, arguments: arguments.0, digests, reply_parts };
        Some(Self { kind, limits, scripts, member })
    }

    fn shapes(&self, member: usize) -> impl Iterator<Item = Shape> {
        self.limits.iter().zip(&self.scripts).map(move |(limit, script)| Shape {
            member,
            kind: self.kind,
            name: script.name,
            sources: script.sources.as_ptr().addr(),
            arguments: script.arguments.len(),
            delays: script.delays,
            keeps: limit.kept() > 0,
            counts_refusals: limit.strategy().counts_refusals(),
        })
    }
}

fn kind_of(request: &StorageRequest<'_>) -> ScriptKind {
    match request.op {
        Op::Hit if request.cost > 0 => ScriptKind::Hit,
        Op::Charge if request.cost > 0 => ScriptKind::Charge,
        _ => ScriptKind::Peek,
    }
}

/// Returns the strategy's script, if it has one and its name can be part of Lua identifiers. If the
/// limit keeps units, adds the units that the hit needs, and the arguments of the strategy for them.
fn strategy_script(limit: &Limit, now: Timestamp, cost: u32) -> Option<StrategyScript> {
    let is_valid = |name: &str| {
        name.starts_with(|letter: char| letter.is_ascii_alphabetic())
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    };
    let script_for = |units| limit.strategy().script(limit.quota(), now, units);
    let mut script = script_for(cost).filter(|script| is_valid(script.name))?;
    if limit.kept() > 0 {
        let needed = limit.needed(cost);
        script.arguments.push(needed.into());
        script.arguments.extend(script_for(needed)?.arguments);
    }
    Some(script)
}

/// Returns `true` for the strategy that keeps its state in a log.
fn is_log(script: &StrategyScript) -> bool {
    script.name == "moving-window"
}

fn reply_part(script: &StrategyScript) -> ReplyPart {
    match (is_log(script), script.delays) {
        (true, _) => ReplyPart::Log,
        (false, true) => ReplyPart::Delay,
        (false, false) => ReplyPart::Nothing,
    }
}

fn members(prepared: &[Prepared<'_>]) -> Vec<ScriptMember> {
    let (mut position, mut key, is_alone) = (0, 1, prepared.len() == 1);
    let member = |prepared: &Prepared<'_>| {
        let member = ScriptMember { kind: prepared.kind, parts: parts(prepared, position, key), key, is_alone };
        (position, key) = (position + prepared.limits.len(), key + prepared.member.keys.len());
        member
    };
    prepared.iter().map(member).collect()
}

/// `position` is the number of the first limit in the script, and `key` the index of its small states.
fn parts(prepared: &Prepared<'_>, mut position: usize, mut key: usize) -> Vec<ScriptPart> {
    let (mut first, hit_values) = if prepared.kind == ScriptKind::Refund { (3, 2) } else { (2, 0) };
    let part = |(limit, script): (&Limit, &StrategyScript)| {
        let is_log = is_log(script);
        key += usize::from(is_log);
        let part = ScriptPart {
            position,
            function: script.name.replace('-', "_"),
            first,
            arguments: script.arguments.len(),
            for_cost: if limit.kept() > 0 { script.arguments.len() / 2 } else { script.arguments.len() },
            hit_values,
            key,
            sources: script.sources,
            is_log,
            delays: reply_part(script) == ReplyPart::Delay,
            counts_refusals: !is_log && limit.strategy().counts_refusals(),
        };
        (position, first) = (position + 1, first + 1 + script.arguments.len() + hit_values);
        part
    };
    prepared.limits.iter().zip(&prepared.scripts).map(part).collect()
}

/// Packed numbers, as little-endian doubles.
///
/// The first one is less than 2^32, so it begins with a zero byte. A server that quotes the
/// arguments in an error stops there. Other bytes could make the error invalid UTF-8, which the
/// client cannot parse.
struct Arguments(Vec<u8>);

impl Arguments {
    /// Appends a number as a double. Those above 2^53 are rounded, because all numbers in Lua are
    /// doubles.
    #[expect(clippy::cast_precision_loss, reason = "the script would round the number as well")]
    fn push(&mut self, number: u64) {
        self.0.extend((number as f64).to_le_bytes());
    }
}
