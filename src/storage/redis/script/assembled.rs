//! Assembles the text of a script from the strategies' Lua sources and a template.

use std::fmt::Write;

use super::GRACE;
use super::{Part, ScriptKind};

const FORGIVE: &str = include_str!("forgive.lua");
const READ: &str = include_str!("read.lua");
const WRITE: &str = include_str!("write.lua");

/// The marker in a strategy's source before the functions that only charges and refunds need. Other
/// scripts leave them out, because Lua creates every function in each call.
const ONLY_FOR_SETTLING: &str = "-- Only for settling.\n";

/// The variables that a template has for each limit.
const VARIABLES: &str = "text, first, second, till, new_till, new_first, new_second, delay, ahead, log";

/// The most limits whose variables are local variables. A Lua function can have only 200 of them.
/// With more limits, the variables are fields of tables, which are slower.
const MAX_LIMITS_IN_LOCALS: usize = 12;

/// Returns the text of a script for these limits.
///
/// `arguments` is the number of arguments without the time. A call that replaces the server's time
/// has it as the argument after these.
pub(super) fn text(kind: ScriptKind, parts: &[Part], arguments: usize) -> String {
    let mut text =
        format!("local GRACE, TWO_32, TWO_54, NOW = {GRACE}, 4294967296, 18014398509481984, {}\n", arguments + 1);
    expand(&mut text, FORGIVE, &[]);
    let mut defined: Vec<&str> = Vec::new();
    // `Peek` and `Clear` call no functions for small states.
    for part in parts.iter().filter(|part| part.is_log || !matches!(kind, ScriptKind::Peek | ScriptKind::Clear)) {
        if !defined.contains(&&*part.function) {
            defined.push(&part.function);
            define(&mut text, kind, part);
        }
    }
    if parts.len() > MAX_LIMITS_IN_LOCALS {
        let tables = vec!["{}"; VARIABLES.split(',').count()].join(", ");
        writeln!(text, "local {VARIABLES} = {tables}").expect("writing to a string does not fail");
    }
    let template = match kind {
        ScriptKind::Hit => include_str!("hit.lua"),
        ScriptKind::Peek => include_str!("peek.lua"),
        ScriptKind::Charge => include_str!("charge.lua"),
        ScriptKind::Refund => include_str!("refund.lua"),
        ScriptKind::Clear => include_str!("clear.lua"),
    };
    expand(&mut text, &template.replace("-- read\n", READ).replace("-- write\n", WRITE), parts);
    text
}

/// Writes the functions of a strategy.
///
/// They are declared as local variables first, because Redis forbids global functions and because a
/// strategy need not define all of them. The `do` block hides the strategy's other functions.
fn define(text: &mut String, kind: ScriptKind, part: &Part) {
    let name = &part.function;
    if part.is_log {
        text.push_str("local log_open, log_status, log_add, log_settle, log_text, log_charge, log_take_back\ndo\n");
    } else {
        writeln!(text, "local {name}_hit, {name}_refuse, {name}_charge, {name}_refund\ndo")
            .expect("writing to a string does not fail");
    }
    for source in part.sources {
        let (common, for_settling) = source.split_once(ONLY_FOR_SETTLING).unwrap_or((source, ""));
        text.push_str(common);
        if matches!(kind, ScriptKind::Charge | ScriptKind::Refund) {
            text.push_str(for_settling);
        }
        text.push('\n');
    }
    text.push_str("end\n");
}

/// Expands a template, without its comments.
///
/// Lines between `-- each` and `-- done` are repeated for each limit that the text after `-- each`
/// selects. [`Part::fill_in`] replaces the placeholders in them.
fn expand(text: &mut String, template: &str, parts: &[Part]) {
    let mut group: Option<Vec<(&str, Vec<&str>)>> = None;
    for line in template.lines() {
        let code = line.trim_start();
        if let Some(selector) = code.strip_prefix("-- each") {
            group.get_or_insert_default().push((selector.trim_end_matches(':').trim_start(), Vec::new()));
        } else if code == "-- done" {
            let group = group.take().unwrap_or_default();
            for (position, part) in parts.iter().enumerate() {
                for line in group.iter().filter(|(selector, _)| part.matches(selector)).flat_map(|(_, lines)| lines) {
                    let line = part.fill_in(line, position, parts.len() > MAX_LIMITS_IN_LOCALS);
                    text.push_str(&line);
                    text.push('\n');
                }
            }
        } else if !code.starts_with("--") && !code.is_empty() {
            if let Some((_, lines)) = group.as_mut().and_then(|group| group.last_mut()) {
                lines.push(code);
            } else {
                text.push_str(code);
                text.push('\n');
            }
        }
    }
}

impl Part {
    /// Returns `true` if a selector matches the limit.
    fn matches(&self, selector: &str) -> bool {
        match selector {
            "small" => !self.is_log,
            "log" => self.is_log,
            "that delays" => self.delays,
            "that counts refusals" => self.counts_refusals,
            "that does not" => !self.is_log && !self.counts_refusals,
            _ => true,
        }
    }

    /// Replaces `NAME$` by the prefix of the limit's functions, `AT$`, `HIT$` and `KEY$` by
    /// indices, and any other `$` by the number of the limit.
    fn fill_in(&self, line: &str, position: usize, in_tables: bool) -> String {
        let line = line.replace("NAME$", &self.function);
        let indices = [("AT$", self.tag), ("HIT$", self.hit), ("KEY$", self.key)];
        let line = indices.iter().fold(line, |line, (name, index)| line.replace(name, &index.to_string()));
        if !in_tables {
            return line.replace('$', &(position + 1).to_string());
        }
        let assignment = line.strip_prefix("local ").filter(|rest| rest.contains('$')).unwrap_or(&line);
        assignment.replace('$', &format!("[{}]", position + 1))
    }
}
