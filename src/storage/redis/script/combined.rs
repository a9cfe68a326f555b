//! One call for several hits.

use std::sync::Arc;

use redis::{Cmd, cmd};

use super::{Call, Text};
use crate::time::Timestamp;

/// A call of a script that decides on several hits.
pub(in super::super) struct Combined<'a> {
    calls: &'a [&'a Call],
    text: &'a Text,
}

/// The properties that all hits of one call share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) struct Kin {
    /// The address of the script, which each of the hits keeps alive.
    script: usize,
    now: Option<Timestamp>,
}

impl Call {
    /// Returns `true` if one script can decide on this hit and others.
    pub(in super::super) fn can_be_combined(&self) -> bool {
        self.script.combined.is_some()
    }

    /// Returns a value that is equal for hits on which one call can decide.
    pub(in super::super) fn kin(&self) -> Kin {
        Kin { script: Arc::as_ptr(&self.script).addr(), now: self.now }
    }
}

impl<'a> Combined<'a> {
    /// Combines hits with the same [`Kin`] that [can be combined](Call::can_be_combined).
    pub(in super::super) fn new(calls: &'a [&'a Call]) -> Self {
        let text = calls.first().and_then(|call| call.script.combined.as_ref());
        Self { calls, text: text.expect("the hits can be combined") }
    }

    /// Returns the command that runs the script from the server's cache.
    pub(in super::super) fn by_hash(&self) -> Cmd {
        self.command("EVALSHA", &self.text.hash)
    }

    /// Returns the command that sends the script's text. The server caches it.
    pub(in super::super) fn by_text(&self) -> Cmd {
        self.command("EVAL", &self.text.text)
    }

    fn command(&self, name: &str, script: &str) -> Cmd {
        let mut command = cmd(name);
        command.arg(script).arg(self.calls.len());
        for call in self.calls {
            command.arg(&call.keys);
        }
        for call in self.calls {
            command.arg(&call.arguments[..]);
        }
        if let Some(now) = self.calls.first().and_then(|call| call.now) {
            command.arg(now.as_micros());
        }
        command
    }
}
