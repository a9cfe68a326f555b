//! etcd, or the program that `TOWER_RATELIMIT_ETCD_SERVER` names, with one member or three.

use std::fs;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};

use super::process::{self, Folder, Process};
use super::{STARTS_WITHIN, free_port, wait_until};

/// The environment variable that names a program to start instead of `etcd`.
const PROGRAM: &str = "TOWER_RATELIMIT_ETCD_SERVER";

/// The Debian package of the server.
const PACKAGES: &str = "etcd-server";

/// A cluster of members, at least one.
#[derive(Debug)]
pub struct Etcd {
    pub members: Vec<Member>,
}

/// A member of the cluster.
#[derive(Debug)]
pub struct Member {
    /// `None` between `kill` and `restart`.
    process: Option<Process>,
    folder: PathBuf,
    name: String,
    clients: u16,
    peers: u16,
    health: u16,
    cluster: String,
    options: Vec<String>,
}

impl Etcd {
    pub fn start(members: usize) -> Self {
        Self::start_with(members, &[])
    }

    /// Three members with a long election timeout, for tests without outages on a busy machine.
    pub fn calm() -> Self {
        Self::start_with(3, &["--heartbeat-interval", "200", "--election-timeout", "2000"])
    }

    /// Starts members with additional options.
    pub fn start_with(members: usize, options: &[&str]) -> Self {
        loop {
            let mut members: Vec<Member> = (0..members).map(|number| Member::new(number, options)).collect();
            let names: Vec<String> =
                members.iter().map(|member| format!("{}={}", member.name, member.peers())).collect();
            for member in &mut members {
                member.cluster = names.join(",");
                member.begin();
            }
            let mut etcd = Self { members };
            // Starts the members again if another process has taken a port.
            if etcd.members.iter_mut().all(Member::becomes_healthy) {
                return etcd;
            }
        }
    }

    pub fn url(&self) -> String {
        format!("etcd://{}", self.hosts())
    }

    pub fn hosts(&self) -> String {
        let hosts: Vec<String> = self.members.iter().map(|member| format!("127.0.0.1:{}", member.clients)).collect();
        hosts.join(",")
    }

    /// Returns the index of the leader among the running members.
    pub fn leader(&self) -> usize {
        let mut leader = None;
        wait_until("the members have a leader", || {
            let running = self.members.iter().enumerate().filter(|(_, member)| member.process.is_some());
            leader = running.map(|(at, member)| (at, member.status())).find_map(|(at, status)| {
                let status = status.ok()?;
                (status["leader"] == status["header"]["member_id"]).then_some(at)
            });
            leader.is_some()
        });
        leader.unwrap()
    }

    /// Calls a method like `kv/range` on any running member, with a JSON body.
    pub fn ask(&self, path: &str, body: &Value) -> Value {
        let running = self.members.iter().find(|member| member.process.is_some()).unwrap();
        running.ask(path, body, None).unwrap_or_else(|error| panic!("{path} {body}: {error}"))
    }

    /// Returns all keys and their values.
    pub fn all(&self) -> Vec<(String, String)> {
        let answer = self.ask("kv/range", &json!({ "key": "AA==", "range_end": "AA==" }));
        let text = |value: &Value| String::from_utf8(BASE64.decode(value.as_str().unwrap()).unwrap()).unwrap();
        let found = answer["kvs"].as_array().cloned().unwrap_or_default();
        found.iter().map(|found| (text(&found["key"]), text(&found["value"]))).collect()
    }

    pub fn put(&self, key: &str, value: &[u8]) {
        self.ask("kv/put", &json!({ "key": BASE64.encode(key), "value": BASE64.encode(value) }));
    }

    /// Returns the IDs of all leases.
    pub fn leases(&self) -> Vec<String> {
        let answer = self.ask("lease/leases", &json!({}));
        let leases = answer["leases"].as_array().cloned().unwrap_or_default();
        leases.iter().map(|lease| lease["ID"].as_str().unwrap().to_owned()).collect()
    }
}

impl Member {
    fn new(number: usize, options: &[&str]) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let (own, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let folder = scratch().join(format!("tower-ratelimit-etcd-{own}-{count}"));
        fs::create_dir_all(&folder).unwrap();
        let options = options.iter().map(|&option| option.to_owned()).collect();
        let [clients, peers, health] = [(); 3].map(|()| free_port());
        let (name, cluster) = (format!("m{number}"), String::new());
        Self { process: None, folder, name, clients, peers, health, cluster, options }
    }

    fn begin(&mut self) {
        let secure = self.options.iter().any(|option| option == "--cert-file");
        let clients = format!("{}://127.0.0.1:{}", if secure { "https" } else { "http" }, self.clients);
        let (peers, health) = (self.peers(), format!("http://127.0.0.1:{}", self.health));
        let mut command = Command::new(program());
        // One thread and rare garbage collections, because many members share the machine.
        command.env("GOMAXPROCS", "1").env("GOGC", "400");
        command.arg("--data-dir").arg(self.folder.join("data")).args(["--name", &self.name]);
        command.args(["--listen-client-urls", &clients, "--advertise-client-urls", &clients]);
        command.args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers]);
        command.args(["--initial-cluster", &self.cluster, "--listen-metrics-urls", &health]);
        command.args(["--heartbeat-interval", "10", "--election-timeout", "100", "--bcrypt-cost", "4"]);
        if supports_no_fsync() {
            command.arg("--unsafe-no-fsync");
        }
        command.args(&self.options);
        self.process = Some(Process::start(&mut command, PACKAGES));
    }

    /// Returns `false` if the process ends before the member is healthy.
    fn becomes_healthy(&mut self) -> bool {
        let started = Instant::now();
        loop {
            let healthy = http(self.health, "GET /health", "", None).is_ok_and(|answer| answer.contains("true"));
            if self.process.as_mut().unwrap().has_ended() {
                return false;
            }
            if healthy {
                return true;
            }
            assert!(started.elapsed() < STARTS_WITHIN, "etcd does not start");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn peers(&self) -> String {
        format!("http://127.0.0.1:{}", self.peers)
    }

    /// Restarts the process without waiting until the member is healthy.
    pub fn begin_again(&mut self) {
        self.kill();
        self.begin();
    }

    pub fn port(&self) -> u16 {
        self.clients
    }

    /// Returns a folder for files of this member.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Kills the process (SIGKILL).
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Starts the process again on the same ports, with its data.
    pub fn restart(&mut self) {
        let started = Instant::now();
        loop {
            self.begin_again();
            if self.becomes_healthy() {
                return;
            }
            assert!(started.elapsed() < STARTS_WITHIN, "the ports are not free again");
        }
    }

    /// Suspends the process (SIGSTOP): it accepts connections, but replies to nothing.
    pub fn stop(&self) {
        self.process.as_ref().unwrap().stop();
    }

    /// Resumes the process (SIGCONT).
    pub fn resume(&self) {
        self.process.as_ref().unwrap().resume();
    }

    fn status(&self) -> io::Result<Value> {
        self.ask("maintenance/status", &json!({}), None)
    }

    /// Calls a method with a JSON body, and with the token of a login if there is one.
    pub fn ask(&self, path: &str, body: &Value, token: Option<&str>) -> io::Result<Value> {
        let answer = http(self.clients, &format!("POST /v3/{path}"), &body.to_string(), token)?;
        let value: Value = serde_json::from_str(&answer)?;
        if value.get("error").is_some() { Err(io::Error::other(answer)) } else { Ok(value) }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        process::discard((self.process.take(), Folder(self.folder.clone())));
    }
}

fn program() -> String {
    std::env::var(PROGRAM).unwrap_or_else(|_| "etcd".to_owned())
}

/// Returns the folder for the data of members. It is in memory if possible, because etcd waits for
/// the disk at each write.
fn scratch() -> PathBuf {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() }
}

/// Returns `true` if etcd has the option `--unsafe-no-fsync` (since 3.5).
fn supports_no_fsync() -> bool {
    static FASTER: LazyLock<bool> = LazyLock::new(|| {
        let help = Command::new(program()).arg("--help").output();
        help.is_ok_and(|help| String::from_utf8_lossy(&help.stdout).contains("--unsafe-no-fsync"))
    });
    *FASTER
}

/// Sends an HTTP request to this port. Returns the body of the response.
fn http(port: u16, what: &str, body: &str, token: Option<&str>) -> io::Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let token = token.map_or_else(String::new, |token| format!("authorization: {token}\r\n"));
    let length = body.len();
    // HTTP/1.0, so that the response is not chunked.
    write!(stream, "{what} HTTP/1.0\r\nhost: localhost\r\ncontent-length: {length}\r\n{token}\r\n{body}")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (_, body) = answer.split_once("\r\n\r\n").ok_or_else(|| io::Error::other(answer.clone()))?;
    Ok(body.to_owned())
}
