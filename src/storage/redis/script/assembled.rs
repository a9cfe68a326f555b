//! Assembles the text of a script from the strategies' Lua sources and a template.

use std::fmt::Write;

use super::super::record;
use super::{GRACE, STEP, ScriptKind, ScriptMember, ScriptPart};

const FORGIVE: &str = include_str!("forgive.lua");
const BEGIN: &str = include_str!("begin.lua");
const READ: &str = include_str!("read.lua");
const HIT: &str = include_str!("hit.lua");
const WRITE: &str = include_str!("write.lua");
const ANSWER: &str = include_str!("answer.lua");

/// The marker in a strategy's source before the functions that only charges and refunds need. Other
/// scripts leave them out, because Lua creates every function in each call.
const ONLY_FOR_SETTLING: &str = "-- Only for settling.\n";

/// The code that runs if the value of the key has an unknown format. A clear deletes the value.
const REJECT: &str = "\
return redis.error_reply('FOREIGN the key has a value of an unknown format: clear it, or use another prefix')\n";
const FORGET: &str = "stored, others = '', false\n";

/// The commands that remove the small states, and that write them without a new expiry. With several
/// keys, `SET` is the only command, so a missing right fails the first write, and not a later one.
/// States that have expired are then left to their expiry.
const WRITES_ALONE: (&str, &str) = ("call('UNLINK', STATES)\n", "call('SETRANGE', STATES, '0', stored)\n");
const WRITES_TOGETHER: (&str, &str) = ("", "call('SET', STATES, stored, 'KEEPTTL')\n");

/// The variables of a script for each limit.
const VARIABLES: &str = "digest, till, first, second, new_till, new_first, new_second, delay, ahead, \
                         units, oldest, length, room, head, tail, log";

/// The fields of a record, and of a record of a moving window.
const RECORD: (&str, &str) = (">I4I8I4I4", "digest$, till$, first$, second$");
const LOG_RECORD: (&str, &str) =
    (">I4I8I4I8I4I4I4I4I4", "digest$, till$, units$, oldest$, first$, length$, room$, head$, tail$");

/// The values that a script writes into a record, and into a record of a moving window. A log whose
/// key is lost has no chunks, so they are written as 0.
const WRITTEN: &str = "DIGEST$, till$, first$, second$";
const LOG_WRITTEN: &str = "DIGEST$, log$.till, log$.units, log$.oldest, log$.first, log$.length, log$.room, \
                           log$.head or 0, log$.tail or 0";

/// The maximum numbers of limits and of their arguments for which a script uses local variables. A
/// Lua function can have only 200 of them. A script with more limits uses tables, which are slower.
const MAX_LIMITS_IN_LOCALS: usize = 8;
const MAX_ARGUMENTS_IN_LOCALS: usize = 48;

/// Returns the text of a script for these limits.
///
/// The keys of each member are its small states and then its logs. The packed arguments of the members
/// are the first values of `ARGV`. A call that replaces the server's time has it as the next one.
pub(super) fn text(members: &[ScriptMember]) -> String {
    let names = |number: usize| [format!("KEYS[{}]", members[number].key), format!("ARGV[{}]", number + 1)];
    assemble(members, "-- begin\n-- body\n", names, &format!("ARGV[{}]", members.len() + 1))
}

/// Returns the text of a script that decides on several hits, or `None` if that is not possible
/// with these limits.
///
/// - It is not possible with logs, because a hit with a log has several keys.
/// - It is not possible with more limits than fit in local variables. The hit is inside a function
///   in this script, and a Lua function can refer to only 60 outer variables. Each function of a
///   strategy is one of them.
pub(super) fn combined_text(members: &[ScriptMember]) -> Option<String> {
    let is_possible =
        |member: &ScriptMember| member.kind == ScriptKind::Hit && member.parts.iter().all(|part| !part.is_log);
    if in_tables(members) || !members.iter().all(is_possible) {
        return None;
    }
    let names = |number: usize| [format!("key{number}"), format!("packed{number}")];
    let value = |number: usize| format!("KEYS[at + {number}], ARGV[at + {number}]");
    let template = include_str!("combined.lua")
        .replace("PARAMETERS", &(0..members.len()).flat_map(names).collect::<Vec<_>>().join(", "))
        .replace("VALUES", &(0..members.len()).map(value).collect::<Vec<_>>().join(", "))
        .replace("COUNT", &members.len().to_string());
    Some(assemble(members, &template, names, "own"))
}

/// Returns the text of a script. `names` returns the Lua expressions for the key of the small states
/// of a member and for its packed arguments. `own` is the expression for the time that replaces the
/// server's.
fn assemble(members: &[ScriptMember], template: &str, names: impl Fn(usize) -> [String; 2], own: &str) -> String {
    let in_tables = in_tables(members);
    let mut text = String::new();
    if members.iter().flat_map(|member| &member.parts).any(|part| part.is_log) {
        for (name, value) in constants(0).into_iter().chain([("NOW", members.len() as u64 + 1)]) {
            writeln!(text, "local {name} = {value}").expect("writing to a string does not fail");
        }
        expand(&mut text, FORGIVE, &[], in_tables);
    }
    let mut defined: Vec<&str> = Vec::new();
    for member in members {
        // `Peek` and `Clear` call no functions for small states.
        let is_needed =
            |part: &&ScriptPart| part.is_log || !matches!(member.kind, ScriptKind::Peek | ScriptKind::Clear);
        for part in member.parts.iter().filter(is_needed) {
            if !defined.contains(&&*part.function) {
                defined.push(&part.function);
                define(&mut text, member.kind, part);
            }
        }
    }
    let template = template.replace("-- begin\n", &BEGIN.replace("OWN", own));
    let (before, after) = template.split_once("-- body\n").expect("the template has a body");
    expand(&mut text, before, &[], in_tables);
    match members {
        [member] => expand(&mut text, &member.template(in_tables, names(0), own), &member.parts, in_tables),
        _ => {
            write_members(&mut text, members, in_tables, |number| {
                members[number].template(in_tables, names(number), own)
            });
        }
    }
    expand(&mut text, after, &[], in_tables);
    text
}

/// The variables that each of several members has.
const MEMBER_VARIABLES: [&str; 8] = ["cost", "p", "stored", "others", "last", "admitted", "changed", "answer"];

/// Writes the code for several members: a step of each member, then the next step. Between the first
/// step, which reads and checks, and the second, which spends, the members have to agree.
fn write_members(text: &mut String, members: &[ScriptMember], in_tables: bool, template: impl Fn(usize) -> String) {
    if in_tables {
        text.push_str(&variables(&[], true));
    }
    let templates: Vec<String> = (0..members.len()).map(template).collect();
    let mut steps: Vec<_> = templates.iter().map(|template| template.split("-- next\n")).collect();
    for step in 0..4 {
        for (number, (member, steps)) in members.iter().zip(&mut steps).enumerate() {
            let mut code = String::new();
            expand(&mut code, steps.next().unwrap_or_default(), &member.parts, in_tables);
            write_renamed(text, &code.replace("return answer", "answer = answer"), number);
        }
        if step == 0 {
            let hits = (0..members.len()).filter(|&number| members[number].kind == ScriptKind::Hit);
            let names: Vec<String> = hits.map(|number| format!("admitted{number}")).collect();
            if let [first, others @ ..] = &names[..] {
                let names = names.join(", ");
                let all = others.iter().fold(format!("{first} == 1"), |all, name| all + " and " + name + " == 1");
                let marked = names.replace(',', " * 2,");
                writeln!(text, "if not ({all}) then\n{names} = {marked} * 2\nend")
                    .expect("writing to a string does not fail");
            }
        }
    }
    let answers: Vec<String> = (0..members.len()).map(|number| format!("answer{number}")).collect();
    let (format, lengths) = ("I4".repeat(members.len()), answers.join(", #"));
    writeln!(text, "return pack('>{format}', #{lengths}) .. {}", answers.join(" .. "))
        .expect("writing to a string does not fail");
}

/// Writes code with the number of the member in the names of its variables.
fn write_renamed(text: &mut String, code: &str, number: usize) {
    let is_separator = |c: char| !c.is_ascii_alphanumeric() && c != '_';
    for part in code.split_inclusive(is_separator) {
        let word = part.trim_end_matches(is_separator);
        text.push_str(word);
        if MEMBER_VARIABLES.contains(&word) {
            text.push_str(&number.to_string());
        }
        text.push_str(&part[word.len()..]);
    }
}

/// Returns the constants of all scripts. Lua reads a number faster than a variable outside of the
/// function. So they are inserted as numbers. Only the functions of logs, which are not templates,
/// read variables.
fn constants(size: usize) -> [(&'static str, u64); 5] {
    [
        ("GRACE", u64::from(GRACE)),
        ("STEP", STEP.into()),
        ("TWO_32", 1 << 32),
        ("TWO_54", 1 << 54),
        ("SIZE", size as u64),
    ]
}

impl ScriptMember {
    /// Returns the template of the code for this member, with the [names](assemble) filled in.
    fn template(&self, in_tables: bool, [states, packed_arguments]: [String; 2], own: &str) -> String {
        let template = match self.kind {
            ScriptKind::Hit => HIT,
            ScriptKind::Peek => "-- read\n-- next\n-- next\n-- next\n-- answer\n",
            ScriptKind::Charge => include_str!("charge.lua"),
            ScriptKind::Refund => include_str!("refund.lua"),
            ScriptKind::Clear => include_str!("clear.lua"),
        };
        // The tables of several members are declared once.
        let declarations = if in_tables && !self.is_alone { String::new() } else { variables(&self.parts, in_tables) };
        let (remove, overwrite) = if self.is_alone { WRITES_ALONE } else { WRITES_TOGETHER };
        let mut template = template
            .replace("-- read\n", READ)
            .replace("-- write\n", WRITE)
            .replace("-- remove\n", remove)
            .replace("-- overwrite\n", overwrite)
            .replace("-- answer\n", ANSWER)
            .replace("-- arguments\n", &unpacked_arguments(self, in_tables))
            .replace("-- variables\n", &declarations)
            .replace("-- unpack\n", &unpacked(&self.parts, in_tables))
            .replace("-- pack\n", &packed(&self.parts, in_tables))
            .replace("-- unknown\n", if self.kind == ScriptKind::Clear { FORGET } else { REJECT })
            .replace("STATES", &states)
            .replace("PACKED", &packed_arguments)
            .replace("OWN", own);
        for (name, value) in constants(self.parts.iter().map(ScriptPart::size).sum()) {
            template = template.replace(name, &value.to_string());
        }
        template
    }
}

/// Returns `true` if the variables of limits are in tables. A member needs about as many variables as a
/// limit.
fn in_tables(members: &[ScriptMember]) -> bool {
    let parts = || members.iter().flat_map(|member| &member.parts);
    let arguments = parts().map(|part| part.arguments).sum::<usize>();
    parts().count() + members.len() - 1 > MAX_LIMITS_IN_LOCALS || arguments > MAX_ARGUMENTS_IN_LOCALS
}

/// Returns the code that unpacks the arguments: into local variables, or into the table `p`.
fn unpacked_arguments(member: &ScriptMember, in_tables: bool) -> String {
    let mut names = vec!["cost".to_owned()];
    names.extend((member.kind == ScriptKind::Refund).then(|| "made".to_owned()));
    names.extend(member.parts.iter().flat_map(|part| part.variables(false)));
    let format = "d".repeat(names.len());
    if in_tables {
        format!("local p = {{ unpack('<{format}', PACKED) }}\nlocal cost, made = p[1], p[2]\n")
    } else {
        format!("local {} = unpack('<{format}', PACKED)\n", names.join(", "))
    }
}

/// Returns the Lua declaration of the variables of all limits.
fn variables(parts: &[ScriptPart], in_tables: bool) -> String {
    if in_tables {
        let tables = vec!["{}"; VARIABLES.split(',').count()].join(", ");
        return format!("local {VARIABLES} = {tables}\n");
    }
    format!("local {}\n", fields(parts, ScriptPart::record).join(", "))
}

/// Returns the code that unpacks the records: with one call, or with one for each limit.
fn unpacked(parts: &[ScriptPart], in_tables: bool) -> String {
    if !in_tables {
        let formats: String = parts.iter().map(|part| &part.record().0[1..]).collect();
        return format!("{} = unpack('>{formats}', stored)\n", fields(parts, ScriptPart::record).join(", "));
    }
    let mut at = 1;
    let line = |part: &ScriptPart| {
        let (format, names) = part.record();
        let line = part.fill_in(&format!("{names} = unpack('{format}', stored, {at})\n"), true);
        at += part.size();
        line
    };
    parts.iter().map(line).collect()
}

/// Returns the code that packs the records: with one call, or with one for each limit.
fn packed(parts: &[ScriptPart], in_tables: bool) -> String {
    if !in_tables {
        let formats: String = parts.iter().map(|part| &part.record().0[1..]).collect();
        return format!("stored = pack('>{formats}', {})\n", fields(parts, ScriptPart::written).join(", "));
    }
    let line = |part: &ScriptPart| {
        let (format, values) = part.written();
        part.fill_in(&format!("stored = stored .. pack('{format}', {values})\n"), true)
    };
    format!("stored = ''\n{}", parts.iter().map(line).collect::<String>())
}

/// Returns the fields of the records of all limits.
fn fields(parts: &[ScriptPart], record: fn(&ScriptPart) -> (&'static str, &'static str)) -> Vec<String> {
    parts.iter().map(|part| part.fill_in(record(part).1, false)).collect()
}

/// Writes the functions of a strategy.
///
/// They are declared as local variables first, because Redis forbids global functions and because a
/// strategy need not define all of them. The `do` block hides the strategy's other functions.
fn define(text: &mut String, kind: ScriptKind, part: &ScriptPart) {
    let name = &part.function;
    if part.is_log {
        text.push_str("local log_open, log_status, log_add, log_rare, log_charge, log_take_back\ndo\n");
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
/// selects. [`ScriptPart::fill_in`] replaces the placeholders in them.
fn expand(text: &mut String, template: &str, parts: &[ScriptPart], in_tables: bool) {
    let mut group: Option<Vec<(&str, Vec<&str>)>> = None;
    for line in template.lines() {
        let code = line.trim_start();
        if let Some(selector) = code.strip_prefix("-- each") {
            group.get_or_insert_default().push((selector.trim_end_matches(':').trim_start(), Vec::new()));
        } else if code == "-- done" {
            let group = group.take().unwrap_or_default();
            for part in parts {
                for line in group.iter().filter(|(selector, _)| part.matches(selector)).flat_map(|(_, lines)| lines) {
                    let line = part.fill_in(line, in_tables);
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

impl ScriptPart {
    /// Returns `true` if a selector matches the limit.
    fn matches(&self, selector: &str) -> bool {
        match selector {
            "small" => !self.is_log,
            "log" => self.is_log,
            "that delays" => self.delays,
            "that keeps" => self.for_cost < self.arguments && !self.is_log,
            _ => true,
        }
    }

    /// Returns the variables of the arguments: the digest, the arguments of the strategy, and for a
    /// refund the end and the anchor of the hit's state.
    fn variables(&self, in_tables: bool) -> Vec<String> {
        let position = self.position;
        let count = 1 + self.arguments + self.hit_values;
        (0..count)
            .map(|index| if in_tables { format!("p[{}]", self.first + index) } else { format!("a{position}_{index}") })
            .collect()
    }

    /// Returns the `struct` format of the limit's record, and the variables to unpack it into.
    fn record(&self) -> (&'static str, &'static str) {
        if self.is_log { LOG_RECORD } else { RECORD }
    }

    /// Returns the `struct` format of the limit's record, and the values to pack into it.
    fn written(&self) -> (&'static str, &'static str) {
        if self.is_log { (LOG_RECORD.0, LOG_WRITTEN) } else { (RECORD.0, WRITTEN) }
    }

    /// Returns the bytes of the limit's record.
    fn size(&self) -> usize {
        if self.is_log { record::LOG_SIZE } else { record::SIZE }
    }

    /// Replaces `NAME$` by the prefix of the limit's functions, `DIGEST$`, `ARGUMENTS$`, `UNTIL$` and
    /// `ANCHOR$` by variables, `KEY$` by an index, and any other `$` by the number of the limit.
    /// Replaces `MAY_CHANGE$` by the condition under which a refusal can change the state, and `NEEDED$`
    /// and `FOR_NEEDED$` by the units that have to remain before the hit, and the arguments for them.
    fn fill_in(&self, line: &str, in_tables: bool) -> String {
        let variables = self.variables(in_tables);
        let (strategy, hit) = variables[1..].split_at(self.arguments);
        let (strategy, kept) = strategy.split_at(self.for_cost);
        let listed = |names: &[String]| names.iter().fold(String::new(), |text, name| text + ", " + name);
        let (needed, for_needed) = kept.split_first().map_or(("cost", &[][..]), |(needed, rest)| (&**needed, rest));
        let mut line = line
            .replace("NAME$", &self.function)
            .replace("MAY_CHANGE$", if self.counts_refusals { "true" } else { "ahead$" })
            .replace("DIGEST$", &variables[0])
            .replace(", ARGUMENTS$", &listed(strategy))
            .replace(", FOR_NEEDED$", &listed(for_needed))
            .replace("NEEDED$", needed)
            .replace("KEY$", &self.key.to_string());
        if let [until, anchor] = hit {
            line = line.replace("UNTIL$", until).replace("ANCHOR$", anchor);
        }
        if !in_tables {
            return line.replace('$', &(self.position + 1).to_string());
        }
        let assignment = line.strip_prefix("local ").filter(|rest| rest.contains('$')).unwrap_or(&line);
        assignment.replace('$', &format!("[{}]", self.position + 1))
    }
}
