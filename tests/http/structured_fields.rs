//! The cases of the HTTP working group's tests for Structured Fields
//! (<https://github.com/httpwg/structured-field-tests>) that can occur in a list of strings. Cases
//! that a parser may accept or reject are left out.
//!
//! A layer keeps a list of an inner service only if it is valid, because one invalid member
//! invalidates the members of the layer, too.

use tower_ratelimit::Headers;

use crate::inner_fields::seen;

const OURS: &str = "\"free\";r=9;t=1";

/// Returns `true` if a layer keeps the lines of the inner service.
async fn keeps(lines: &[&str]) -> bool {
    let inner: Vec<_> = lines.iter().map(|line| ("ratelimit", *line)).collect();
    let value = seen(Headers::draft11(), &inner, &["ratelimit"]).await.remove(0);
    let all: Vec<&str> = lines.iter().copied().chain([OURS]).collect();
    if value != OURS {
        assert_eq!(value, all.join(", "));
    }
    value != OURS
}

/// Values of a parameter.
pub(crate) const VALID: &[&str] = &[
    // Booleans.
    "?1",
    "?0",
    // Integers and decimals.
    "42",
    "0",
    "-0",
    "-42",
    "042",
    "-042",
    "00",
    "123456789012345",
    "-123456789012345",
    "1.23",
    "-1.23",
    "123456789012.1",
    "123456789012.123",
    "1.123",
    "-1.123",
    "1.20",
    "1.200",
    "1.230",
    // Dates.
    "@0",
    "@1659578233",
    "@-1659578233",
    "@2147483648",
    "@4294967296",
    "@253402214400",
    "@-62135596800",
    "@-0",
    // Strings.
    "\"foo bar\"",
    "\"\"",
    "\"   \"",
    "\"foo \\\"bar\\\" \\\\ baz\"",
    "\"foo foo foo foo foo foo foo foo foo foo foo foo foo foo foo foo foo foo foo foo foo foo foo foo foo foo foo foo \"",
    // Tokens.
    "a_b-c.d3:f%00/*",
    "fooBar",
    "FooBar",
    "a_b-c3/*",
    // Byte sequences.
    ":aGVsbG8=:",
    "::",
    ":/+Ah:",
    ":cHJldGVuZCB0aGlzIGlzIGJpbmFyeSBjb250ZW50Lg==:",
    // Display strings.
    "%\"foo bar\"",
    "%\" !%22#$%25&'()*+,-./0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqrstuvwxyz{|}~\"",
    "%\"f%c3%bc%c3%bc\"",
    "%\"foo %22bar%22 \\ baz\"",
    "%\"BOM: %ef%bb%bf\"",
    "%\"%61\"",
];

/// Values of a parameter that make the list invalid.
pub(crate) const INVALID: &[&str] = &[
    "",
    " \t 1",
    // Booleans.
    "?",
    "?Q",
    "? 1",
    "?-0",
    "?T",
    "?F",
    "?t",
    "?f",
    "?True",
    "?False",
    // Integers and decimals.
    "--0",
    "2,3",
    "-a23",
    "4-2",
    "- 42",
    "1234567890123456",
    "-1234567890123456",
    "1. 23",
    "1 .23",
    "- 1.23",
    "1.5.4",
    "1..4",
    "1.",
    "1.1234",
    "-1.1234",
    "1234567890123.0",
    "-1234567890123.0",
    // Dates.
    "@",
    "@-",
    "@ 12345678",
    "@abc",
    "@1659578233.12",
    "@1000000000000000",
    "@-1000000000000000",
    // Strings.
    "\"f\u{fc}\u{fc}\"",
    "\"\t\"",
    "'foo'",
    "\"foo",
    "\"foo \\,\"",
    "\"foo \\\"",
    "\"foo \\",
    // Byte sequences.
    ":=aGVsbG8=:",
    ":a=GVsbG8=:",
    ":aGVsbG8.:",
    ":aGVsbG8=",
    ":aGVsb G8=:",
    ":    :",
    ":aGVsbG!8=:",
    ":aGVsbG8=!:",
    ":_-Ah:",
    ":",
    // Display strings.
    "%\"f%C3%BC%C3%BC\"",
    "%\"f\u{fc}\u{fc}\"",
    "%\"\t\"",
    "%'foo'",
    "%foo",
    "%foo\"",
    "%\"foo",
    "%\"foo %a",
    "%\"%c3%28\"",
    "%\"%a0%a1\"",
    "%\"%g0%1w\"",
    "%\"%e2%28%a1\"",
    "%\"%f0%28%8c%28\"",
    "%\"%\"",
    // Inner lists cannot be values.
    "(1 2)",
    "()",
];

#[tokio::test]
async fn values_of_parameters_are_parsed_as_the_working_group_says() {
    for (values, expected) in [(VALID, true), (INVALID, false)] {
        for value in values {
            let list = format!("\"a\";p={value}, \"b\"");
            assert_eq!(keeps(&[&list]).await, expected, "{list}");
        }
    }
    // Members are strings.
    for value in VALID {
        assert_eq!(keeps(&[value]).await, value.starts_with('"'), "{value}");
    }
}

#[tokio::test]
async fn numbers_have_at_most_fifteen_digits() {
    for digit in ["0", "1", "9"] {
        for (whole, places) in (1..=16).flat_map(|whole| (0..=4).map(move |places| (whole, places))) {
            let number = digit.repeat(whole);
            let number = if places == 0 { number } else { format!("{number}.{}", digit.repeat(places)) };
            let expected = if places == 0 { whole <= 15 } else { whole <= 12 && places <= 3 };
            for sign in ["", "-"] {
                let list = format!("\"a\";p={sign}{number}");
                assert_eq!(keeps(&[&list]).await, expected, "{list}");
            }
        }
    }
}

/// Each place of a list, with the characters that make the list valid there.
#[tokio::test]
async fn each_character_is_accepted_only_in_its_places() {
    let lower = "abcdefghijklmnopqrstuvwxyz";
    let alphabetic = format!("{lower}{}", lower.to_uppercase());
    let graphic = || (' '..='~').filter(|c| !['"', '\\'].contains(c));
    for (before, after, accepted) in [
        // The first character of a token, and one inside.
        ("\"a\";p=", "a", format!("{alphabetic}*")),
        ("\"a\";p=a", "a", format!("{alphabetic}0123456789!#$%&'*+-.^_`|~:/;")),
        // The only character of a key, the first one, and one inside.
        ("\"a\";", "=1", format!("{lower}*")),
        ("\"a\"; ", "a=1", format!("{lower}* ")),
        ("\"a\";a", "a=1", format!("{lower}0123456789_-.*;")),
        // A string, and an escape.
        ("\" ", " \"", graphic().collect()),
        ("\"\\", "\"", "\"\\".to_owned()),
    ] {
        for c in ('\0'..='\u{ff}').filter(|c| matches!(c, '\t' | ' '..='~' | '\u{80}'..)) {
            let list = format!("{before}{c}{after}");
            assert_eq!(keeps(&[&list]).await, accepted.contains(c), "{list:?}");
        }
    }
}

#[tokio::test]
async fn lists_are_parsed_as_the_working_group_says() {
    let large: Vec<String> = (0..1_024).map(|number| format!("\"a{number}\";a{number}=1")).collect();
    let parameters: Vec<String> = (0..256).map(|number| format!(";a{number}=1")).collect();
    for (lines, expected) in [
        (&["\"a\", \"b\""][..], true),
        (&[""], false),
        (&["  \"a\", \"b\""], true),
        (&["\"a\",\"b\""], true),
        (&["\"a\" , \"b\""], true),
        (&["\"a\"\t,\t\"b\""], true),
        (&["\"a\"", "\"b\""], true),
        (&["\"a\", \"b\","], false),
        (&["\"a\",,\"b\""], false),
        (&["\"foo\", \"bar\", \"It was the best of times.\""], true),
        (&[&large.join(", ")], true),
        // Parameters.
        (&["\"a\";a=1;b=2; \"b\", \"c\";q=9;r=\"+w\""], false),
        (&["\"a\";a=1;b=2, \"b\", \"c\";q=9;r=\"+w\""], true),
        (&["\"a\";a;q=1.0"], true),
        (&["\"a\";q=1.0;a"], true),
        (&["\"a\",\"b\";q=0.5"], true),
        (&["\"a\", \"b\";q =0.5"], false),
        (&["\"a\", \"b\";q= 0.5"], false),
        (&["\"a\", \"b\" ;q=0.5"], false),
        (&["\"a\", \"b\"; q=0.5"], true),
        (&["\"a\"  ,  \"b\";  q=0.5;  charset=utf-8"], true),
        (&["\"a\"", "\"b\";q=0.5"], true),
        (&["\"a\",\"b\";q=0.5,"], false),
        (&["\"a\",,\"b\";q=0.5,"], false),
        (&["\"a\";b=1;c=2;b=3"], true),
        (&["\"a\";m;z;t"], true),
        (&["\"a\";b=1;"], false),
        (&["\"a\";b=1; "], false),
        (&["\"a\";=1"], false),
        (&["\"a\";"], false),
        (&["\"a\"; "], false),
        (&[&format!("\"a\"{}", parameters.concat())], true),
        (&[&format!("\"a\";{}=1", "a".repeat(64))], true),
        // Inner lists are no strings.
        (&["(\"a\" \"b\"), (\"c\")"], false),
        (&["()"], false),
        (&["(\"a\"; a=1;b=2);lvl=5"], false),
        (&["(\"a\" \"b\""], false),
        (&["\"a\", (\"b\")"], false),
        // Other members.
        (&["1, 42"], false),
        (&["\"a\", 42"], false),
        (&["foo, bar"], false),
    ] {
        assert_eq!(keeps(lines).await, expected, "{lines:?}");
    }
    // Of several lines, each is kept or dropped by itself.
    let lines = [("ratelimit", "\"a\""), ("ratelimit", ""), ("ratelimit", "\"b"), ("ratelimit", "\"c\"")];
    let value = seen(Headers::draft11(), &lines, &["ratelimit"]).await.remove(0);
    assert_eq!(value, format!("\"a\", \"c\", {OURS}"));
}
