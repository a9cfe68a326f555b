//! The Rust code for a policy.

use std::collections::BTreeSet;
use std::time::Duration;

use tower_ratelimit::{Limit, Policy, Quota};

use crate::locks::{self, Locks};

/// The default width of rustfmt.
const WIDTH: usize = 100;

/// The parts that the limits of a policy add to its code.
#[derive(Default)]
struct Parts {
    uses: BTreeSet<&'static str>,
    /// The statements that build strategies with many options.
    strategies: Vec<String>,
}

impl Parts {
    /// Adds the statement that builds a strategy, and returns the name of its variable.
    fn strategy(&mut self, kind: &str, code: &str) -> String {
        let start = format!("    let {kind}");
        let name = match self.strategies.iter().filter(|code| code.starts_with(&start)).count() {
            0 => kind.to_owned(),
            others => format!("{kind}_{}", others + 1),
        };
        self.strategies.push(format!("    let {name} = {code};\n"));
        name
    }
}

/// Returns a function that builds a layer with this policy, with its imports.
pub(crate) fn of(policy: &Policy) -> String {
    let mut parts = Parts::default();
    parts.uses.extend(["PeerIp", "Policy", "Quota", "RateLimitLayer"]);
    let mut limits = policy.limits().iter();
    let mut built = match limits.next() {
        Some(first) if first.name().is_some() => format!("Policy::from({})", limit(first, &mut parts)),
        Some(first) => format!("Policy::new({})", arguments(first, &mut parts)),
        None => String::new(),
    };
    for further in limits {
        built += &match further.name() {
            Some(_) => format!("\n        .with({})", limit(further, &mut parts)),
            None => format!("\n        .limit({})", arguments(further, &mut parts)),
        };
    }
    for shadow in policy.shadows().iter().flat_map(Policy::limits) {
        built += &format!("\n        .shadow({})", limit(shadow, &mut parts));
    }
    if let Some(name) = policy.name() {
        built += &format!("\n        .with_name({name:?})");
    }
    let strategies = parts.strategies.concat();
    let duration = if [&built, &strategies].into_iter().any(|code| code.contains("Duration::")) {
        "use std::time::Duration;\n\n"
    } else {
        ""
    };
    format!(
        "{duration}{imports}

/// For each client address: {policy}
pub fn rate_limit() -> RateLimitLayer {{
{strategies}    let policy = {built};
    RateLimitLayer::new(policy, PeerIp::new())
}}

// In a router: .layer(rate_limit())
",
        imports = imports(&parts.uses),
    )
}

/// Returns a function that builds a layer with this number of slots, with its imports.
pub(crate) fn in_flight(slots: u32) -> String {
    let code = digits(slots.into());
    format!(
        "use tower_ratelimit::{{InFlightLayer, PeerIp}};

/// For each client address: {slots} in flight
pub fn in_flight_limit() -> InFlightLayer {{
    InFlightLayer::new({code}, PeerIp::new())
}}

// In a router: .layer(in_flight_limit())
"
    )
}

/// Returns the imports in the style of rustfmt, in lines of at most 100 columns.
fn imports(uses: &BTreeSet<&str>) -> String {
    let names: Vec<&str> = uses.iter().copied().collect();
    let line = format!("use tower_ratelimit::{{{}}};", names.join(", "));
    if line.len() <= WIDTH {
        return line;
    }
    let mut lines = "use tower_ratelimit::{\n   ".to_owned();
    for name in names {
        let column = lines.len() - lines.rfind('\n').unwrap_or(0) - 1;
        if column + name.len() + 2 > WIDTH {
            lines += "\n   ";
        }
        lines += &format!(" {name},");
    }
    lines + "\n};"
}

fn limit(limit: &Limit, parts: &mut Parts) -> String {
    parts.uses.insert("Limit");
    let name = limit.name().map(|name| format!(".named({name:?})")).unwrap_or_default();
    format!("Limit::new({}){name}", arguments(limit, parts))
}

/// Returns the strategy and the quota as arguments.
fn arguments(limit: &Limit, parts: &mut Parts) -> String {
    let (strategy, constructor) = match limit.strategy().name() {
        "fixed-window" => ("FixedWindow", "new()"),
        "fixed-window-aligned" => ("FixedWindow", "aligned()"),
        "sliding-window-counter" => ("SlidingWindowCounter", "new()"),
        "sliding-window-counter-aligned" => ("SlidingWindowCounter", "aligned()"),
        "moving-window" => ("MovingWindow", "new()"),
        "elastic-window" => ("ElasticWindow", "new()"),
        "leaky-bucket" => ("LeakyBucket", "new()"),
        "token-bucket" => ("TokenBucket", "new()"),
        "calendar" => ("CalendarWindow", ""),
        _ => ("Lockout", ""),
    };
    parts.uses.insert(strategy);
    if strategy == "CalendarWindow" {
        let name = calendar(&limit.to_string(), parts);
        return format!("{name}, {}", quota(limit.quota()));
    }
    if let Some(locks) = locks::of(limit) {
        let name = lockout(&locks, parts);
        return format!("{name}, {}", quota(limit.quota()));
    }
    let text = limit.to_string();
    let queue = text.rsplit_once(" queue ").and_then(|(_, places)| places.parse().ok());
    let queue = queue.map(|places: u64| format!(".queue({})", digits(places))).unwrap_or_default();
    format!("{strategy}::{constructor}{queue}, {}", quota(limit.quota()))
}

/// Returns the code of a calendar window, from the text of its limit.
fn calendar(text: &str, parts: &mut Parts) -> String {
    let (text, zone) = text.split_once(" in ").map_or((text, None), |(text, zone)| (text, Some(zone)));
    let first = text.split_once(" from ").map(|(_, first)| first);
    let mut code = "CalendarWindow::new()".to_owned();
    if let Some(first) = first {
        code += &match (first.split_once('-'), first.parse::<u8>()) {
            (Some((month, day)), _) => {
                let [month, day] = [month, day].map(|number| number.trim_start_matches('0'));
                format!("\n        .first_date({month}, {day})\n        .expect(\"a valid date\")")
            }
            (None, Ok(day)) => format!("\n        .first_day({day})\n        .expect(\"a valid day\")"),
            (None, Err(_)) => {
                parts.uses.insert("strategy::Weekday");
                format!("\n        .first_weekday(Weekday::{}{})", first[..1].to_uppercase(), &first[1..])
            }
        };
    }
    if let Some(zone) = zone {
        code += &format!("\n        .in_zone({zone:?})\n        .expect(\"a known time zone\")");
    }
    if (first, zone) == (None, None) { code } else { parts.strategy("calendar", &code) }
}

/// Adds the statement that builds a lockout, and returns the name of its variable.
fn lockout(locks: &Locks, parts: &mut Parts) -> String {
    let mut code = format!("Lockout::lasting({})", duration(locks.first));
    if let Some((factor, longest)) = locks.escalation {
        code += &format!("\n        .escalating({factor}, {})", duration(longest));
    }
    if let Some(quiet) = locks.forget {
        code += &format!("\n        .forgetting_after({})", duration(quiet));
    }
    if locks.by_refusals {
        code += "\n        .by_refusals()";
    }
    parts.strategy("lockout", &code)
}

fn quota(quota: &Quota) -> String {
    let amount = digits(quota.amount().into());
    let plain = match quota.period_micros() {
        1_000_000 => format!("Quota::per_second({amount})"),
        60_000_000 => format!("Quota::per_minute({amount})"),
        3_600_000_000 => format!("Quota::per_hour({amount})"),
        86_400_000_000 => format!("Quota::per_day({amount})"),
        604_800_000_000 => format!("Quota::per_week({amount})"),
        2_592_000_000_000 => format!("Quota::per_month({amount})"),
        31_536_000_000_000 => format!("Quota::per_year({amount})"),
        _ => format!("Quota::per({amount}, {})", duration(quota.period())),
    };
    quota.burst_size().map_or(plain.clone(), |burst| format!("{plain}.burst({})", digits(burst.into())))
}

fn duration(period: Duration) -> String {
    match (period.subsec_micros(), period.subsec_micros() % 1_000) {
        (0, _) => format!("Duration::from_secs({})", digits(period.as_secs())),
        (_, 0) => format!("Duration::from_millis({})", digits(u64::try_from(period.as_millis()).unwrap_or(u64::MAX))),
        _ => format!("Duration::from_micros({})", digits(u64::try_from(period.as_micros()).unwrap_or(u64::MAX))),
    }
}

/// Writes a number with underscores between groups of three digits.
fn digits(number: u64) -> String {
    let plain = number.to_string();
    let mut grouped = String::new();
    for (at, digit) in plain.chars().enumerate() {
        if at > 0 && (plain.len() - at).is_multiple_of(3) {
            grouped.push('_');
        }
        grouped.push(digit);
    }
    grouped
}

/// Policies with every strategy and every option of the text form.
const SAMPLES: [&str; 18] = [
    "fixed-window 10/minute",
    "fixed-window-aligned 1000/day",
    "sliding-window-counter 10/minute",
    "sliding-window-counter-aligned 10/hour",
    "moving-window 5/15 minutes",
    "elastic-window 20/minute",
    "token-bucket 10/second",
    "token-bucket 10/second burst 1000000",
    "leaky-bucket 10/second",
    "leaky-bucket 10/second queue 0",
    "fixed-window 3/250ms; moving-window 7/1500ms; shadow elastic-window 9/week",
    "\"free\": 10/second; \"daily\" moving-window 10000/day",
    "limit \"first\" 10/second; 20/minute",
    "lockout 5/10m for 15m x2 up to 1d forget 7d",
    "10/second; limit \"lockout 1 for all\" lockout 100 refusals/m for 1h; lockout 9/h for 2h",
    "calendar 50/day; calendar 5/week from sunday",
    "calendar 1000/month from 15 in Europe/Berlin",
    "calendar 9000/year from 04-01",
];

/// Returns the code of all samples as the module `snippets`, whose test compares them with their
/// texts.
pub(crate) fn all() -> String {
    let mut modules = String::new();
    let mut cases = String::new();
    for (number, text) in SAMPLES.iter().enumerate() {
        let policy: Policy = text.parse().expect("the samples are valid");
        modules += &module(&format!("sample_{number}"), &of(&policy));
        cases += &format!("        (sample_{number}::rate_limit(), {text:?}),\n");
    }
    modules += &module("requests_in_flight", &in_flight(1_000));
    format!(
        "//! The code that the page offers to copy for some policies. Written by
//! `cargo run --example playground -- snippets`.

#![allow(unreachable_pub, reason = \"the code is copied into other crates\")]
{modules}
#[test]
fn code_builds_the_policy_of_its_text() {{
    for (layer, text) in [
{cases}    ] {{
        let limiter = layer.limiter().expect(\"the policy is fixed\");
        assert_eq!(limiter.policy(), text.parse::<tower_ratelimit::Policy>().unwrap());
    }}
}}

#[test]
fn code_builds_a_layer_with_the_slots() {{
    let layer = requests_in_flight::in_flight_limit();
    assert!(format!(\"{{layer:?}}\").contains(\"in-flight 1000\"), \"{{layer:?}}\");
}}
"
    )
}

fn module(name: &str, code: &str) -> String {
    let mut module = format!("\nmod {name} {{\n");
    for line in code.lines() {
        module += &if line.is_empty() { "\n".to_owned() } else { format!("    {line}\n") };
    }
    module + "}\n"
}

#[cfg(test)]
mod tests {
    #[test]
    fn imports_wrap_at_100_columns() {
        let all =
            "limit \"a\" fixed-window 1/s; 2/s; moving-window 3/s; elastic-window 4/s; lockout 5/s for 6s; 7/s burst 8";
        let code = super::of(&all.parse().unwrap());
        let imports = code.split_once("\nuse ").unwrap().1.split_once(';').unwrap().0;
        let wrapped = "tower_ratelimit::{
    ElasticWindow, FixedWindow, Limit, Lockout, MovingWindow, PeerIp, Policy, Quota, RateLimitLayer,
    SlidingWindowCounter, TokenBucket,
}";
        assert_eq!(imports, wrapped);
    }

    #[test]
    fn snippets_are_current() {
        let stored = include_str!("snippets.rs");
        assert!(stored == super::all(), "run scripts/pictures, which writes examples/playground/snippets.rs");
    }
}
