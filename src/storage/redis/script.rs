//! The script that decides: one for each combination of strategies, made of the twins that they need and of the driver.

use std::collections::HashMap;
use std::fmt::Write;
use std::sync::{Arc, RwLock};

use redis::{Cmd, cmd};

use super::keys;
use crate::storage::Ask;
use crate::{Decision, Op, Timestamp};

/// The words of a limit in a hit or a peek where all limits are small, in any, and in a refund.
const WORDS_OF_SMALL: usize = 6;
const WORDS: usize = 7;
const WORDS_OF_REFUND: usize = 9;

/// A function of Lua can have 200 local variables.
const MOST_WRITTEN_OUT: usize = 16;

/// What follows in a twin stands in no script that decides: each function takes time to make, each time.
const ONLY_FOR_REFUNDS: &str = "-- Only for refunds.\n";

/// How much longer than a state matters it is kept, in milliseconds.
pub(super) const GRACE: u32 = 500;

/// What a script does: hits and peeks of small limits only, of any limits, and refunds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Small,
    Decide,
    Refund,
}

impl Kind {
    fn words(self) -> usize {
        match self {
            Self::Small => WORDS_OF_SMALL,
            Self::Decide => WORDS,
            Self::Refund => WORDS_OF_REFUND,
        }
    }
}

/// Scripts by what they do and the names of their strategies.
#[derive(Clone, Debug, Default)]
pub(super) struct Scripts(Arc<RwLock<Known>>);

type Known = HashMap<(Kind, Vec<&'static str>), Arc<Script>>;

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
        let logs = (0..limits.len()).any(|position| keys::is_log(ask.policy, position));
        let is_small = refunded.is_none() && !logs && limits.len() <= MOST_WRITTEN_OUT;
        let at = refunded.map_or(0, |decision| decision.at().as_micros());
        arguments.extend([
            op.to_owned(),
            now.map_or_else(String::new, |now| now.as_micros().to_string()),
            ask.cost.to_string(),
        ]);
        if !is_small {
            arguments.push(at.to_string());
        }
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
            arguments.push(keys::tag(ask.policy, position));
            if !is_small {
                arguments.push(script.name.to_owned());
            }
            arguments.extend(script.arguments.iter().map(u64::to_string));
            if let Some(decision) = refunded {
                let hit = decision.limits().get(position)?.hit(decision.at(), decision.cost());
                arguments.extend([hit.until.as_micros().to_string(), hit.anchor.to_string()]);
            }
        }
        let kind = match (refunded, is_small) {
            (Some(_), _) => Kind::Refund,
            (None, true) => Kind::Small,
            (None, false) => Kind::Decide,
        };
        Some(Call { script: self.script(kind, names, &sources), keys, arguments })
    }

    fn script(&self, kind: Kind, names: Vec<&'static str>, sources: &[&'static str]) -> Arc<Script> {
        let what = (kind, names);
        let known = self.0.read().unwrap_or_else(std::sync::PoisonError::into_inner).get(&what).cloned();
        known.unwrap_or_else(|| {
            let text = assembled(kind, &what.1, sources);
            let hash = redis::Script::new(&text).get_hash().to_owned();
            let script = Arc::new(Script { text, hash });
            self.0.write().unwrap_or_else(std::sync::PoisonError::into_inner).insert(what, Arc::clone(&script));
            script
        })
    }
}

/// The twins, declared before they are defined, since not every strategy has all functions; then the driver.
fn assembled(kind: Kind, names: &[&str], sources: &[&str]) -> String {
    let mut text = format!("local GRACE, STRIDE, TWO_32 = {GRACE}, {}, 4294967296\n", kind.words());
    let mut different: Vec<&str> = names.iter().copied().filter(|&name| name != "moving-window").collect();
    different.sort_unstable();
    different.dedup();
    let mut table = String::from("local twins = {\n");
    for name in different {
        let function = function_name(name);
        let declared = writeln!(text, "local {function}_hit, {function}_refuse, {function}_refund");
        let functions = format!("hit = {function}_hit, refuse = {function}_refuse, refund = {function}_refund");
        declared
            .and_then(|()| writeln!(table, "  ['{name}'] = {{ {functions} }},"))
            .expect("writing to a string does not fail");
    }
    table.push_str("}\n");
    for source in sources {
        let (always, only_refunds) = source.split_once(ONLY_FOR_REFUNDS).unwrap_or((source, ""));
        text.push_str(always);
        if kind == Kind::Refund {
            text.push_str(only_refunds);
        }
        text.push('\n');
    }
    if kind == Kind::Small {
        text.push_str(&written_out(include_str!("driver_small.lua"), names));
    } else {
        text.push_str(&table);
        text.push_str(include_str!("driver.lua"));
    }
    text
}

/// Neighbouring lines with a `$` once for each limit: see `driver_small.lua`.
fn written_out(driver: &str, names: &[&str]) -> String {
    let mut text = String::with_capacity(driver.len() * (names.len() + 1));
    let lines: Vec<&str> = driver.lines().filter(|line| !line.starts_with("--")).collect();
    for block in lines.chunk_by(|one, next| one.contains('$') == next.contains('$')) {
        let repeated = if block[0].contains('$') { names.len() } else { 1 };
        for (position, name) in names.iter().enumerate().take(repeated) {
            for line in block {
                let line = line.trim_end_matches(" -- $").replace("NAME$", &function_name(name));
                let line = line.replace("AT$", &(4 + position * WORDS_OF_SMALL).to_string());
                text.push_str(&line.replace('$', &(position + 1).to_string()));
                text.push('\n');
            }
        }
    }
    text
}

fn function_name(strategy: &str) -> String {
    strategy.replace(|letter: char| !letter.is_ascii_alphanumeric(), "_")
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
