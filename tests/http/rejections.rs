//! The exact status, header fields and body of each rejection.

use std::convert::Infallible;
use std::future::ready;

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use common::{FakeStorage, Inner, ask, failing, get, memory_with_manual_clock, policy, retry_after, slow, with};
use http::{Request, Response};
use serde_json::{Value, json};
use tower::{Layer, service_fn};
use tower_ratelimit::extract::{Head, KeyError};
use tower_ratelimit::storage::ManualClock;
use tower_ratelimit::{
    EmptyRejection, FixedWindow, Global, GrpcRejection, Header, Headers, Key, Limit, MemoryStorage, MovingWindow,
    OnError, Policy, ProblemRejection, Quota, RateLimitLayer, RejectReason, Rejection, Storage, TextRejection,
    Timestamp, policy_by,
};

/// A status, the header fields in the order of their names, and a body.
type Golden = (u16, Vec<String>, String);

fn golden(response: Response<String>) -> Golden {
    let field = |(name, value): (&http::HeaderName, &http::HeaderValue)| {
        let value = value.to_str().unwrap();
        format!("{name}: {}", if name == DETAILS { readable(value) } else { value.to_owned() })
    };
    let mut fields: Vec<_> = response.headers().iter().map(field).collect();
    fields.sort();
    (response.status().as_u16(), fields, response.into_body())
}

const DETAILS: &str = "grpc-status-details-bin";

/// Decodes base64 without padding. Returns the strings in the protobuf message, separated by `|`.
/// The first character of a string can be its length.
fn readable(base64: &str) -> String {
    let bytes = STANDARD_NO_PAD.decode(base64).unwrap();
    let text = String::from_utf8_lossy(&bytes);
    let strings = text.split(|c: char| c != ' ' && !c.is_ascii_graphic()).filter(|string| string.len() > 3);
    strings.collect::<Vec<_>>().join("|").replace("type.googleapis.com/google.rpc.", "")
}

/// The fields that the layer adds to each of the refusals below.
const ADDED: [&[&str]; 7] = [
    &limit("retry-after: 10", "x-ratelimit-limit: 1", "x-ratelimit-reset: 1728000010"),
    &limit("retry-after: 3600", "x-ratelimit-limit: 1", "x-ratelimit-reset: 1728003600"),
    &limit("retry-after: 60", "x-ratelimit-limit: 1", "x-ratelimit-reset: 1728000060"),
    &["cache-control: no-store", "x-ratelimit-limit: 2", "x-ratelimit-remaining: 2", "x-ratelimit-reset: 1728000000"],
    &["retry-after: 1"],
    &[],
    &[],
];

const fn limit(retry: &'static str, limit: &'static str, reset: &'static str) -> [&'static str; 5] {
    ["cache-control: no-store", retry, limit, "x-ratelimit-remaining: 0", reset]
}

/// One limit, two of three limits, a full storage, a cost above the capacity, a storage failure,
/// and missing keys by the client's and the server's fault.
async fn refusals<R: Rejection<String> + Copy>(rejection: R) -> [Golden; 7] {
    async fn last<R: Rejection<String>>(
        layer: RateLimitLayer<R>,
        requests: impl IntoIterator<Item = Request<()>>,
    ) -> Golden {
        let service = layer.layer(Inner::default());
        let mut last = None;
        for request in requests {
            last = Some(ask(&service, request).await);
        }
        golden(last.unwrap())
    }
    let kept = |policy: Policy| {
        RateLimitLayer::new(policy, Global::new())
            .storage(memory_with_manual_clock().0, OnError::Refuse)
            .rejection(rejection)
    };
    let two_of_three = Policy::named("free")
        .limit(FixedWindow::new(), Quota::per_second(1))
        .limit(FixedWindow::new(), Quota::per_hour(10))
        .with(Limit::new(MovingWindow::new(), Quota::per_hour(1)).named(r#"say "when" \"#));
    let full = MemoryStorage::builder().max_keys(1).clock(ManualClock::default()).build().unwrap();
    let by_client =
        RateLimitLayer::new(policy("fixed-window 1/minute"), Header::new("x-client")).storage(full, OnError::Refuse);
    let client = |_: &Head<'_>| -> Result<Key, _> { Err(KeyError::client("send \"x-tenant\", 100% of it: é")) };
    let server = |_: &Head<'_>| -> Result<Key, _> { Err(KeyError::server("no table")) };
    let failing = RateLimitLayer::new(Quota::per_hour(1), Global::new()).storage(failing(), OnError::Refuse);
    [
        last(kept(policy("fixed-window 1 per 10 seconds").with_name("free")), [get("/"), get("/")]).await,
        last(kept(two_of_three), [get("/"), get("/")]).await,
        last(by_client.rejection(rejection), ["alice", "bob"].map(|name| with("x-client", name))).await,
        last(kept(policy("fixed-window 2/minute")).cost(|_| 3), [get("/")]).await,
        last(failing.rejection(rejection), [get("/")]).await,
        last(RateLimitLayer::new(Quota::per_hour(1), client).rejection(rejection), [get("/")]).await,
        last(RateLimitLayer::new(Quota::per_hour(1), server).rejection(rejection), [get("/")]).await,
    ]
}

/// Compares each refusal with the expected status, the rejection's own fields and the body.
async fn check<R: Rejection<String> + Copy>(rejection: R, expected: &[(u16, &[&str], &str); 7]) {
    for ((is, &(status, own, body)), added) in refusals(rejection).await.into_iter().zip(expected).zip(ADDED) {
        let mut fields: Vec<_> = own.iter().chain(added).map(ToString::to_string).collect();
        fields.sort();
        assert_eq!(is, (status, fields, body.to_owned()));
    }
}

#[tokio::test]
async fn text_rejection_contains_the_reason_and_the_wait() {
    let plain: &[&str] = &["content-type: text/plain; charset=utf-8"];
    let expected = [
        (429, plain, "too many requests, retry in 10 s\n"),
        (429, plain, "too many requests, retry in 3600 s\n"),
        (429, plain, "too many requests, retry in 60 s\n"),
        (429, plain, "too many requests: the cost of this request exceeds the limit\n"),
        (503, plain, "temporarily unavailable, retry in 1 s\n"),
        (400, plain, "send \"x-tenant\", 100% of it: é\n"),
        (500, plain, if cfg!(debug_assertions) { "no table\n" } else { "internal server error\n" }),
    ];
    check(TextRejection::new(), &expected).await;
}

#[tokio::test]
async fn empty_refusal_has_a_status_and_no_body() {
    check(EmptyRejection::new(), &[429, 429, 429, 429, 503, 400, 500].map(|status| (status, &[] as &[&str], ""))).await;
}

#[tokio::test]
async fn problem_names_the_refusing_limits() {
    let exceeded = |detail: &str, names: &str| {
        format!(
            "{}{}{detail}\",\"violated-policies\":[{names}]}}",
            r#"{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","#,
            r#""title":"Quota exceeded","status":429,"detail":""#
        )
    };
    let limits = [
        exceeded("too many requests, retry in 10 s", r#""free""#),
        exceeded("too many requests, retry in 3600 s", r#""free-1","say \"when\" \\""#),
        exceeded("too many requests, retry in 60 s", r#""fixed-window 1/minute""#),
        exceeded("too many requests: the cost of this request exceeds the limit", r#""fixed-window 2/minute""#),
    ];
    let fields: &[&str] = &["content-type: application/problem+json"];
    let unavailable = concat!(
        r#"{"type":"about:blank","title":"Service Unavailable","status":503,"#,
        r#""detail":"temporarily unavailable, retry in 1 s"}"#,
    );
    let bad_request = concat!(
        r#"{"type":"about:blank","title":"Bad Request","status":400,"#,
        r#""detail":"send \"x-tenant\", 100% of it: é"}"#,
    );
    let mistake = format!(
        r#"{{"type":"about:blank","title":"Internal Server Error","status":500,"detail":"{}"}}"#,
        if cfg!(debug_assertions) { "no table" } else { "internal server error" },
    );
    let expected = [
        (429, fields, &*limits[0]),
        (429, fields, &*limits[1]),
        (429, fields, &*limits[2]),
        (429, fields, &*limits[3]),
        (503, fields, unavailable),
        (400, fields, bad_request),
        (500, fields, &mistake),
    ];
    check(ProblemRejection::new(), &expected).await;
}

#[tokio::test]
async fn grpc_refusal_is_200_and_trailers_only() {
    const GRPC: &str = "content-type: application/grpc";
    const QUOTED: &str =
        r#"+QuotaFailure|free-1|fixed-window 1/second|say "when" \|&"say \"when\" \\" moving-window 1/hour"#;
    let exceeded = |seconds: u32, strings: &str| {
        let message = format!("too many requests, retry in {seconds} s");
        let length = char::from(u8::try_from(message.len()).unwrap());
        let details = format!("{DETAILS}: {length}{message}|{strings}|(RetryInfo");
        // The hour is beyond the bound of the pushback.
        let pushback = if seconds > 60 { "-1".to_owned() } else { format!("{seconds}000") };
        [format!("grpc-message: {message}"), format!("grpc-retry-pushback-ms: {pushback}"), details]
    };
    let ten = exceeded(10, "+QuotaFailure|free|fixed-window 1/10 seconds");
    let hour = exceeded(3_600, QUOTED);
    let minute = exceeded(60, "+QuotaFailure|fixed-window 1/minute|fixed-window 1/minute");
    let mistake = if cfg!(debug_assertions) { "grpc-message: no table" } else { "grpc-message: internal server error" };
    let expected: [(u16, &[&str], &str); 7] = [
        (200, &[GRPC, "grpc-status: 8", &ten[0], &ten[1], &ten[2]], ""),
        (200, &[GRPC, "grpc-status: 8", &hour[0], &hour[1], &hour[2]], ""),
        (200, &[GRPC, "grpc-status: 8", &minute[0], &minute[1], &minute[2]], ""),
        (
            200,
            &[
                GRPC,
                "grpc-status: 8",
                "grpc-message: too many requests: the cost of this request exceeds the limit",
                "grpc-retry-pushback-ms: -1",
                "grpc-status-details-bin: =too many requests: the cost of this request exceeds the limit|\
                 +QuotaFailure|fixed-window 2/minute|fixed-window 2/minute",
            ],
            "",
        ),
        (
            200,
            &[
                GRPC,
                "grpc-status: 14",
                "grpc-message: temporarily unavailable, retry in 1 s",
                "grpc-retry-pushback-ms: 1000",
                "grpc-status-details-bin: %temporarily unavailable, retry in 1 s|(RetryInfo",
            ],
            "",
        ),
        (200, &[GRPC, "grpc-status: 3", "grpc-message: send \"x-tenant\", 100%25 of it: %C3%A9"], ""),
        (200, &[GRPC, "grpc-status: 13", mistake], ""),
    ];
    check(GrpcRejection::new(), &expected).await;
}

/// The pushback is in milliseconds, rounded up. `Retry-After` is in seconds.
#[tokio::test]
async fn grpc_pushback_is_rounded_up_to_a_millisecond() {
    let (storage, _clock) = memory_with_manual_clock();
    let policy: Policy = "token-bucket 3/second burst 1".parse().unwrap();
    let service = RateLimitLayer::new(policy, Global::new())
        .storage(storage, OnError::Refuse)
        .rejection(GrpcRejection::new())
        .layer(Inner::default());
    ask(&service, get("/")).await;
    let refused = ask(&service, get("/")).await;
    assert_eq!(
        (&refused.headers()["grpc-retry-pushback-ms"], retry_after(&refused)),
        (&"334".parse().unwrap(), Some(1))
    );
}

#[tokio::test]
async fn missing_credential_is_401_with_a_challenge() {
    async fn refused<R: Rejection<String>>(missing: KeyError, rejection: R) -> Golden {
        let key = move |_: &Head<'_>| -> Result<Key, _> { Err(missing.clone()) };
        let layer = RateLimitLayer::new(Quota::per_hour(1), key).rejection(rejection);
        golden(ask(&layer.layer(Inner::default()), get("/")).await)
    }
    let missing = || KeyError::unauthorized("send a token");
    let bearer = "www-authenticate: Bearer".to_owned();
    assert_eq!(refused(missing(), EmptyRejection::new()).await, (401, vec![bearer.clone()], String::new()));
    let basic = missing().challenge("Basic realm=\"api\"".parse().unwrap());
    let (status, fields, body) = refused(basic, TextRejection::new()).await;
    assert_eq!((status, &*fields[1], &*body), (401, "www-authenticate: Basic realm=\"api\"", "send a token\n"));
    let (status, fields, _) = refused(missing(), GrpcRejection::new()).await;
    assert!(status == 200 && fields.contains(&"grpc-status: 16".to_owned()), "{fields:?}");
    let own = |_: RejectReason<'_>, _: &Head<'_>| {
        Response::builder().status(401).header("www-authenticate", "Digest").body(String::new()).unwrap()
    };
    assert_eq!(refused(missing(), own).await, (401, vec!["www-authenticate: Digest".to_owned()], String::new()));
}

#[tokio::test]
async fn problem_rejection_escapes_limit_names() {
    for (policy, expected) in [
        (
            policy("1/minute; 1/hour").with_name(r#"","status":200"#),
            json!([r#"","status":200-1"#, r#"","status":200-2"#]),
        ),
        (policy("1/minute").with_name((' '..='~').collect::<String>()), json!([(' '..='~').collect::<String>()])),
    ] {
        let service =
            RateLimitLayer::new(policy, Global::new()).rejection(ProblemRejection::new()).layer(Inner::default());
        ask(&service, get("/")).await;
        let problem: Value = serde_json::from_str(ask(&service, get("/")).await.body()).unwrap();
        assert_eq!((&problem["status"], &problem["violated-policies"]), (&json!(429), &expected));
        assert_eq!(problem.as_object().unwrap().len(), 5, "{problem}");
    }
}

/// Responds with the names of the refusing limits and of the policy.
fn seen(refused: RejectReason<'_>, _: &Head<'_>) -> Response<String> {
    let RejectReason::Limit(refusal) = refused else { panic!("{refused:?}") };
    assert_eq!((&*refusal, refusal.retry_after()), (refusal.decision(), refusal.decision().retry_after()));
    let names: Vec<_> = refusal.violated().collect();
    Response::new(format!("{} of {}", names.join(","), refusal.policy().identity()))
}

#[tokio::test]
async fn rejection_closure_gets_the_refusing_limits() {
    async fn check(storage: impl Storage) {
        let [free, paid] = [("free", 2), ("paid", 1)].map(|(name, per_minute)| {
            let hourly = Limit::new(FixedWindow::new(), Quota::per_hour(1)).named(format!("{name}, hourly"));
            Policy::named(name).limit(FixedWindow::new(), Quota::per_minute(per_minute)).with(hourly)
        });
        let tier = move |head: &Head<'_>| if head.uri().path() == "/paid" { paid.clone() } else { free.clone() };
        let layer =
            RateLimitLayer::new(policy_by(tier), Global::new()).storage(storage, OnError::Refuse).rejection(seen);
        let service = layer.layer(Inner::default());
        for (path, expected) in [
            ("/free", "in"),
            ("/paid", "in"),
            ("/free", "free, hourly of free"),
            ("/paid", "paid-1,paid, hourly of paid"),
        ] {
            assert_eq!(ask(&service, get(path)).await.body(), expected);
        }
    }
    check(memory_with_manual_clock().0).await;
    check(slow(memory_with_manual_clock().0)).await;
}

/// A custom storage that refuses every hit. Its decisions have a wait of zero and the limits of
/// this policy, which can be another one than that of the layer.
fn refuses_for(text: &'static str) -> FakeStorage {
    FakeStorage::scripted(move |_| Some(Ok(policy(text).refusal(Timestamp::EPOCH, 1, 0).contended()))).0
}

#[tokio::test]
async fn refusal_with_too_many_or_too_few_statuses_names_only_existing_limits() {
    for (answers, expected) in [("1/second", "free-1"), ("1/second; 1/minute; 1/hour", "free-1,free-2")] {
        let free = policy("1/minute; 1/hour").with_name("free");
        let layer =
            RateLimitLayer::new(free, Global::new()).storage(refuses_for(answers), OnError::Refuse).rejection(seen);
        assert_eq!(ask(&layer.layer(Inner::default()), get("/")).await.body(), &format!("{expected} of free"));
    }
}

/// Guards against this defect: `Retry-After` of a refusal is 0, in the text too.
#[tokio::test]
async fn retry_after_is_at_least_one_second() {
    let layer =
        RateLimitLayer::new(policy("1/second"), Global::new()).storage(refuses_for("1/second"), OnError::Refuse);
    let refused = ask(&layer.layer(Inner::default()), get("/")).await;
    assert_eq!(common::retry_after(&refused), Some(1));
    assert_eq!(refused.body(), "too many requests, retry in 1 s\n");
}

#[tokio::test]
async fn cache_control_of_a_rejection_is_kept_and_admitted_responses_get_none() {
    async fn check<R: Rejection<String>>(rejection: R, expected: &str) {
        let layer = RateLimitLayer::new(policy("1/hour"), Global::new()).rejection(rejection).headers(Headers::none());
        let service = layer.layer(Inner::default());
        assert!(ask(&service, get("/")).await.headers().is_empty());
        let refused = ask(&service, get("/")).await;
        assert_eq!(refused.headers().get_all("cache-control").iter().collect::<Vec<_>>(), [expected]);
    }
    let private = |_: RejectReason<'_>, _: &Head<'_>| {
        Response::builder().header("cache-control", "private").body(String::new()).unwrap()
    };
    let silent = |_: RejectReason<'_>, _: &Head<'_>| Response::new(String::new());
    check(private, "private").await;
    check(silent, "no-store").await;
    check(GrpcRejection::new(), "no-store").await;
}

/// Guards against this defect: only axum's body type is accepted.
#[tokio::test]
async fn rejections_build_any_body_that_is_default_or_from_string() {
    #[derive(Default)]
    struct Nothing;
    struct Letters(Vec<char>);
    impl From<String> for Letters {
        fn from(text: String) -> Self {
            Self(text.chars().collect())
        }
    }
    async fn refused<B, R: Rejection<B>>(rejection: R, body: fn() -> B) -> Response<B> {
        let inner = service_fn(move |_: Request<()>| ready(Ok::<_, Infallible>(Response::new(body()))));
        let service = RateLimitLayer::new(policy("1/hour"), Global::new()).rejection(rejection).layer(inner);
        ask(&service, get("/")).await;
        ask(&service, get("/")).await
    }
    assert_eq!(refused(EmptyRejection::new(), || Nothing).await.status(), 429);
    assert_eq!(refused(GrpcRejection::new(), || Nothing).await.headers()["grpc-status"], "8");
    assert_eq!(refused(TextRejection::new(), || Letters(Vec::new())).await.into_body().0[..3], ['t', 'o', 'o']);
    assert_eq!(refused(ProblemRejection::new(), || Letters(Vec::new())).await.into_body().0[..2], ['{', '"']);
}
