//! Policies and quotas as text: the accepted forms, and the suggestions of errors.

use std::collections::{HashMap, HashSet};

use tower_ratelimit::{Policy, Quota};

#[test]
fn alternative_notations_are_parsed() {
    for (second, first) in [
        ("gcra 5/second burst 9", "token-bucket 5/second burst 9"),
        ("GCRA 5/s", "token-bucket 5/second"),
        ("token_bucket 5/second", "token-bucket 5/second"),
        ("Fixed_Window-aligned 5/second", "fixed-window-aligned 5/second"),
        ("interval-token-bucket 5/second", "fixed-window 5/second"),
        ("leaky-bucket-queue 5/second queue 3", "leaky-bucket 5/second queue 3"),
        ("Leaky-Bucket 5/second QUEUE 3", "leaky-bucket 5/second queue 3"),
        ("limit fixed-window 5/s; LIMIT fixed-window 5/m", "fixed-window 5/second; fixed-window 5/minute"),
        (
            "\"free\": limit \"a\" fixed-window 5/s; shadow limit \"b\" fixed-window 5/m",
            "\"free\": \"a\" fixed-window 5/second; shadow \"b\" fixed-window 5/minute",
        ),
        (
            "moving-window 5per2minutes,7/h | gcra 1/d",
            "moving-window 5/2 minutes; sliding-window-counter 7/hour; token-bucket 1/day",
        ),
    ] {
        assert_eq!(second.parse::<Policy>().unwrap().to_string(), first);
    }
}

/// Every error quotes the invalid text and contains a valid example.
#[test]
fn errors_quote_the_text_and_suggest_a_correction() {
    for (text, quoted, hint) in [
        ("10/fortnight", "\"fortnight\"", "expected s, min, h"),
        ("0/minute", "\"0\"", "at least 1"),
        ("10/0 minute", "\"0\"", "at least 1"),
        ("4294967296/second", "\"4294967296\"", "at most 4294967295"),
        ("10 minute", "\"minute\"", "\"/\" or \"per\""),
        ("10/", "the end", "a unit"),
        ("", "the end", "an amount and a period"),
        ("1/second;", "the end", "an amount"),
        ("sliding-log 5/second", "\"sliding-log\"", "moving-window"),
        ("token-bucket 5/second burst", "the end", "after \"burst\""),
        ("token-bucket 5/second burst 0", "\"0\"", "at least 1"),
        ("fixed-window 5/second burst 9", "\"5/second burst 9\"", "token-bucket 5/second burst 9"),
        ("leaky-bucket 5/second burst 9", "\"5/second burst 9\"", "\"queue 9\""),
        ("leaky-bucket 5/second queue", "the end", "after \"queue\""),
        ("leaky-bucket 5/second queue 4294967295", "queue", "at most 4294967294"),
        ("\"free: 5/second", "\"\\\"free: 5/second\"", "closing quote"),
        ("\"\": 5/second", "\"\"", "not a valid header value"),
        ("\"fr\u{e9}e\": 5/second", "\"fr\u{e9}e\"", "not a valid header value"),
        ("1/4294967295 years", "period", "at most 2^52"),
        ("token-bucket 1/year burst 1000", "1/year", "use at most 142"),
    ] {
        let error = text.parse::<Policy>().expect_err(text).to_string();
        assert!(error.contains(quoted) && error.contains(hint), "{text:?}: {error}");
        let example = error.contains("for example") || error.contains("use at most") || error.contains("write");
        assert!(example, "{text:?}: no example: {error}");
    }
}

/// Guards against this defect: the error of a lockout shows `10/minute` as a valid example.
#[test]
fn example_in_an_error_has_the_form_of_the_text() {
    for (text, example) in [
        ("10/fortnight", "\"10/minute\""),
        ("10/fortnight; 5/second", "\"10/second; 1000/day\""),
        ("10/second; shadow 5/fortnight", "\"10/second; shadow 5/second\""),
        ("10/fortnight Burst 5", "\"token-bucket 10/second burst 20\""),
        ("leaky-bucket 10/second queue", "\"leaky-bucket 10/second queue 20\""),
        ("lockout 5/10m for 15m x2", "\"lockout 5/10m for 15m x2 up to 1d\""),
        ("\"a\": 10/fortnight", "'\"free\": 10/second; \"daily\" 1000/day'"),
        ("calendar 10/fortnight", "\"calendar 1000/day\""),
        ("100/minute keep", "\"100/minute keep 20\""),
    ] {
        let error = text.parse::<Policy>().expect_err(text).to_string();
        assert!(error.ends_with(&format!(", for example {example}")), "{text:?}: {error}");
        let shown = &example[1..example.len() - 1];
        assert!(shown.parse::<Policy>().is_ok(), "{shown}");
    }
    let error = "10/fortnight burst 5".parse::<Quota>().unwrap_err().to_string();
    assert!(error.ends_with(", for example \"10/second burst 20\"") && "10/second burst 20".parse::<Quota>().is_ok());
}

/// Returns the text that the error for `text` suggests.
fn suggestion(error: &str) -> Option<String> {
    let (_, meant) = error.split_once("; did you mean ")?;
    let meant = meant.strip_suffix('?').unwrap();
    let inside = meant.strip_prefix(['"', '\'']).unwrap();
    Some(inside.strip_suffix(['"', '\'']).unwrap().to_owned())
}

/// Guards against these defects: the error for `10/mins` suggests `10/ms`, and the one for
/// `TOKEN_BUCKET` suggests a text that does not parse.
#[test]
fn error_for_a_likely_mistake_shows_the_correct_text() {
    for (text, reason, meant) in [
        // Units that other programs use.
        ("10/mins", "the unit \"mins\"", "10/min"),
        ("10/hrs", "the unit \"hrs\"", "10/hr"),
        ("10/secs", "the unit \"secs\"", "10/sec"),
        ("10/y", "the unit \"y\"", "10/year"),
        ("10/YRS", "the unit \"YRS\"", "10/year"),
        ("10/mo", "the unit \"mo\"", "10/month"),
        ("10/mos", "the unit \"mos\"", "10/month"),
        ("10/minuet", "the unit \"minuet\"", "10/minute"),
        ("\"mins\": 10/mins", "the unit \"mins\"", "\"mins\": 10/min"),
        ("1/secs; 10/2 mins, 9/hrs", "the unit \"secs\"", "1/sec; 10/2 min, 9/hr"),
        // Strategies.
        ("TokenBucket 5/s", "the strategy \"TokenBucket\"", "token-bucket 5/s"),
        ("token_buket 5/s", "the strategy \"token_buket\"", "token-bucket 5/s"),
        ("1/second; fixed 5/s", "the strategy \"fixed\"", "1/second; fixed-window 5/s"),
        // Names.
        ("free: 10/minute", "names are in double quotes", "\"free\": 10/minute"),
        ("free tier 2 : 10/minute", "names are in double quotes", "\"free tier 2\": 10/minute"),
        ("free 10/minute", "or a name in double quotes", "\"free\": 10/minute"),
        ("Free tier token-bucket 10/minute", "or a name in double quotes", "\"Free tier\": token-bucket 10/minute"),
        ("1/s; daily 10/days", "or a name in double quotes", "1/s; \"daily\" 10/days"),
        ("\"free\": login gcra 1/mins", "or a name in double quotes", "\"free\": \"login\" gcra 1/min"),
        // Amounts.
        ("10r/s", "an amount has no unit", "10/s"),
        ("10 requests per minute", "an amount has no unit", "10 per minute"),
        ("1,000/day", "an amount is a whole number without separators", "1000/day"),
        ("1 000 000/day", "an amount is a whole number without separators", "1000000/day"),
        ("1_000/day burst 9", "an amount is a whole number without separators", "1000/day burst 9"),
        ("1'000.5/s", "an amount is a whole number without separators", "1000/second"),
        ("token-bucket 99.9/s", "an amount is a whole number without separators", "token-bucket 99/second"),
        ("1.5/second", "an amount is a whole number without separators", "3/2 seconds"),
        (
            "moving-window 0.25 per 3 min; 1/s",
            "an amount is a whole number without separators",
            "moving-window 1/12 minutes; 1/s",
        ),
        ("moving-window 10/m queue 20", "only a leaky bucket has a queue", "leaky-bucket 10/minute queue 20"),
        ("1/s; 10/m queue 20", "only a leaky bucket has a queue", "1/s; leaky-bucket 10/minute queue 20"),
        ("-5/minute", "a number has no sign", "5/minute"),
        ("10/+5s", "a number has no sign", "10/5s"),
        // Several limits.
        ("1/second 2/minute", "\";\" between limits", "1/second; 2/minute"),
        ("1/second and 2/mins\n3/h", "\";\" between limits", "1/second; 2/min; 3/h"),
        ("\"a\": 1/second & 2/minute", "\";\" between limits", "\"a\": 1/second; 2/minute"),
        // Options and times.
        ("10/s burst=20", "a number after \"burst\"", "10/s burst 20"),
        ("10/s BURST : 20; 9/d", "a number after \"BURST\"", "10/s BURST 20; 9/d"),
        ("leaky-bucket 10/s queue=5", "a number after \"queue\"", "leaky-bucket 10/s queue 5"),
        ("10/1h30m", "a time has one unit", "10/90 minutes"),
        ("10 per 1 h 30 m burst 5; 9/d", "a time has one unit", "10 per 90 minutes burst 5; 9/d"),
        ("lockout 5/10m for 1d12h x2 up to 7d", "a time has one unit", "lockout 5/10m for 36 hours x2 up to 7d"),
    ] {
        let error = text.parse::<Policy>().expect_err(text).to_string();
        assert!(error.contains(reason), "{text:?}: {error}");
        assert_eq!(suggestion(&error).as_deref(), Some(meant), "{error}");
        assert!(meant.parse::<Policy>().is_ok(), "{meant}");
    }
    // No unit is as short as these. The mistakes after the first have no correction.
    for text in [
        "10/us",
        "10/ns",
        "10/msec",
        "10/nsec",
        "10/mins; meow",
        "1,00/day",
        "-0/minute",
        "1.5.5/s",
        "0.0/s",
        "0.33/s",
        "10/s burst 20 queue 5",
        "1.5/fortnight",
        "rolling 10/minute",
        "sliding-log 10/minute",
        "my bucket 10/minute",
        "free 10/fortnight",
    ] {
        let error = text.parse::<Policy>().expect_err(text).to_string();
        assert!(suggestion(&error).is_none() && error.contains("for example"), "{error}");
    }
}

/// The corrected text can be read, but not used.
#[test]
fn error_for_a_word_and_a_value_names_both() {
    for (text, word, value) in [
        ("calendar 100/mins", "the unit \"mins\"", "or write \"fixed-window-aligned 100/minute\""),
        ("fixed-windw 5/s burst 9", "the strategy \"fixed-windw\"", "token-bucket 5/second burst 9"),
    ] {
        let error = text.parse::<Policy>().expect_err(text).to_string();
        assert!(error.contains(word) && error.contains(value), "{text:?}: {error}");
        assert_eq!(suggestion(&error), None, "{error}");
    }
}

#[test]
fn error_for_a_policy_where_a_quota_is_parsed_shows_the_quota() {
    for (text, meant) in [
        ("token-bucket 10/second burst 20", Some("10/second burst 20")),
        ("\"free\": 10/minute", Some("10/minute")),
        ("meow", None),
    ] {
        let error = text.parse::<Quota>().expect_err(text).to_string();
        assert!(error.contains("a quota begins with its amount, a `Policy` also reads"), "{error}");
        assert_eq!(suggestion(&error).as_deref(), meant, "{error}");
    }
    for rest in ["; 20/minute", "queue 5", "keep 5"] {
        let error = format!("10/second {rest}").parse::<Quota>().unwrap_err().to_string();
        let why = "because only a `Policy` has several limits, a queue or kept units";
        assert!(error.contains(&format!("{rest:?}")) && error.contains(why), "{error}");
    }
}

/// Guards against this defect: `"free" 10/minute` names the limit, where `"free": 10/minute` would
/// name the policy.
#[test]
fn name_at_the_start_needs_a_colon_or_the_word_limit() {
    for (text, of_policy, of_limit) in [
        ("\"free\" 10/minute", "\"free\": 10/minute", "limit \"free\" 10/minute"),
        (" \"a\"  1/s; \"b\" 2/m", "\"a\": 1/s; \"b\" 2/m", "limit \"a\"  1/s; \"b\" 2/m"),
    ] {
        let error = text.parse::<Policy>().expect_err(text).to_string();
        let both = format!("write '{of_policy}' for the policy, or '{of_limit}' for the limit");
        assert!(error.ends_with(&both), "{error}");
        let (policy, limit) = (of_policy.parse::<Policy>().unwrap(), of_limit.parse::<Policy>().unwrap());
        assert!(policy.name().is_some() && policy.limits()[0].name().is_none());
        assert!(limit.name().is_none() && limit.limits()[0].name().is_some());
    }
}

const UNITS: [&str; 22] = [
    "ms", "s", "sec", "second", "seconds", "m", "min", "minute", "minutes", "h", "hr", "hour", "hours", "d", "day",
    "days", "w", "week", "weeks", "month", "months", "year",
];
/// The strategies, each with a quota and options that it supports.
const STRATEGIES: [(&str, &str); 10] = [
    ("fixed-window", "10/second"),
    ("fixed-window-aligned", "10/second"),
    ("elastic-window", "10/second"),
    ("moving-window", "10/second"),
    ("sliding-window-counter", "10/second"),
    ("sliding-window-counter-aligned", "10/second"),
    ("token-bucket", "10/second"),
    ("leaky-bucket", "10/second"),
    ("lockout", "5/10m for 15m"),
    ("calendar", "100/day"),
];

/// Returns the words after one edit of `word`. Inserts and replaces with each of `letters`.
fn edited(word: &str, letters: &str) -> HashSet<String> {
    let mut words = HashSet::from([word.to_owned()]);
    for at in 0..=word.len() {
        let (start, end) = word.split_at(at);
        let mut rest = end.chars();
        let next = rest.next().map(String::from).unwrap_or_default();
        let after = rest.as_str();
        words.insert([start, after].concat());
        for letter in letters.chars() {
            words.insert(format!("{start}{letter}{end}"));
            words.insert(format!("{start}{letter}{after}"));
        }
        if let Some(second) = after.chars().next() {
            words.insert(format!("{start}{second}{next}{}", &after[1..]));
        }
    }
    words
}

/// Returns the words after at most two edits of `word`.
fn twice_edited(word: &str, letters: &str) -> HashSet<String> {
    edited(word, letters).iter().flat_map(|word| edited(word, letters)).collect()
}

#[test]
fn suggested_units_parse_and_never_loosen_the_limit() {
    // All letters of units, and `x` for the others, which are all alike.
    let letters = "acdehikmnorstuwyx";
    let period = |text: &str| text.parse::<Quota>().unwrap_or_else(|error| panic!("{text}: {error}")).period();
    let mut longest = HashMap::new();
    for unit in UNITS.into_iter().chain(["years"]) {
        let period = period(&format!("10/{unit}"));
        for word in twice_edited(unit, letters) {
            let known = longest.entry(word).or_insert(period);
            *known = period.max(*known);
        }
    }
    let mut count = 0;
    for (word, longest) in longest {
        let Err(error) = format!("10/{word}").parse::<Quota>() else { continue };
        if let Some(meant) = suggestion(&error.to_string()) {
            assert!(period(&meant) >= longest, "{word}: {meant} may loosen the limit");
            count += 1;
        }
    }
    assert!(count > 10_000, "{count} words have a suggestion");
}

/// The letter `x`, which no name has, stands for all letters: a wrong letter is as far from a name
/// as any other.
#[test]
fn suggested_strategies_parse() {
    for (name, rest) in STRATEGIES {
        let mut count = 0;
        for word in twice_edited(name, "x") {
            let Err(error) = format!("{word} {rest}").parse::<Policy>() else { continue };
            if let Some(meant) = suggestion(&error.to_string()) {
                assert!(meant.parse::<Policy>().is_ok(), "{word}: {meant}");
                count += 1;
            }
        }
        let least = if rest == "10/second" { 500 } else { 100 };
        assert!(count > least, "{count} words near {name} have a suggestion");
    }
}
