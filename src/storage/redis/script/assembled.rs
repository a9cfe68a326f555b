//! A script's text: the twins that it needs, and a template that is written out for each limit.

use std::fmt::Write;

use super::GRACE;
use super::{Kind, Part};

const FORGIVE: &str = include_str!("forgive.lua");
const READ: &str = include_str!("read.lua");
const WRITE: &str = include_str!("write.lua");

/// What follows in a twin stands in no script that decides: each function takes time to make, each time.
const ONLY_FOR_REFUNDS: &str = "-- Only for refunds.\n";

/// What a template has once for each limit: local variables, of which a function of Lua can have 200, or places in tables.
const VARIABLES: &str = "text, first, second, till, new_till, new_first, new_second, delay, ahead, log";
const MOST_WITH_VARIABLES: usize = 12;

/// The script that does this for limits like these. Those that have a time of their own find it after `words`.
pub(super) fn text(kind: Kind, parts: &[Part], words: usize) -> String {
    let mut text =
        format!("local GRACE, TWO_32, TWO_54, NOW = {GRACE}, 4294967296, 18014398509481984, {}\n", words + 1);
    write_out(&mut text, FORGIVE, &[]);
    let mut known: Vec<&str> = Vec::new();
    // Who only looks or forgets asks no small state's twin.
    for part in parts.iter().filter(|part| part.is_log || matches!(kind, Kind::Hit | Kind::Refund)) {
        if !known.contains(&&*part.function) {
            known.push(&part.function);
            define(&mut text, kind, part);
        }
    }
    if parts.len() > MOST_WITH_VARIABLES {
        let tables = vec!["{}"; VARIABLES.split(',').count()].join(", ");
        writeln!(text, "local {VARIABLES} = {tables}").expect("writing to a string does not fail");
    }
    let template = match kind {
        Kind::Hit => include_str!("hit.lua"),
        Kind::Peek => include_str!("peek.lua"),
        Kind::Refund => include_str!("refund.lua"),
        Kind::Clear => include_str!("clear.lua"),
    };
    write_out(&mut text, &template.replace("-- read\n", READ).replace("-- write\n", WRITE), parts);
    text
}

/// A strategy's functions. They are declared before they are defined, since not every strategy has all of them and none may be a global
/// one; whatever else its twin has to itself, nobody else sees.
fn define(text: &mut String, kind: Kind, part: &Part) {
    let name = &part.function;
    if part.is_log {
        text.push_str("local log_open, log_told, log_add, log_settle, log_text, log_take_back\ndo\n");
    } else {
        writeln!(text, "local {name}_hit, {name}_refuse, {name}_refund\ndo")
            .expect("writing to a string does not fail");
    }
    for source in part.sources {
        let (always, only_refunds) = source.split_once(ONLY_FOR_REFUNDS).unwrap_or((source, ""));
        text.push_str(always);
        if kind == Kind::Refund {
            text.push_str(only_refunds);
        }
        text.push('\n');
    }
    text.push_str("end\n");
}

/// Writes the template's lines, without comments. Those between `-- each` and `-- done` stand there once for each limit that they are
/// for, with its number for `$`, where its words begin for `AT$`, and so on.
fn write_out(text: &mut String, template: &str, parts: &[Part]) {
    let mut group: Option<Vec<(&str, Vec<&str>)>> = None;
    for line in template.lines() {
        let code = line.trim_start();
        if let Some(which) = code.strip_prefix("-- each") {
            group.get_or_insert_default().push((which.trim_end_matches(':').trim_start(), Vec::new()));
        } else if code == "-- done" {
            let group = group.take().unwrap_or_default();
            for (position, part) in parts.iter().enumerate() {
                for line in group.iter().filter(|(which, _)| part.is(which)).flat_map(|(_, lines)| lines) {
                    let line = part.fill_in(line, position, parts.len() > MOST_WITH_VARIABLES);
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
    /// Whether lines are for it.
    fn is(&self, which: &str) -> bool {
        match which {
            "small" => !self.is_log,
            "log" => self.is_log,
            "that delays" => self.delays,
            "that counts refusals" => self.counts_refusals,
            "that does not" => !self.is_log && !self.counts_refusals,
            _ => true,
        }
    }

    fn fill_in(&self, line: &str, position: usize, in_tables: bool) -> String {
        let line = line.replace("NAME$", &self.function);
        let words = [("AT$", self.tag), ("HIT$", self.hit), ("KEY$", self.key)];
        let line = words.iter().fold(line, |line, (name, at)| line.replace(name, &at.to_string()));
        if !in_tables {
            return line.replace('$', &(position + 1).to_string());
        }
        let declared = line.strip_prefix("local ").filter(|rest| rest.contains('$')).unwrap_or(&line);
        declared.replace('$', &format!("[{}]", position + 1))
    }
}
