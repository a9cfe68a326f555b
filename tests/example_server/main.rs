//! The example server as a process: its flags, its output and its responses.

mod in_flight;
mod policies;

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Output, Stdio};

use common::example_process::{Server, server};
use common::pages::example_commands;

/// Returns the value of a header field. The head is in lower case.
fn field<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
}

/// Returns the output of a server that rejects its flags and exits.
fn refused(flags: &[&str]) -> Output {
    let (out, error) = (Stdio::piped(), Stdio::piped());
    let mut child = Command::new(server()).args(flags).stdout(out).stderr(error).spawn().unwrap();
    let mut output_text = String::new();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    // The pipe closes when the process ends.
    out.read_line(&mut output_text).unwrap();
    if output_text.starts_with("listening") {
        child.kill().unwrap();
        panic!("{flags:?}: {output_text}");
    }
    out.read_to_string(&mut output_text).unwrap();
    let output = child.wait_with_output().unwrap();
    Output { stdout: output_text.into_bytes(), ..output }
}

#[test]
fn server_without_flags_admits_ten_requests_and_refuses_the_next() {
    let server = Server::start(&[]);
    for left in (0..10).rev() {
        let (status, head) = server.get("/any/path", "");
        assert_eq!(status, 200);
        assert!(head.contains("x-ratelimit-limit: 10\r\n"), "{head}");
        assert!(head.contains(&format!("x-ratelimit-remaining: {left}\r\n")), "{head}");
        assert!(head.contains("x-ratelimit-reset: "), "{head}");
    }
    let (status, head) = server.get("/", "");
    assert_eq!(status, 429);
    assert!(head.contains("x-ratelimit-remaining: 0\r\n") && head.contains("retry-after: "), "{head}");
}

#[test]
fn several_policy_flags_are_limits_of_one_policy() {
    let server = Server::start(&["--policy", "fixed-window 3/hour", "--policy", "5/hour, 7/day"]);
    let (_, head) = server.get("/", "");
    assert!(head.contains("x-ratelimit-limit: 3\r\n") && head.contains("x-ratelimit-remaining: 2\r\n"), "{head}");
}

#[test]
fn route_limits_apply_in_addition_to_the_limits_of_every_request() {
    let server =
        Server::start(&["--policy", "9/hour", "--route", "/login=fixed-window 1/hour", "--route", "/b=2/hour"]);
    assert_eq!(server.status("/login", ""), 200);
    let (status, head) = server.get("/login", "");
    assert_eq!(status, 429);
    assert!(head.contains("x-ratelimit-limit: 1\r\n"), "{head}");
    let (_, head) = server.get("/b", "");
    assert!(head.contains("x-ratelimit-limit: 2\r\n"), "{head}");
    let (_, head) = server.get("/", "");
    assert!(head.contains("x-ratelimit-remaining: 5\r\n"), "{head}");

    let server = Server::start(&["--headers", "draft11", "--route", "/a=1/hour", "--route", "/b=\"login\": 1/hour"]);
    for (path, name) in [("/a", "\"/a\";q=1"), ("/b", "\"login\";q=1")] {
        let (_, head) = server.get(path, "");
        assert!(field(&head, "ratelimit-policy").unwrap().contains(name), "{head}");
    }
}

#[test]
fn key_flag_selects_the_key() {
    for (key, requests) in [
        ("global", [("/", "", 200), ("/b", "a: 1\r\n", 429)]),
        ("path", [("/", "", 200), ("/b", "", 200)]),
        ("method", [("/", "", 200), ("/b", "", 429)]),
        ("header:a", [("/", "a: 1\r\n", 200), ("/", "a: 2\r\n", 200)]),
        ("header:a+path", [("/", "a: 1\r\n", 200), ("/", "", 400)]),
        ("peer-ip+header:a", [("/", "a: 1\r\n", 200), ("/", "a: 1\r\n", 429)]),
    ] {
        let server = Server::start(&["--policy", "1/hour", "--key", key]);
        for (path, headers, expected) in requests {
            assert_eq!(server.status(path, headers), expected, "{key}: {path} {headers}");
        }
    }
}

#[test]
fn cost_header_sets_the_cost() {
    let server = Server::start(&["--policy", "10/hour", "--cost-header", "x-cost", "--storage", "memory://"]);
    let remaining = |cost: &str| {
        let (_, head) = server.get("/", cost);
        head.split("x-ratelimit-remaining: ").nth(1).map(|rest| rest.split('\r').next().unwrap().to_owned())
    };
    assert_eq!(remaining("x-cost: 4\r\n").as_deref(), Some("6"));
    assert_eq!(remaining("").as_deref(), Some("5"));
    assert_eq!(remaining("x-cost: 0\r\n").as_deref(), Some("5"));
    for unreadable in ["x-cost: -1\r\n", "x-cost: two\r\n", "x-cost: 4294967296\r\n", "x-cost:\r\n"] {
        assert_eq!(server.status("/", unreadable), 400, "{unreadable}");
    }
    assert_eq!(server.status("/", "x-cost: 6\r\n"), 429);
    let (status, head) = server.get("/", "x-cost: 11\r\n");
    assert!(status == 429 && !head.contains("retry-after"), "a cost that never fits has no `Retry-After`: {head}");
}

#[test]
fn client_ip_is_resolved_through_trusted_proxies() {
    // The peer of these tests is 127.0.0.1.
    for (flags, requests) in [
        (
            &["--trust", "10.0.0.0/8", "--trust", "127.0.0.1"][..],
            &[
                ("x-forwarded-for: 1.1.1.1\r\n", 200),
                ("x-forwarded-for: 9.9.9.9, 1.1.1.1, 10.0.0.7\r\n", 429),
                ("x-forwarded-for: 2.2.2.2\r\n", 200),
                ("forwarded: for=3.3.3.3\r\n", 200),
                ("", 429),
            ][..],
        ),
        (&["--trust", "10.0.0.0/8"], &[("x-forwarded-for: 1.1.1.1\r\n", 200), ("x-forwarded-for: 2.2.2.2\r\n", 429)]),
        (
            &["--trust", "127.0.0.0/8", "--client-ip-header", "Forwarded"],
            &[
                ("forwarded: for=\"[2001:db8::1]:80\"\r\n", 200),
                ("forwarded: for=unknown, for=\"[2001:db8::2]\"\r\n", 429),
                ("x-forwarded-for: 1.1.1.1\r\n", 200),
                ("x-forwarded-for: 2.2.2.2\r\n", 429),
            ],
        ),
        (
            &["--trust", "127.0.0.0/8", "--client-ip-header", "cf-connecting-ip", "--key", "peer-ip+path"],
            &[
                ("cf-connecting-ip: 1.1.1.1\r\n", 200),
                ("cf-connecting-ip: 2.2.2.2\r\nx-forwarded-for: 1.1.1.1\r\n", 200),
            ],
        ),
        (&["--allow", "127.0.0.0/8"], &[("", 200), ("", 200), ("", 200)]),
        (
            &["--allow", "5.0.0.0/8", "--trust", "127.0.0.1"],
            &[("x-forwarded-for: 5.1.1.1\r\n", 200), ("x-forwarded-for: 5.1.1.1\r\n", 200), ("", 200), ("", 429)],
        ),
    ] {
        let server = Server::start(&[&["--policy", "1/hour"], flags].concat());
        for (headers, expected) in requests {
            assert_eq!(server.status("/", headers), *expected, "{flags:?}: {headers}");
        }
    }
}

#[test]
fn headers_flag_takes_the_options_of_the_fields() {
    let policy = ["--policy", "fixed-window 2/365d"];
    let (names, suffixed) = (["x-ratelimit-remaining", "x-ratelimit-reset"], "x-ratelimit-remaining-tokens");
    for flags in [
        // The options change the default.
        &["--headers", "suffix=tokens", "--headers", "retry-jitter=100", "--headers", "reset-in-seconds"][..],
        &["--headers", "x, suffix=tokens, reset-in-seconds", "--headers", "retry-jitter=100"],
        &["--headers", "draft11", "--headers", "X,Suffix=tokens,retry-jitter=100,reset-in-seconds"],
    ] {
        let server = Server::start(&[&policy[..], flags].concat());
        let (_, head) = server.get("/", "");
        assert_eq!((names.map(|name| field(&head, name)), field(&head, suffixed)), ([None; 2], Some("1")), "{head}");
        let reset: u32 = field(&head, "x-ratelimit-reset-tokens").unwrap().parse().unwrap();
        assert!((1..=365 * 86_400).contains(&reset), "{flags:?}: {head}");
        assert_eq!(field(&head, "ratelimit").is_some(), flags.contains(&"draft11"), "{flags:?}: {head}");
        server.get("/", "");
        let (_, refusal) = server.get("/", "");
        let number = |name| field(&refusal, name).unwrap().parse::<u32>().unwrap();
        // The share of the jitter is random, but a second of a year is added almost always.
        assert!(number("retry-after") > number("x-ratelimit-reset-tokens"), "{flags:?}: {refusal}");
    }
    // The jitter does not add fields.
    let server = Server::start(&[&policy[..], &["--headers", "none", "--headers", "retry-jitter=100"]].concat());
    assert_eq!(names.map(|name| field(&server.get("/", "").1, name).is_some()), [false; 2]);
}

#[test]
fn headers_flag_selects_the_header_fields() {
    let policy = ["--policy", "fixed-window 2/hour"];
    let names = [
        "x-ratelimit-remaining",
        "x-ratelimit-reset",
        "ratelimit",
        "ratelimit-policy",
        "ratelimit-remaining",
        "ratelimit-reset",
    ];
    for (flags, expected) in [
        (&["--headers", "none"][..], [false, false, false, false, false, false]),
        (&["--headers", "x"], [true, true, false, false, false, false]),
        (&["--headers", "draft11"], [false, false, true, true, false, false]),
        (&["--headers", "draft6"], [false, false, false, false, true, true]),
        (&["--headers", "draft11", "--headers", "x", "--headers", "draft6"], [true; 6]),
    ] {
        let server = Server::start(&[&policy[..], flags].concat());
        for _ in 0..3 {
            let (_, head) = server.get("/", "");
            assert_eq!(names.map(|name| field(&head, name).is_some()), expected, "{flags:?}: {head}");
        }
        assert_eq!(field(&server.get("/", "").1, "cache-control"), Some("no-store"));
    }
    let server = Server::start(&[&policy[..], &["--headers", "draft11"]].concat());
    let (_, head) = server.get("/", "");
    assert_eq!(field(&head, "ratelimit"), Some("\"fixed-window 2/hour\";r=1;t=3600"));
}

#[test]
fn rejection_flag_selects_the_response() {
    for (kind, status, content_type) in [
        ("text", 429, Some("text/plain; charset=utf-8")),
        ("json", 429, Some("application/problem+json")),
        ("empty", 429, None),
        ("grpc", 200, Some("application/grpc")),
    ] {
        let server = Server::start(&["--policy", "1/hour", "--rejection", kind]);
        server.get("/", "");
        let (answered, head) = server.get("/", "");
        assert_eq!((answered, field(&head, "content-type")), (status, content_type), "{kind}");
        assert_eq!(field(&head, "grpc-status"), (kind == "grpc").then_some("8"));
        assert!(field(&head, "retry-after").is_some(), "{kind}");
    }
}

#[test]
fn shadow_mode_refuses_nothing_and_logs_refusals() {
    let mut server = Server::start_with(&["--policy", "1/hour", "--shadow"], Stdio::piped());
    for _ in 0..3 {
        let (status, head) = server.get("/", "");
        assert_eq!((status, field(&head, "x-ratelimit-limit")), (200, None));
    }
    let log = BufReader::new(server.child.stderr.take().unwrap());
    let line = log.lines().map(Result::unwrap).find(|line| line.contains("refused")).unwrap();
    assert!(line.contains("shadow=true") && !line.contains("127.0.0.1"), "{line}");
}

#[test]
fn charge_status_flag_selects_the_statuses_that_are_charged() {
    for (flags, requests) in [
        (
            &["--charge-status", "401"][..],
            [("/", 200), ("/status/401", 401), ("/status/404", 404), ("/status/401", 401)],
        ),
        (
            &["--charge-status", "4XX, 499"],
            [("/", 200), ("/status/401", 401), ("/status/503", 503), ("/status/404", 404)],
        ),
        (
            &["--charge-status", "5xx,401", "--charge-status", "403"],
            [("/status/404", 404), ("/status/401", 401), ("/", 200), ("/status/403", 403)],
        ),
    ] {
        let server = Server::start(&[&["--policy", "2/hour"], flags].concat());
        for (path, expected) in requests {
            assert_eq!(server.status(path, ""), expected, "{flags:?}: {path}");
        }
        assert_eq!(server.status("/", ""), 429, "{flags:?}: two are charged");
    }
}

#[test]
fn clear_status_flag_selects_the_statuses_that_clear_the_client() {
    let limits = ["--policy", "lockout 3/h for 1h", "--charge-status", "401", "--clear-status", "2xx,304"];
    let server = Server::start(&limits);
    for path in ["/status/401", "/status/401", "/", "/status/401", "/status/401", "/status/304"] {
        assert_ne!(server.status(path, ""), 429, "{path}");
    }
    for _ in 0..3 {
        assert_eq!(server.status("/status/401", ""), 401);
    }
    assert_eq!(server.status("/", ""), 429, "three failures without a success lock the client");
}

#[test]
fn settle_header_flag_corrects_the_cost_to_the_value_in_the_response() {
    let server = Server::start(&[
        "--policy",
        "token-bucket 60/hour burst 100",
        "--cost-header",
        "x-estimate",
        "--settle-header",
        "X-Cost",
    ]);
    let get = |path: &str| server.get(path, "x-estimate: 10\r\n");
    for (path, cost, remaining) in [
        ("/status/200?cost=4", Some("4"), "96"),
        ("/status/404?a=b&cost=50", Some("50"), "46"),
        ("/status/200", None, "36"),
        ("/status/200?cost=many", None, "26"),
        ("/?cost=0", Some("0"), "26"),
        ("/status/200?cost=86", Some("86"), "0"),
    ] {
        let (_, head) = get(path);
        assert_eq!((field(&head, "x-cost"), field(&head, "x-ratelimit-remaining")), (cost, Some(remaining)), "{path}");
    }
    let (status, head) = get("/status/200?cost=0");
    // The bucket owes 60 units, and the hit needs 10. At 60 units per hour, that takes 70 minutes.
    let retry_after: u32 = field(&head, "retry-after").unwrap().parse().unwrap();
    assert!(status == 429 && (4_100..=4_200).contains(&retry_after), "{head}");
}

#[test]
fn lints_are_printed_to_stderr() {
    let mut server = Server::start_with(&["--trust", "0.0.0.0/0"], Stdio::piped());
    server.get("/", "");
    let log = BufReader::new(server.child.stderr.take().unwrap());
    let line = log.lines().map(Result::unwrap).next().unwrap();
    assert!(line.contains("WARN") && line.contains("RL002"), "{line}");
}

/// A command line of the README or a guide that starts this server.
struct Line {
    /// The features that the server is built with.
    features: Option<String>,
    flags: Vec<String>,
}

fn documented_lines() -> Vec<Line> {
    let commands = example_commands();
    let servers = commands.iter().filter_map(|command| command.strip_prefix("server "));
    let lines: Vec<Line> = servers
        .map(|line| {
            let (cargo, server) = line.split_once("-- ").unwrap();
            // The lines have only double quotes and no escapes, so every second part is quoted.
            let parts = server.split('"').enumerate();
            let flags = parts.flat_map(|(at, part)| match at % 2 {
                0 => part.split_whitespace().collect::<Vec<_>>(),
                _ => vec![part],
            });
            let features = cargo.strip_prefix("--features ").map(|features| features.trim().to_owned());
            Line { features, flags: flags.map(str::to_owned).collect() }
        })
        .collect();
    assert!(lines.len() >= 16, "the lines were found");
    lines
}

/// Returns `true` if this server was built with a feature of the examples.
fn built_with(feature: &str) -> bool {
    match feature {
        "redis" => cfg!(feature = "redis"),
        "memcached" => cfg!(feature = "memcached"),
        "etcd" => cfg!(feature = "etcd"),
        "postgres" => cfg!(feature = "postgres"),
        "sqlite" => cfg!(feature = "sqlite"),
        _ => panic!("unknown feature {feature}"),
    }
}

#[test]
fn documented_command_lines_run() {
    // The documented file would keep the hits of earlier runs.
    let file = std::env::temp_dir().join(format!("tower-ratelimit-documented-{}.db", std::process::id()));
    for Line { features, flags } in documented_lines() {
        if features.as_deref().is_none_or(built_with) {
            let flags: Vec<String> = flags
                .iter()
                .map(|flag| flag.replace("sqlite:limits.db", &format!("sqlite:{}", file.display())))
                .collect();
            let server = Server::start(&flags.iter().map(String::as_str).collect::<Vec<_>>());
            assert_eq!(server.status("/", ""), 200, "{flags:?}");
        }
    }
    for ending in ["", "-wal", "-shm", "-reserve"] {
        let _ = std::fs::remove_file(format!("{}{ending}", file.display()));
    }
}

/// Without a feature, the error names the features that the documented command line has.
#[test]
fn storage_without_its_feature_is_rejected_with_a_command_that_enables_it() {
    for Line { features, flags } in documented_lines() {
        let Some(feature) = features.filter(|feature| !built_with(feature)) else { continue };
        let output = refused(&flags.iter().map(String::as_str).collect::<Vec<_>>());
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{flags:?}");
        let url = if feature == "sqlite" { "sqlite:limits.db".to_owned() } else { format!("{feature}://...") };
        let command = format!("run: cargo run --example server --features {feature} -- --storage {url}");
        assert!(error.contains(&command), "{flags:?}: {error}");
    }
}

#[cfg(feature = "redis")]
#[test]
fn fallback_decides_with_a_divided_quota_during_an_outage() {
    // A port without a server.
    let away = ["--storage", "redis://127.0.0.1:1", "--fallback", "memory", "--replicas", "3", "--on-error", "refuse"];
    let server = Server::start_with(&[&away[..], &["--policy", "fixed-window 9/hour"]].concat(), Stdio::null());
    for left in (0..3).rev() {
        let (status, head) = server.get("/", "");
        assert_eq!(status, 200, "{head}");
        assert!(head.contains("x-ratelimit-limit: 3\r\n"), "{head}");
        assert!(head.contains(&format!("x-ratelimit-remaining: {left}\r\n")), "{head}");
    }
    assert_eq!(server.status("/", ""), 429);
}

#[test]
fn help_lists_the_flags() {
    let output = refused(&["--help"]);
    let help = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success());
    for flag in [
        "--listen",
        "--policy",
        "--policies",
        "--tier-header",
        "--in-flight",
        "--lease",
        "--deny-cache",
        "--storage",
        "--on-error",
        "--timeout",
        "--fallback",
        "--replicas",
        "--key",
        "--cost-header",
        "--route",
        "--trust",
        "--client-ip-header",
        "--allow",
        "--headers",
        "--rejection",
        "--shadow",
        "--charge-status",
        "--clear-status",
        "--settle-header",
    ] {
        assert!(help.contains(flag), "{flag}: {help}");
    }
}

/// Asserts that the server rejects these flags with one line that contains the given part.
fn assert_refused_with_one_line(cases: &[(&[&str], &str)]) {
    for (flags, part) in cases {
        let output = refused(flags);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {error}");
        assert!(error.contains(part) && error.trim_end().lines().count() == 1, "{flags:?}: {error}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn invalid_flags_are_rejected_with_one_clear_line() {
    assert_refused_with_one_line(&[
        (&["--policy", "10/fortnight"], "\"fortnight\""),
        (&["--policy"], "--policy"),
        (&["--wat", "1"], "--wat"),
        (&["--in-flight", "many"], "for example 20"),
        (&["--on-error", "panic"], "admit or refuse"),
        (&["--fallback", "memory", "--replicas", "3"], "--storage redis://localhost"),
        (&["--storage", "disk://"], "memory://"),
        (&["--key", "cookie"], "\"cookie\""),
        (&["--key", "header:a b"], "\"a b\""),
        (&["--key", ""], "peer-ip"),
        (&["--cost-header", "a b"], "\"a b\""),
        (&["--route", "login=1/s"], "/login=5/minute"),
        (&["--route", "/login"], "/login=5/minute"),
        (&["--route", "/a=1/s", "--route", "/a=2/s"], "/a is set twice"),
        (&["--route", "/login=1/x"], "\"x\""),
        (&["--route", "/a/{b}=1/s"], "without parameters"),
        (&["--policy", "limit \"a\" 1/s; \"a\" 2/s"], "another limit has the same name"),
        (&["--trust", "10.0.0.0/40"], "10.0.0.0/40"),
        (&["--trust", "proxy"], "10.0.0.0/8"),
        (&["--client-ip-header", "x-real-ip"], "--trust 10.0.0.0/8"),
        (&["--trust", "10.0.0.0/8", "--client-ip-header", "a b"], "\"a b\""),
        (&["--allow", "x"], "10.0.0.0/8"),
        (&["--headers", "y"], "--headers: cannot read the header fields \"y\" in \"y\": expected x, reset-in-seconds"),
        (&["--headers", "suffix=Tokens!"], "a suffix is 1 to 32 of the characters a to z"),
        (&["--headers", "x", "--headers", "retry-jitter=101"], "the jitter is a percentage from 0 to 100"),
        (&["--rejection", "xml"], "text, json, empty or grpc"),
        (&["--charge-status", "6xx"], "\"6xx\""),
        (&["--charge-status", "401,"], "a status like 401"),
        (&["--clear-status", "ok"], "a class like 4xx"),
        (&["--settle-header", "a b"], "\"a b\""),
        (&["--settle-header", "x-cost", "--charge-status", "401"], "exclude each other"),
        (&["--policy", "shadow 1/day"], "first limit"),
        (&["--listen", "here"], "127.0.0.1:3000"),
        (&["extra"], "extra"),
    ]);
}

#[cfg(feature = "servers")]
#[test]
fn invalid_flags_of_shared_storages_are_rejected_with_one_clear_line() {
    assert_refused_with_one_line(&[
        (&["--storage", "redis://"], "redis://"),
        (&["--storage", "memcached://"], "memcached://"),
        (&["--storage", "etcd://"], "etcd://"),
        (&["--storage", "redis://h:1", "--timeout", "soon"], "--timeout: cannot read the URL"),
        (&["--storage", "redis://h:1", "--fallback", "memory"], "--replicas 3"),
        (&["--storage", "redis://h:1", "--fallback", "disk", "--replicas", "3"], "--fallback memory"),
        (&["--storage", "redis://h:1", "--replicas", "3"], "--fallback memory"),
        (&["--storage", "redis://h:1", "--fallback", "memory", "--replicas", "0"], "for example 3"),
        (&["--storage", "redis://h:1", "--fallback", "memory", "--replicas", "few"], "\"few\""),
    ]);
}

/// A refusal cache and leases need a server, and not every strategy can be leased.
#[cfg(feature = "redis")]
#[test]
fn invalid_cache_and_lease_flags_suggest_valid_ones() {
    for (flags, expected) in [
        (&["--deny-cache"][..], "--deny-cache needs a server"),
        (
            &["--lease", "100", "--policy", "fixed-window 9/minute"],
            "name a server, for example --storage redis://localhost",
        ),
        (
            &["--lease", "0", "--storage", "redis://localhost"],
            "--lease: cannot read \"0\": write a number of units, for example 100",
        ),
        (&["--lease", "many"], "--lease: cannot read \"many\": write a number of units, for example 100"),
        (
            &["--lease", "100", "--storage", "redis://localhost", "--policy", "elastic-window 9/minute"],
            "use a fixed, moving or sliding window or a token bucket",
        ),
    ] {
        let output = refused(flags);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && error.contains(expected), "{flags:?}: {error}");
    }
}

#[cfg(feature = "sqlite")]
#[test]
fn counts_in_sqlite_survive_a_killed_process() {
    let folder = std::env::temp_dir().join(format!("tower-ratelimit-example-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let url = format!("sqlite:{}", folder.join("limits.db").display());
    let flags = ["--storage", &url, "--policy", "fixed-window 5/day", "--timeout", "5s"];
    let mut server = Server::start(&flags);
    assert_eq!([200; 3].map(|_| server.status("/", "")), [200; 3]);
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    let server = Server::start(&flags);
    assert_eq!([(); 3].map(|()| server.status("/", "")), [200, 200, 429]);
    drop(server);
    std::fs::remove_dir_all(folder).unwrap();
}

/// A hit without a reply may have been counted, so the clients count failed hits separately.
#[cfg(feature = "servers")]
#[test]
fn two_processes_on_postgres_share_the_limit_while_postgres_restarts() {
    const LIMIT: usize = 200;
    let mut postgres = common::servers::Postgres::start(&[]);
    let (url, policy) = (postgres.url(), format!("fixed-window {LIMIT}/day"));
    let flags = ["--storage", &url, "--policy", &policy, "--key", "global", "--on-error", "refuse", "--timeout", "1s"];
    let servers = [(); 2].map(|()| Server::start(&flags));
    let (admitted, failed) = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..4)
            .map(|client| {
                let server = &servers[client % 2];
                scope.spawn(move || {
                    let (mut admitted, mut failed) = (0, 0);
                    loop {
                        match server.get("/", "") {
                            (200, _) => admitted += 1,
                            // A contended hit has a wait of 1 second. A hit above the limit waits
                            // until the next day.
                            (429, head) if head.contains("retry-after: 1\r\n") => {}
                            (429, _) => return (admitted, failed),
                            (503, _) => failed += 1,
                            other => panic!("{other:?}"),
                        }
                    }
                })
            })
            .collect();
        for _ in 0..2 {
            std::thread::sleep(std::time::Duration::from_millis(200));
            postgres.restart();
        }
        let counts: Vec<(usize, usize)> = clients.into_iter().map(|client| client.join().unwrap()).collect();
        counts.into_iter().fold((0, 0), |(admitted, failed), one| (admitted + one.0, failed + one.1))
    });
    // A failed hit may have been counted, but an admitted one always is.
    assert!(admitted <= LIMIT && admitted + failed >= LIMIT, "{admitted} admitted, {failed} failed");
}
