//! The scripts that decide, give back and forget on the server: one for each combination of strategies.

mod assembled;

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use redis::{Cmd, cmd};

use super::keys;
use crate::policy::Limit;
use crate::storage::{StorageRequest, names};
use crate::strategy::Script as Twin;
use crate::{Decision, Key, Op, Policy, Timestamp};

/// How much longer than a state matters it is kept, in milliseconds.
pub(super) const GRACE: u32 = 500;

/// What a script does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Hit,
    Peek,
    Refund,
    Clear,
}

/// Scripts by what they do, and for what limits.
#[derive(Clone, Debug, Default)]
pub(super) struct Scripts(Arc<RwLock<Known>>);

type Known = HashMap<(Kind, Vec<Shape>), Arc<Script>>;

/// All that makes a difference for a script's text in one of its limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    name: &'static str,
    /// Which sources: where they lie.
    sources: usize,
    words: usize,
    delays: bool,
    counts_refusals: bool,
}

#[derive(Debug)]
struct Script {
    text: String,
    hash: String,
}

/// A limit, as far as it makes a difference for the script's text.
struct Part {
    /// What its functions' names begin with.
    function: String,
    /// Where in ARGV its tag stands; what its twin needs follows.
    tag: usize,
    /// Where in ARGV stands what a refund has to know of the hit.
    hit: usize,
    /// Which of KEYS is its log.
    key: usize,
    sources: &'static [&'static str],
    is_log: bool,
    delays: bool,
    counts_refusals: bool,
}

/// A script with what it is asked.
pub(super) struct Call {
    script: Arc<Script>,
    keys: Vec<String>,
    arguments: Vec<String>,
    told: Vec<Told>,
}

/// What a script answers of a limit, beside its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Told {
    Nothing,
    /// How long a hit has to wait.
    Delay,
    /// Of a log, whose state is not answered: its units, and how long until more remain and until the cost fits.
    Log,
}

impl Scripts {
    /// What asks for a decision. `None` when a strategy has no twin. `now` is the time, where it is not the server's.
    pub(super) fn decide(&self, prefix: &str, ask: StorageRequest<'_>, now: Option<Timestamp>) -> Option<Call> {
        let kind = if ask.op == Op::Hit && ask.cost > 0 { Kind::Hit } else { Kind::Peek };
        self.call(kind, prefix, ask, now, None)
    }

    /// What gives a hit back.
    pub(super) fn refund(
        &self,
        prefix: &str,
        policy: &Policy,
        key: &Key,
        now: Option<Timestamp>,
        decision: &Decision,
    ) -> Option<Call> {
        let ask = StorageRequest::new(policy, key, Op::Hit, decision.cost());
        self.call(Kind::Refund, prefix, ask, now, Some(decision))
    }

    /// What forgets a key.
    pub(super) fn clear(&self, prefix: &str, policy: &Policy, key: &Key, now: Option<Timestamp>) -> Option<Call> {
        self.call(Kind::Clear, prefix, StorageRequest::new(policy, key, Op::Hit, 0), now, None)
    }

    /// Whether all of the policy's strategies have a twin.
    pub(super) fn exist_for(policy: &Policy) -> bool {
        policy.limits().iter().all(|limit| twin(limit, 1).is_some())
    }

    fn call(
        &self,
        kind: Kind,
        prefix: &str,
        ask: StorageRequest<'_>,
        now: Option<Timestamp>,
        refunded: Option<&Decision>,
    ) -> Option<Call> {
        let limits = ask.policy.limits();
        let twins: Vec<Twin> = limits.iter().map(|limit| twin(limit, ask.cost)).collect::<Option<_>>()?;
        let mut keys = vec![keys::states(prefix, ask.policy, ask.key)];
        let mut arguments = Vec::with_capacity(2 + limits.len() * 9);
        arguments.push(ask.cost.to_string());
        arguments.extend(refunded.map(|hit| hit.at().as_micros().to_string()));
        for (position, twin) in twins.iter().enumerate() {
            let tag = names::tag(ask.policy, position);
            if is_log(twin) {
                keys.push(keys::log(&keys[0], &tag));
            }
            arguments.push(format!("[{tag} "));
            arguments.extend(twin.arguments.iter().map(u64::to_string));
            if let Some(decision) = refunded {
                // A limit that was not there then has nothing to give back.
                let hit = decision.limits().get(position).map(|limit| limit.hit(decision.at(), decision.cost()));
                let (until, anchor) = hit.map_or((0, 0), |hit| (hit.until.as_micros(), hit.anchor));
                arguments.extend([until.to_string(), anchor.to_string()]);
            }
        }
        let script = self.script(kind, limits, &twins, arguments.len());
        arguments.extend(now.map(|now| now.as_micros().to_string()));
        Some(Call { script, keys, arguments, told: twins.iter().map(told).collect() })
    }

    fn script(&self, kind: Kind, limits: &[Limit], twins: &[Twin], words: usize) -> Arc<Script> {
        let shape = |(limit, twin): (&Limit, &Twin)| Shape {
            name: twin.name,
            sources: twin.sources.as_ptr().addr(),
            words: twin.arguments.len(),
            delays: twin.delays,
            counts_refusals: limit.strategy().counts_refusals(),
        };
        let what = (kind, limits.iter().zip(twins).map(shape).collect());
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner).get(&what).cloned();
        known.unwrap_or_else(|| {
            let text = assembled::text(kind, &parts(kind, limits, twins), words);
            let hash = redis::Script::new(&text).get_hash().to_owned();
            let script = Arc::new(Script { text, hash });
            self.0.write().unwrap_or_else(PoisonError::into_inner).insert(what, Arc::clone(&script));
            script
        })
    }
}

/// The strategy's twin, if it has one whose functions can be called by its name.
fn twin(limit: &Limit, cost: u32) -> Option<Twin> {
    let is_sound = |name: &str| {
        name.starts_with(|letter: char| letter.is_ascii_alphabetic())
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    };
    limit.strategy().script(limit.quota(), cost).filter(|twin| is_sound(twin.name))
}

/// The one whose states are logs.
fn is_log(twin: &Twin) -> bool {
    twin.name == "moving-window"
}

fn told(twin: &Twin) -> Told {
    match (is_log(twin), twin.delays) {
        (true, _) => Told::Log,
        (false, true) => Told::Delay,
        (false, false) => Told::Nothing,
    }
}

fn parts(kind: Kind, limits: &[Limit], twins: &[Twin]) -> Vec<Part> {
    let (first, of_hit) = if kind == Kind::Refund { (3, 2) } else { (2, 0) };
    let (mut tag, mut key) = (first, 1);
    let part = |(limit, twin): (&Limit, &Twin)| {
        let is_log = is_log(twin);
        key += usize::from(is_log);
        let hit = tag + 1 + twin.arguments.len();
        let part = Part {
            function: twin.name.replace('-', "_"),
            tag,
            hit,
            key,
            sources: twin.sources,
            is_log,
            delays: told(twin) == Told::Delay,
            counts_refusals: !is_log && limit.strategy().counts_refusals(),
        };
        tag = hit + of_hit;
        part
    };
    limits.iter().zip(twins).map(part).collect()
}

impl Call {
    /// What is answered of each limit.
    pub(super) fn told(&self) -> &[Told] {
        &self.told
    }

    /// Names the script, which the server may know.
    pub(super) fn by_hash(&self) -> Cmd {
        self.command("EVALSHA", &self.script.hash)
    }

    /// Brings the script along, for a server that has never heard of it, or has forgotten it.
    pub(super) fn whole(&self) -> Cmd {
        self.command("EVAL", &self.script.text)
    }

    fn command(&self, name: &str, script: &str) -> Cmd {
        let mut command = cmd(name);
        command.arg(script).arg(self.keys.len()).arg(&self.keys).arg(&self.arguments);
        command
    }
}
