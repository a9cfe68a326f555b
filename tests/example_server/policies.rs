//! The policies file of the example server.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::example_process::Server;

use crate::{field, refused};

/// The longest wait for a change to take effect.
const DEADLINE: Duration = Duration::from_secs(30);

/// A policies file in its own folder.
struct PoliciesFile {
    folder: PathBuf,
    path: PathBuf,
}

impl PoliciesFile {
    fn new(test: &str, content: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("policies-{test}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("limits.toml");
        fs::write(&path, content).unwrap();
        Self { folder, path }
    }

    fn path(&self) -> &str {
        self.path.to_str().unwrap()
    }

    /// Writes the file in place.
    fn write(&self, content: &str) {
        fs::write(&self.path, content).unwrap();
    }

    /// Replaces the file by another one, as many editors do.
    fn replace(&self, content: &str) {
        let new = self.folder.join("limits.toml.new");
        fs::write(&new, content).unwrap();
        fs::rename(new, &self.path).unwrap();
    }

    fn server(&self, flags: &[&str]) -> Server {
        Server::start(&[&["--policies", self.path()], flags].concat())
    }
}

impl Drop for PoliciesFile {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn hangup(server: &Server) {
    let pid = server.child.id().to_string();
    assert!(Command::new("kill").args(["-HUP", &pid]).status().unwrap().success());
}

/// Returns the limit in the response's header fields.
fn limit(server: &Server, path: &str, headers: &str) -> Option<String> {
    let (status, head) = server.get(path, headers);
    assert!(matches!(status, 200 | 429), "{head}");
    field(&head, "x-ratelimit-limit").map(str::to_owned)
}

fn wait_until(what: &str, mut is_done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_done() {
        assert!(start.elapsed() < DEADLINE, "{what}");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn default_routes_and_tiers_have_the_limits_of_the_policies_file() {
    let content = "default = \"10/hour\"\n[routes]\n\"/login\" = \"fixed-window 5/hour\"\n\
                   [tiers]\npaid = \"token-bucket 100/hour burst 200\"\n";
    let file = PoliciesFile::new("limits", content);
    let server = file.server(&["--headers", "x", "--headers", "draft11"]);
    assert_eq!(limit(&server, "/", "").as_deref(), Some("10"));
    assert_eq!(limit(&server, "/", "x-tier: paid\r\n").as_deref(), Some("200"));
    assert_eq!(limit(&server, "/", "x-tier: unknown\r\n").as_deref(), Some("10"));
    assert_eq!(limit(&server, "/login", "").as_deref(), Some("5"));
    let (_, head) = server.get("/login", "x-tier: paid\r\n");
    assert_eq!(field(&head, "ratelimit-policy"), Some("\"/login\";q=5;w=3600, \"paid\";q=200;w=7200"), "{head}");

    let server = file.server(&["--tier-header", "x-plan"]);
    assert_eq!(limit(&server, "/", "x-plan: paid\r\n").as_deref(), Some("200"));
}

const ALSO: &str = "default = \"fixed-window 3/hour\"\n\
                    [[also]]\npolicy = \"\\\"tenant\\\": fixed-window 5/hour\"\nkey = \"header:x-tenant\"\n\
                    [[also]]\npolicy = \"\\\"all\\\": fixed-window 12/hour\"\nkey = \"global\"\n";

/// Several keys are decided together: a request spends from all of them or from none.
#[test]
fn policies_with_keys_of_their_own_are_all_or_none() {
    let file = PoliciesFile::new("also", ALSO);
    for flags in [&[][..], &["--in-order"]] {
        let server = file.server(&[&["--key", "header:x-user", "--headers", "draft11"], flags].concat());
        let ask = |user: &str, tenant: &str| server.get("/", &format!("x-user: {user}\r\nx-tenant: {tenant}\r\n"));
        for expected in [200, 200, 200, 429, 429] {
            assert_eq!(ask("alice", "acme").0, expected);
        }
        // The refusals of alice have spent nothing of her tenant.
        for expected in [200, 200, 429] {
            assert_eq!(ask("bob", "acme").0, expected);
        }
        for (user, admitted) in [("carol", 3), ("dave", 2), ("erin", 0)] {
            let statuses: Vec<_> = (0..4).map(|_| ask(user, "umbrella").0).collect();
            assert_eq!(statuses.iter().filter(|status| **status == 200).count(), admitted, "{user}");
        }
        let (_, head) = ask("erin", "another");
        let limits = "\"default\";r=2;t=3600, \"tenant\";r=4;t=3600, \"all\";r=1;t=";
        assert!(field(&head, "ratelimit").is_some_and(|field| field.starts_with(limits)), "{head}");
    }
}

/// The users of each tenant are counted separately, and the tenant over all of its users.
#[test]
fn keys_are_within_the_outer_key_of_the_file() {
    let within = "within = \"header:x-tenant\"\n[[also]]";
    let file = PoliciesFile::new("within", &ALSO.replacen("[[also]]", within, 1));
    let flags = ["--policies", file.path(), "--key", "header:x-user"];
    let mut server = Server::start_with(&flags, Stdio::piped());
    let mut log = BufReader::new(server.child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let ask = |user: &str, tenant: &str| server.get("/", &format!("x-user: {user}\r\nx-tenant: {tenant}\r\n")).0;
    for (user, tenant, expected) in
        [("alice", "acme", [200, 200, 200, 429]), ("alice", "umbrella", [200, 200, 200, 429])]
    {
        assert_eq!([(); 4].map(|()| ask(user, tenant)), expected, "{user} of {tenant}");
    }
    assert_eq!([(); 3].map(|()| ask("bob", "acme")), [200, 200, 429], "five of the tenant");
    file.replace(ALSO);
    assert!(log.any(|line| line.contains("`within` has changed: restart the server")));
    let file = PoliciesFile::new("within-unknown", &ALSO.replacen("[[also]]", "within = \"tenant\"\n[[also]]", 1));
    let error = String::from_utf8(refused(&["--policies", file.path()]).stderr).unwrap();
    assert!(error.contains("--policies: within: unknown key \"tenant\""), "{error}");
}

#[test]
fn keys_of_a_policies_file_cannot_change_while_the_server_runs() {
    let file = PoliciesFile::new("also-changes", ALSO);
    let mut server = Server::start_with(&["--policies", file.path(), "--key", "header:x-user"], Stdio::piped());
    let mut log = BufReader::new(server.child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let shown = || limit(&server, "/", "x-user: alice\r\nx-tenant: acme\r\n");
    file.replace(&ALSO.replace("key = \"global\"", "key = \"path\"").replace("3/hour", "2/hour"));
    assert!(log.any(|line| line.contains("the keys of [[also]] have changed: restart the server")));
    assert_eq!(shown().as_deref(), Some("3"), "the old file stays in effect");
    file.replace(&ALSO.replace("3/hour", "2/hour"));
    wait_until("an amount that changes", || shown().as_deref() == Some("2"));
}

#[test]
fn changed_policies_file_is_reloaded_without_a_signal() {
    let file = PoliciesFile::new("poll", "default = \"fixed-window 10/hour\"\n");
    let server = file.server(&[]);
    assert_eq!(limit(&server, "/login", "").as_deref(), Some("10"));
    file.write("default = \"fixed-window 1000/hour\"\n");
    wait_until("a file that is written in place", || limit(&server, "/", "").as_deref() == Some("1000"));
    file.replace("default = \"fixed-window 1000/hour\"\n[routes]\n\"/login\" = \"fixed-window 500/hour\"\n");
    wait_until("a route that appears", || limit(&server, "/login", "").as_deref() == Some("500"));
    assert_eq!(limit(&server, "/other", "").as_deref(), Some("1000"));
    file.replace("default = \"fixed-window 1000/hour\"\n");
    wait_until("a route that disappears", || limit(&server, "/login", "").as_deref() == Some("1000"));
}

#[test]
fn invalid_policies_file_at_start_is_an_error_with_line_and_column() {
    for (content, place, reason) in [
        ("default = \"10/fortnight\"\n", "line 1, column 11", "\"fortnight\""),
        ("default = \"10/hour\"\n[routes]\n\"/a\" = \"5/hour\"\n\"/b\" = \"fixd 1/s\"\n", "line 4, column 8", "fixd"),
        ("default = \"10/hour\"\n\n[tiers\n", "line 3, column", ""),
        ("default = \"10/hour\"\nroute = 1\n", "line 2, column 1", "unknown field `route`"),
        ("default = \"10/hour\"\n[routes]\nlogin = \"1/s\"\n", "line 2, column 1", "invalid path \"login\""),
        ("", "line 1, column 1", "missing field `default`"),
    ] {
        let file = PoliciesFile::new("bad", content);
        let output = refused(&["--policies", file.path()]);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.starts_with("server: --policies: ") && error.contains(file.path()), "{error}");
        assert!(error.contains(place) && error.contains(reason), "{content}: {error}");
    }
    let output = refused(&["--policies", "/no/such/file.toml"]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("cannot read /no/such/file.toml: No such file"), "{error}");
    let file = PoliciesFile::new("both", "default = \"10/hour\"\n");
    let output = refused(&["--policies", file.path(), "--route", "/a=1/s"]);
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn invalid_policies_file_at_reload_keeps_the_old_limits_and_logs_the_reason() {
    let file = PoliciesFile::new("reload", "default = \"fixed-window 1000/hour\"\n");
    let mut server = Server::start_with(&["--policies", file.path()], Stdio::piped());
    let mut log = BufReader::new(server.child.stderr.take().unwrap()).lines().map(Result::unwrap);
    file.replace("default = \"fixed-window 1000/hour\"\n[tiers]\npaid = \"10/fortnight\"\n");
    let line = log.next().unwrap();
    for part in ["WARN", "cannot reload the policies, the old ones remain in effect", "line 3, column 8", "fortnight"] {
        assert!(line.contains(part), "{line}");
    }
    assert_eq!(limit(&server, "/", "").as_deref(), Some("1000"));
    fs::remove_file(&file.path).unwrap();
    hangup(&server);
    let line = log.next().unwrap();
    assert!(line.contains("cannot read"), "{line}");
    assert_eq!(limit(&server, "/", "").as_deref(), Some("1000"));
    file.replace("default = \"fixed-window 2000/hour\"\n");
    let line = log.next().unwrap();
    assert!(line.contains("INFO") && line.contains("policies reloaded"), "{line}");
    assert_eq!(limit(&server, "/", "").as_deref(), Some("2000"));
}

/// 64 connections send requests while the file changes 100 times between two limits.
#[test]
fn reloads_under_load_lose_no_request_and_no_unit() {
    const CONNECTIONS: usize = 64;
    const CHANGES: u32 = 100;
    let limits = [1_000_000, 2_000_000];
    let content = |change: u32| format!("default = \"fixed-window {}/day\"\n", limits[(change % 2) as usize]);
    let file = PoliciesFile::new("load", &content(0));
    let server = file.server(&["--key", "global"]);
    let (is_over, admitted) = (AtomicBool::new(false), AtomicU32::new(0));
    let seen: BTreeSet<u32> = thread::scope(|scope| {
        let clients: Vec<_> = (0..CONNECTIONS)
            .map(|_| {
                scope.spawn(|| {
                    let mut seen = BTreeSet::new();
                    let mut connection = connect(server.address());
                    while !is_over.load(Ordering::Relaxed) {
                        let head = exchange(&mut connection);
                        assert!(head.starts_with("http/1.1 200"), "{head}");
                        admitted.fetch_add(1, Ordering::Relaxed);
                        seen.insert(field(&head, "x-ratelimit-limit").unwrap().parse().unwrap());
                    }
                    seen
                })
            })
            .collect();
        for change in 1..=CHANGES {
            if change % 2 == 0 {
                file.write(&content(change));
            } else {
                file.replace(&content(change));
            }
            hangup(&server);
            let expected = limits[(change % 2) as usize].to_string();
            wait_until("the change takes effect", || {
                admitted.fetch_add(1, Ordering::Relaxed);
                limit(&server, "/", "").as_deref() == Some(&*expected)
            });
        }
        is_over.store(true, Ordering::Relaxed);
        clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
    });
    assert_eq!(seen, BTreeSet::from(limits));
    let (_, head) = server.get("/", "");
    let spent = admitted.into_inner() + 1;
    let remaining: u32 = field(&head, "x-ratelimit-remaining").unwrap().parse().unwrap();
    assert_eq!(remaining, limits[(CHANGES % 2) as usize] - spent);
}

fn connect(address: &str) -> BufReader<TcpStream> {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    BufReader::new(stream)
}

/// Sends a request and returns the head of the response in lower case.
fn exchange(connection: &mut BufReader<TcpStream>) -> String {
    connection.get_mut().write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        assert_ne!(connection.read_line(&mut head).unwrap(), 0, "the server closed the connection: {head}");
    }
    let head = head.to_lowercase();
    let length = field(&head, "content-length").unwrap().parse().unwrap();
    connection.read_exact(&mut vec![0; length]).unwrap();
    head
}
