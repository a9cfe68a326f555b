//! The script that decides: one for each combination of strategies, made of the twins that they need and of the driver.

use std::collections::HashMap;
use std::fmt::Write;
use std::sync::{Arc, RwLock};

use redis::{Cmd, cmd};

use super::keys;
use crate::storage::Ask;
use crate::{Decision, Op, Timestamp};

/// The words of a limit in a hit or a peek, and in a refund.
const WORDS: usize = 7;
const WORDS_OF_REFUND: usize = 9;

/// How much longer than a state matters it is kept, in milliseconds.
pub(super) const GRACE: u32 = 500;

/// Scripts by the names of their strategies.
#[derive(Clone, Debug, Default)]
pub(super) struct Scripts(Arc<RwLock<HashMap<Vec<&'static str>, Arc<Script>>>>);

#[derive(Debug)]
struct Script {
    text: String,
    hash: String,
}

/// A script with what it is asked.
pub(super) struct Call {
    script: Arc<Script>,
    keys: Vec<String>,
    arguments: Vec<String>,
}

impl Scripts {
    /// What asks for a decision. `None` when a strategy has no twin. `now` is the time, where it is not the server's.
    pub(super) fn decide(&self, prefix: &str, ask: Ask<'_>, now: Option<Timestamp>) -> Option<Call> {
        let op = if ask.op == Op::Hit { "hit" } else { "peek" };
        self.call(prefix, ask, now, op, None)
    }

    /// What gives a hit back.
    pub(super) fn refund(
        &self,
        prefix: &str,
        ask: Ask<'_>,
        now: Option<Timestamp>,
        decision: &Decision,
    ) -> Option<Call> {
        self.call(prefix, ask, now, "refund", Some(decision))
    }

    fn call(
        &self,
        prefix: &str,
        ask: Ask<'_>,
        now: Option<Timestamp>,
        op: &str,
        refunded: Option<&Decision>,
    ) -> Option<Call> {
        let limits = ask.policy.limits();
        let states = keys::states(prefix, ask.policy, ask.key);
        let mut names = Vec::with_capacity(limits.len() + 1);
        let mut sources: Vec<&'static str> = Vec::new();
        let mut keys = vec![states];
        let mut arguments = Vec::with_capacity(4 + limits.len() * WORDS_OF_REFUND);
        let at = refunded.map_or(0, |decision| decision.at().as_micros());
        arguments.extend([
            op.to_owned(),
            now.map_or_else(String::new, |now| now.as_micros().to_string()),
            ask.cost.to_string(),
            at.to_string(),
        ]);
        for (position, limit) in limits.iter().enumerate() {
            let script = limit.strategy().script(limit.quota(), ask.cost)?;
            for source in script.sources {
                if !sources.contains(source) {
                    sources.push(source);
                }
            }
            if keys::is_log(ask.policy, position) {
                keys.push(keys::log(&keys[0], position));
            }
            names.push(script.name);
            arguments.extend([keys::tag(ask.policy, position), script.name.to_owned()]);
            arguments.extend(script.arguments.iter().map(u64::to_string));
            if let Some(decision) = refunded {
                let hit = decision.limits().get(position)?.hit(decision.at(), decision.cost());
                arguments.extend([hit.until.as_micros().to_string(), hit.anchor.to_string()]);
            }
        }
        let words = if refunded.is_some() { WORDS_OF_REFUND } else { WORDS };
        names.push(if refunded.is_some() { "refund" } else { "decide" });
        Some(Call { script: self.script(names, &sources, words), keys, arguments })
    }

    fn script(&self, names: Vec<&'static str>, sources: &[&'static str], words: usize) -> Arc<Script> {
        let known = self.0.read().unwrap_or_else(std::sync::PoisonError::into_inner).get(&names).cloned();
        known.unwrap_or_else(|| {
            let mut text = format!("local GRACE, STRIDE, TWO_32, twins = {GRACE}, {words}, 4294967296, {{}}\n");
            for source in sources.iter().chain(&[include_str!("driver.lua")]) {
                writeln!(text, "{source}").expect("writing to a string does not fail");
            }
            let hash = redis::Script::new(&text).get_hash().to_owned();
            let script = Arc::new(Script { text, hash });
            self.0.write().unwrap_or_else(std::sync::PoisonError::into_inner).insert(names, Arc::clone(&script));
            script
        })
    }
}

impl Call {
    /// Names the script, which the server may know.
    pub(super) fn by_hash(&self) -> Cmd {
        let mut command = cmd("EVALSHA");
        command.arg(&self.script.hash);
        self.finish(command)
    }

    /// Brings the script along, for a server that has never heard of it, or has forgotten it.
    pub(super) fn whole(&self) -> Cmd {
        let mut command = cmd("EVAL");
        command.arg(&self.script.text);
        self.finish(command)
    }

    fn finish(&self, mut command: Cmd) -> Cmd {
        command.arg(self.keys.len()).arg(&self.keys).arg(&self.arguments);
        command
    }
}
