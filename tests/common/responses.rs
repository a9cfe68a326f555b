//! The numbers in a response's header fields.

use http::Response;

/// Returns `X-RateLimit-Limit`, `-Remaining` and `-Reset`. Panics if only some are present.
pub fn numbers<B>(response: &Response<B>) -> Option<[u64; 3]> {
    let all = ["x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"].map(|name| number(response, name));
    assert!(all.iter().all(Option::is_some) || all.iter().all(Option::is_none), "only some of the three: {all:?}");
    let [limit, remaining, reset] = all;
    Some([limit?, remaining?, reset?])
}

pub fn remaining<B>(response: &Response<B>) -> Option<u64> {
    numbers(response).map(|[_, remaining, _]| remaining)
}

pub fn retry_after<B>(response: &Response<B>) -> Option<u64> {
    number(response, "retry-after")
}

/// Returns the value of a field. Panics if it occurs twice or has other characters than digits.
fn number<B>(response: &Response<B>, name: &str) -> Option<u64> {
    let mut values = response.headers().get_all(name).iter();
    let value = values.next()?.to_str().unwrap();
    assert!(values.next().is_none(), "{name} occurs twice");
    assert!(value.bytes().all(|byte| byte.is_ascii_digit()), "{name}: {value}");
    Some(value.parse().unwrap())
}
