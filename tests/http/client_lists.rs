//! The lists in `RateLimit` that a client reads, with the cases of the HTTP working group.

use std::convert::Infallible;
use std::future::ready;
use std::time::Duration;

use common::get;
use http::{HeaderValue, Request, Response};
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::{ClientLimitError, ClientLimitLayer};

use crate::structured_fields::{INVALID, VALID};

/// The longest pause.
const DAY: f64 = 86_400.0;

/// Returns the seconds for which a client pauses after a response with these lines, if it does.
async fn pause(lines: &[&str]) -> Option<f64> {
    let mut response = Response::new(String::new());
    for line in lines {
        response.headers_mut().append("ratelimit", HeaderValue::from_bytes(line.as_bytes()).unwrap());
    }
    let inner = service_fn(move |_: Request<()>| ready(Ok::<_, Infallible>(response.clone())));
    let service = ClientLimitLayer::new().max_wait(Duration::ZERO).layer(inner);
    service.clone().oneshot(get("/")).await.unwrap();
    let error = service.oneshot(get("/")).await.err()?;
    Some(error.downcast_ref::<ClientLimitError>().unwrap().retry_after().unwrap().as_secs_f64())
}

/// Returns the seconds of a reset: a number that is not negative.
fn seconds(value: &str) -> Option<f64> {
    value.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.').then(|| value.parse().unwrap())
}

/// Asserts that two numbers of seconds are the same. Both have at most three decimals.
fn assert_pause(read: Option<f64>, expected: Option<f64>, list: &dyn std::fmt::Debug) {
    let millis = |seconds: f64| format!("{seconds:.3}");
    assert_eq!(read.map(millis), expected.map(millis), "{list:?}");
}

#[tokio::test(start_paused = true)]
async fn client_reads_the_numbers_of_the_working_group() {
    for value in VALID {
        // The second member shows that the list was read.
        let list = format!("\"a\";r=0;t={value}, \"b\";r=0;t=0.5");
        let expected = seconds(value).filter(|seconds| *seconds > 0.5).unwrap_or(0.5);
        assert_pause(pause(&[&list]).await, Some(expected.min(DAY)), &list);
        let list = format!("\"a\";r={value};t=7");
        let is_exhausted = seconds(value) == Some(0.0);
        assert_pause(pause(&[&list]).await, is_exhausted.then_some(7.0), &list);
    }
    for value in INVALID {
        let list = format!("\"a\";r=0;t={value}, \"b\";r=0;t=0.5");
        assert_pause(pause(&[&list]).await, None, &list);
    }
}

#[tokio::test(start_paused = true)]
async fn client_reads_the_lists_of_the_working_group() {
    let large: Vec<String> = (0..1_024).map(|number| format!("\"a{number}\";r=0;t={number}")).collect();
    let parameters: Vec<String> = (0..256).map(|number| format!(";a{number}=1")).collect();
    for (lines, expected) in [
        (&["\"a\";r=0;t=5"][..], Some(5.0)),
        (&[""], None),
        (&["  \"a\";r=0;t=5, \"b\""], Some(5.0)),
        (&["\"a\",\"b\";r=0;t=5"], Some(5.0)),
        (&["\"a\" , \"b\";r=0;t=5"], Some(5.0)),
        (&["\"a\"\t,\t\"b\";r=0;t=5"], Some(5.0)),
        (&["\"a\";r=0;t=5,"], None),
        (&["\"a\";r=0;t=5,,\"b\""], None),
        (&[&large.join(", ")], Some(1_023.0)),
        // All lines are one list, also if a string goes on in the next one.
        (&["\"a\";r=0;t=5", "\"b\";r=0;t=9"], Some(9.0)),
        (&["\"a\";r=0;t=5", "", "\"b\";r=0;t=9"], None),
        (&["\"foo", "bar\";r=0;t=5"], Some(5.0)),
        // Parameters. The last value of a name counts.
        (&["\"a\";  r=0;  t=5;  charset=utf-8"], Some(5.0)),
        (&["\"a\";r=0;t=5;t=7"], Some(7.0)),
        (&["\"a\";r=0;t=7;t=5"], Some(5.0)),
        (&["\"a\";r=1;t=5;r=0"], Some(5.0)),
        (&["\"a\";r=0;t=5;r=1"], None),
        (&["\"a\";r=0;t=5;t"], None),
        (&["\"a\";r;t=5"], None),
        (&["\"a\";r =0;t=5"], None),
        (&["\"a\";r= 0;t=5"], None),
        (&["\"a\" ;r=0;t=5"], None),
        (&["\"a\";r=0;t=5;"], None),
        (&["\"a\";r=0;t=5; "], None),
        (&["\"a\";r=0;t=5;=1"], None),
        (&["\"a\";R=0;t=5"], None),
        (&[&format!("\"a\"{};r=0;t=5", parameters.concat())], Some(5.0)),
        // Writers must pad byte sequences, and readers should accept them without padding.
        (&["\"a\";pk=:aGVsbG8:;r=0;t=5"], Some(5.0)),
        (&["\"a\";pk=:YQ:;r=0;t=5"], Some(5.0)),
        (&["\"a\";pk=:iZ==:;r=0;t=5"], Some(5.0)),
        (&["\"a\";pk=:aGVsb:;r=0;t=5"], None),
        (&["\"a\";pk=:YQ=:;r=0;t=5"], Some(5.0)),
        (&["\"a\";pk=:YWI==:;r=0;t=5"], None),
        (&["\"a\";pk=:Y=WI:;r=0;t=5"], None),
        // Members that are no strings.
        (&["a;r=0;t=5"], None),
        (&["1;r=0;t=5"], None),
        (&["(\"a\" \"b\");r=0;t=5"], None),
        (&["\"a\";r=0;t=5, b"], None),
        (&["\"a\";r=0;t=5, (\"b\")"], None),
    ] {
        assert_pause(pause(lines).await, expected, &lines);
    }
}
