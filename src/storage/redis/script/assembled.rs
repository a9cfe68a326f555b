//! A script's text: the twins that it needs, and a template that is written out for each limit.

use std::fmt::Write;

use super::GRACE;
use super::{Kind, Part};

const READ: &str = include_str!("read.lua");
const WRITE: &str = include_str!("write.lua");

/// What follows in a twin stands in no script that decides: each function takes time to make, each time.
const ONLY_FOR_REFUNDS: &str = "-- Only for refunds.\n";

/// What a template has once for each limit: local variables, of which a function of Lua can have 200, or places in tables.
const VARIABLES: &str = "text, first, second, till, new_till, new_first, new_second, delay, log";
const MOST_WITH_VARIABLES: usize = 16;

/// The script that does this for limits like these. Those that have a time of their own find it after `words`.
pub(super) fn text(kind: Kind, parts: &[Part], sources: &[&str], words: usize) -> String {
    let mut text = format!("local GRACE, TWO_32, TWO_53, NOW = {GRACE}, 4294967296, 9007199254740992, {}\n", words + 1);
    declare_functions(&mut text, parts);
    for source in sources {
        let (always, only_refunds) = source.split_once(ONLY_FOR_REFUNDS).unwrap_or((source, ""));
        write_out(&mut text, always, parts);
        if kind == Kind::Refund {
            write_out(&mut text, only_refunds, parts);
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

/// Before they are defined, since not every strategy has all of them, and none may be a global one.
fn declare_functions(text: &mut String, parts: &[Part]) {
    let mut names: Vec<&str> = parts.iter().filter(|part| !part.is_log).map(|part| &*part.function).collect();
    names.sort_unstable();
    names.dedup();
    for name in names {
        writeln!(text, "local {name}_hit, {name}_refuse, {name}_refund").expect("writing to a string does not fail");
    }
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
            match &mut group {
                Some(group) => group.last_mut().expect("it begins with one").1.push(code),
                None => {
                    text.push_str(code);
                    text.push('\n');
                }
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
