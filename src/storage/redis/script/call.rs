//! A call of a script, and its commands.

use std::sync::Arc;

use redis::{Cmd, cmd};

use crate::time::Timestamp;

/// The texts of a script: for one hit, and for several.
#[derive(Debug)]
pub(super) struct AssembledScript {
    pub(super) single: Text,
    /// The script that decides on several hits, if there is one.
    pub(super) combined: Option<Text>,
}

#[derive(Debug)]
pub(super) struct Text {
    text: String,
    hash: String,
}

/// A script with its keys and arguments: one operation. A command on the wire carries one call, or up to
/// 16 that are [combined](Combined).
#[derive(Debug)]
pub(in super::super) struct Call {
    pub(super) script: Arc<AssembledScript>,
    /// A member for each rate limit key.
    pub(super) members: Vec<CallMember>,
    pub(super) now: Option<Timestamp>,
}

/// The part of a call for one rate limit key.
#[derive(Debug)]
pub(super) struct CallMember {
    /// The keys of the small states and of the logs.
    pub(super) keys: Vec<String>,
    /// Numbers, which `struct.unpack` reads in one call.
    pub(super) arguments: Vec<u8>,
    pub(super) digests: Vec<u32>,
    pub(super) reply_parts: Vec<ReplyPart>,
}

/// The values of a limit in a reply, in addition to its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplyPart {
    Nothing,
    /// The delay of the hit, in microseconds.
    Delay,
    /// The units in a log, the time until more units remain, and the time until the cost fits, in
    /// microseconds. The reply does not contain the log itself. After an admission, it contains
    /// none of these values, because the record suffices.
    Log,
}

/// A call of a script that decides on several hits.
pub(in super::super) struct Combined<'a> {
    calls: &'a [&'a Call],
    text: &'a Text,
}

/// Identifies the script of a call, with the time of tests. Hits with the same value can share a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) struct ScriptId {
    /// The address of the script, which each of the hits keeps alive.
    script: usize,
    now: Option<Timestamp>,
}

impl Text {
    pub(super) fn new(text: String) -> Self {
        let hash = redis::Script::new(&text).get_hash().to_owned();
        Self { text, hash }
    }
}

impl Call {
    /// Returns the command that runs the script from the server's cache.
    pub(in super::super) fn by_hash(&self) -> Cmd {
        command("EVALSHA", &self.script.single.hash, &[self])
    }

    /// Returns the command that sends the script's text. The server caches it.
    pub(in super::super) fn by_text(&self) -> Cmd {
        command("EVAL", &self.script.single.text, &[self])
    }

    /// Returns `true` if one script can decide on this hit and others.
    pub(in super::super) fn can_be_combined(&self) -> bool {
        self.script.combined.is_some()
    }

    /// Returns a value that is equal for hits on which one call can decide.
    pub(in super::super) fn script_id(&self) -> ScriptId {
        ScriptId { script: Arc::as_ptr(&self.script).addr(), now: self.now }
    }

    /// Returns `true` if the call decides on several keys together.
    pub(in super::super) fn has_several_keys(&self) -> bool {
        self.members.len() > 1
    }
}

impl<'a> Combined<'a> {
    /// Combines hits with the same [`ScriptId`] that [can be combined](Call::can_be_combined).
    pub(in super::super) fn new(calls: &'a [&'a Call]) -> Self {
        let text = calls.first().and_then(|call| call.script.combined.as_ref());
        Self { calls, text: text.expect("the hits can be combined") }
    }

    /// Returns the command that runs the script from the server's cache.
    pub(in super::super) fn by_hash(&self) -> Cmd {
        command("EVALSHA", &self.text.hash, self.calls)
    }

    /// Returns the command that sends the script's text. The server caches it.
    pub(in super::super) fn by_text(&self) -> Cmd {
        command("EVAL", &self.text.text, self.calls)
    }
}

/// Returns the command that runs a script for these calls.
fn command(name: &str, script: &str, calls: &[&Call]) -> Cmd {
    let members = || calls.iter().flat_map(|call| &call.members);
    let mut command = cmd(name);
    command.arg(script).arg(members().map(|member| member.keys.len()).sum::<usize>());
    for member in members() {
        command.arg(&member.keys);
    }
    for member in members() {
        command.arg(&member.arguments[..]);
    }
    if let Some(now) = calls.first().and_then(|call| call.now) {
        command.arg(now.as_micros());
    }
    command
}
