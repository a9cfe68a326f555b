//! The example server from outside: its flags, its output, its answers.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;

/// The server's executable, built if it is not there yet.
fn executable() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        let built = Command::new(env!("CARGO"))
            .args(["build", "--quiet", "--example", "server", "--manifest-path"])
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
            .status();
        assert!(built.is_ok_and(|status| status.success()), "the example server does not build");
        let deps = std::env::current_exe().unwrap();
        deps.parent().unwrap().parent().unwrap().join("examples").join("server")
    });
    built.clone()
}

struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(flags: &[&str]) -> Self {
        let mut child = Command::new(executable())
            .args(["--listen", "127.0.0.1:0"])
            .args(flags)
            .stdout(Stdio::piped())
            .spawn()
            .expect("the server starts");
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let first = lines.next().unwrap().unwrap();
        let address = first.strip_prefix("listening on http://").expect("the first line says where").to_owned();
        let second = lines.next().unwrap().unwrap();
        assert!(second.contains(&format!("curl -i http://{address}/")), "{second}");
        Self { child, address }
    }

    /// The status, and the head in lower case.
    fn get(&self, path: &str, headers: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let head = answer.split("\r\n\r\n").next().unwrap().to_lowercase();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), head)
    }

    fn status(&self, path: &str, headers: &str) -> u16 {
        self.get(path, headers).0
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn refused(flags: &[&str]) -> Output {
    Command::new(executable()).args(flags).output().unwrap()
}

#[test]
fn serves_and_refuses_by_default() {
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
fn several_policies_are_limits_of_one() {
    let server = Server::start(&["--policy", "fixed-window 3/hour", "--policy", "5/hour, 7/day"]);
    let (_, head) = server.get("/", "");
    assert!(head.contains("x-ratelimit-limit: 3\r\n") && head.contains("x-ratelimit-remaining: 2\r\n"), "{head}");
}

#[test]
fn routes_are_stacked_inside() {
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
}

#[test]
fn keys_are_what_the_flag_says() {
    for (key, asks) in [
        ("global", [("/", "", 200), ("/b", "a: 1\r\n", 429)]),
        ("path", [("/", "", 200), ("/b", "", 200)]),
        ("method", [("/", "", 200), ("/b", "", 429)]),
        ("header:a", [("/", "a: 1\r\n", 200), ("/", "a: 2\r\n", 200)]),
        ("header:a+path", [("/", "a: 1\r\n", 200), ("/", "", 400)]),
        ("peer-ip+header:a", [("/", "a: 1\r\n", 200), ("/", "a: 1\r\n", 429)]),
    ] {
        let server = Server::start(&["--policy", "1/hour", "--key", key]);
        for (path, headers, expected) in asks {
            assert_eq!(server.status(path, headers), expected, "{key}: {path} {headers}");
        }
    }
}

#[test]
fn requests_cost_what_the_header_says() {
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
    assert!(status == 429 && !head.contains("retry-after"), "what can never fit is not told to come back: {head}");
}

#[test]
fn help_names_every_flag() {
    let output = refused(&["--help"]);
    let help = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success());
    for flag in ["--listen", "--policy", "--storage", "--key", "--cost-header", "--route"] {
        assert!(help.contains(flag), "{flag}: {help}");
    }
}

#[test]
fn bad_flags_are_one_clear_line() {
    for (flags, part) in [
        (&["--policy", "10/fortnight"][..], "\"fortnight\""),
        (&["--policy"], "--policy"),
        (&["--wat", "1"], "--wat"),
        (&["--storage", "redis://localhost/"], "feature \"redis\""),
        (&["--storage", "valkey+cluster://h:1"], "feature \"redis\""),
        (&["--storage", "memcached://h:1"], "feature \"memcached\""),
        (&["--storage", "etcd://h:1"], "feature \"etcd\""),
        (&["--storage", "disk://"], "memory://"),
        (&["--key", "cookie"], "\"cookie\""),
        (&["--key", "header:a b"], "\"a b\""),
        (&["--key", ""], "peer-ip"),
        (&["--cost-header", "a b"], "\"a b\""),
        (&["--route", "login=1/s"], "/login=5/minute"),
        (&["--route", "/login"], "/login=5/minute"),
        (&["--route", "/login=1/x"], "\"x\""),
        (&["--listen", "here"], "127.0.0.1:3000"),
        (&["extra"], "extra"),
    ] {
        let output = refused(flags);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {error}");
        assert!(error.contains(part) && error.trim_end().lines().count() == 1, "{flags:?}: {error}");
        assert!(output.stdout.is_empty());
    }
}
