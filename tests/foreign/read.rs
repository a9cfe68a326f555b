//! Random lists that the library reads, as fields of an inner service and as fields of another server.

use std::convert::Infallible;
use std::future::ready;
use std::time::Duration;

use http::{HeaderValue, Request, Response};
use serde_json::json;
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::{ClientLimitError, ClientLimitLayer, Global, Headers, Policy, RateLimitLayer};

use crate::random::Numbers;
use crate::{LISTS, Lines, members, thousandths};

/// The field of the layer. Its numbers never change, because its requests cost nothing.
const OWN: &str = "\"own\";r=10;t=0";
/// The longest pause of a client.
const DAY: Duration = Duration::from_secs(86_400);

const KEYS: [&str; 12] = ["r", "r", "r", "t", "t", "t", "q", "w", "pk", "*k", "a-b_c.d*", "r2"];
const SEPARATORS: [&str; 8] = [", ", ", ", ", ", ",", " , ", ",\t", "\t,", ",  \t "];
const NUMBERS: [&str; 20] = [
    "0",
    "0",
    "0",
    "0.0",
    "00.000",
    "1",
    "7",
    "042",
    "30",
    "60.5",
    "3600",
    "86400.001",
    "999999999999999",
    "000000000000000",
    "123456789012.123",
    "1.25",
    "-1",
    "-0.5",
    "1234567890123456",
    "1.2345",
];
const VALUES: [&str; 18] = [
    "?0",
    "?1",
    "@0",
    "@-1659578233",
    "\"0\"",
    "\"a, b;c=\\\"d\\\\\"",
    "\"\"",
    "tok",
    "*t/o:k~",
    "A",
    ":YQ==:",
    "::",
    ":aGVsbG8:",
    ":YWI=:",
    "%\"f%c3%bc\"",
    "%\"%22\"",
    "%\"%C3%BC\"",
    "(1)",
];
/// Characters that a mutation inserts.
const PIECES: [&str; 36] = [
    "\"", "\"", "\\", ";", ";", "=", "=", ",", ",", " ", "\t", ".", "-", "+", "?", "@", ":", "%", "(", ")", "*", "_",
    "/", "0", "1", "9", "a", "f", "r", "t", "R", "~", "'", "\u{fc}", "=?", ";r=0",
];

/// A list whose members are mostly strings, with parameters of every type. Half of the lists then have
/// a few characters that are inserted, removed or replaced.
fn random_list(numbers: &mut Numbers) -> String {
    let mut list = String::from(numbers.one_of(&["", "", "", " ", "  "]));
    for position in 0..1 + numbers.below(4) {
        if position > 0 {
            list += numbers.one_of(&SEPARATORS);
        }
        match numbers.below(40) {
            0 => list += numbers.one_of(&VALUES),
            1 => list += numbers.one_of(&NUMBERS),
            _ => list += &quoted(&random_name(numbers)),
        }
        if numbers.below(4) == 0 {
            list = list + ";r=" + numbers.one_of(&["0", "0.0", "0", "1"]) + ";t=" + numbers.one_of(&NUMBERS);
        }
        for _ in 0..numbers.below(5) {
            list += numbers.one_of(&[";", ";", "; ", ";   "]);
            list += numbers.one_of(&KEYS);
            match numbers.below(10) {
                0 => {}
                1..=2 => list = list + "=" + numbers.one_of(&VALUES),
                _ => list = list + "=" + numbers.one_of(&NUMBERS),
            }
        }
    }
    list += numbers.one_of(&["", "", "", " ", "\t "]);
    if numbers.below(2) == 0 {
        for _ in 0..1 + numbers.below(3) {
            mutate(&mut list, numbers);
        }
    }
    list
}

fn mutate(list: &mut String, numbers: &mut Numbers) {
    let ends: Vec<usize> = list.char_indices().map(|(at, _)| at).chain([list.len()]).collect();
    let at = usize::try_from(numbers.below(ends.len() as u64)).unwrap();
    let removed = at..(at + usize::try_from(numbers.below(2)).unwrap()).min(ends.len() - 1);
    let piece = if numbers.below(3) == 0 { "" } else { numbers.one_of(&PIECES) };
    list.replace_range(ends[removed.start]..ends[removed.end], piece);
}

/// A name of up to 12 printable ASCII characters, of which many are quotes and backslashes.
pub(crate) fn random_name(numbers: &mut Numbers) -> String {
    let mut character = || match numbers.below(4) {
        0 => numbers.one_of(&['"', '\\', ',', ';', '=', ' ']),
        _ => char::from(b' ' + u8::try_from(numbers.below(95)).unwrap()),
    };
    (0..12).map(|_| character()).collect::<String>()[..].trim_end_matches(['a', 'e', 'i', '!']).to_owned()
}

fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('\\', "\\\\").replace('"', "\\\""))
}

/// A response with this list in `RateLimit`.
fn response(list: &str) -> Response<String> {
    let mut response = Response::default();
    response.headers_mut().insert("ratelimit", HeaderValue::from_bytes(list.as_bytes()).unwrap());
    response
}

/// Returns `true` if a layer keeps the list of its inner service beside its own.
async fn is_kept(layer: &RateLimitLayer, list: &str) -> bool {
    let inner = response(list);
    let service = layer.layer(service_fn(move |_: Request<()>| ready(Ok::<_, Infallible>(inner.clone()))));
    let seen = service.oneshot(Request::new(())).await.unwrap();
    let seen = str::from_utf8(seen.headers()["ratelimit"].as_bytes()).unwrap();
    assert!(seen == OWN || seen == format!("{list}, {OWN}"), "{list:?} became {seen:?}");
    seen != OWN
}

/// Returns the pause of a client after a response with this list.
async fn pause(list: &str) -> Option<Duration> {
    let response = response(list);
    let service = ClientLimitLayer::new()
        .max_wait(Duration::ZERO)
        .layer(service_fn(move |_: Request<()>| ready(Ok::<_, Infallible>(response.clone()))));
    service.clone().oneshot(Request::new(())).await.unwrap();
    let error = service.oneshot(Request::new(())).await.err()?;
    error.downcast_ref::<ClientLimitError>().unwrap().retry_after()
}

/// Returns the pause for a list as the crate `sfv` reads it: the latest reset of the limits of which
/// nothing remains.
fn expected_pause(list: &str) -> Option<Duration> {
    let exhausted = members(list)?.into_iter().filter(|item| thousandths(item, "r") == Some(0));
    let resets = exhausted.filter_map(|item| thousandths(&item, "t")).filter_map(|reset| u64::try_from(reset).ok());
    let longest = Duration::from_millis(resets.max()?);
    (!longest.is_zero()).then(|| longest.min(DAY))
}

fn has_unpadded_bytes(list: &str) -> bool {
    let mut bytes = list.match_indices("=:").filter_map(|(at, start)| list[at + start.len()..].split_once(':'));
    bytes.any(|(bytes, _)| bytes.len() % 4 != 0)
}

#[tokio::test(start_paused = true)]
async fn random_lists_are_read_as_by_sfv() {
    let policy: Policy = "10/minute".parse().unwrap();
    let layer = RateLimitLayer::new(policy.with_name("own"), Global::new()).cost(|_| 0).headers(Headers::draft11());
    let (mut numbers, mut lines) = (Numbers(20_261_128), Lines::create("read.jsonl"));
    let (mut valid, mut pauses, mut unpadded, mut negative_zeros, mut different) = (0, 0, 0, 0, Vec::new());
    for _ in 0..LISTS {
        let list = random_list(&mut numbers);
        let is_valid = members(&list).is_some();
        if is_kept(&layer, &list).await != is_valid {
            if is_valid && has_unpadded_bytes(&list) {
                unpadded += 1;
            } else {
                different.push(format!("an inner list, is_valid: {is_valid}: {list:?}"));
            }
        }
        // A member that is exhausted shows that the client has read the list. HTTP removes white space
        // around a field.
        let list = format!("\"first\";r=0;t=1, {}", list.trim_matches([' ', '\t']));
        let (pause, expected) = (pause(&list).await, expected_pause(&list));
        if pause == expected {
            lines.add(&json!({ "list": list, "pause_ms": pause.map(|pause| pause.as_millis()) }));
        } else if list.contains("=-0") {
            negative_zeros += 1;
        } else {
            different.push(format!("a pause of {pause:?} instead of {expected:?}: {list:?}"));
        }
        (valid, pauses) = (valid + u32::from(is_valid), pauses + u32::from(pause > Some(Duration::from_secs(1))));
    }
    println!("{LISTS} random lists, read by this crate and by sfv: {valid} are valid, {pauses} pause the client");
    println!(
        "  {unpadded} differ by a byte sequence without padding. A layer drops them from the field of its inner service,"
    );
    println!("  because writers must pad, and some readers fail. A client reads them.");
    println!("  {negative_zeros} differ because `r=-0` is 0 in sfv. The client ignores numbers with a sign.");
    assert!(different.is_empty(), "{} lists differ: {:#?}", different.len(), &different[..different.len().min(20)]);
    assert!(valid > 30_000 && valid < 80_000 && pauses > 5_000, "{valid} {pauses}");
}
