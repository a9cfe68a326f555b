//! Real servers for tests, each on a port of its own: Redis (or the program that
//! `TOWER_RATELIMIT_REDIS_SERVER` names), memcached and etcd. Dropping the guard ends a server. A
//! watchdog ends it when the test process dies.

mod etcd;
mod fleet;
mod memcached;
mod process;
mod proxy;
mod resp;
pub mod storage;

use std::env;
use std::fs;
use std::io;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

pub use self::etcd::{Etcd, Member};
pub use self::fleet::{Cluster, Sentinels};
pub use self::memcached::Memcached;
use self::process::Process;
pub use self::proxy::{Mode, Proxy};
pub use self::resp::Reply;

/// Another program to start instead of `redis-server`.
const PROGRAM: &str = "TOWER_RATELIMIT_REDIS_SERVER";

/// In the folder of each.
const CONFIG: &str = "server.conf";

/// The time that a server may take to start.
const STARTS_WITHIN: Duration = Duration::from_secs(10);

/// A server with the faults that tests need, on one port.
pub trait FaultyServer: Send + Sync + Sized + 'static {
    fn launch() -> Self;
    fn port(&self) -> u16;

    /// Kills the process (SIGKILL).
    fn kill(&mut self);

    /// Starts it again on the same port.
    fn restart(&mut self);

    /// Suspends the process (SIGSTOP): it accepts connections, but replies to nothing.
    fn stop(&self);

    /// Resumes the process (SIGCONT).
    fn go_on(&self);
}

macro_rules! faulty_server {
    ($server:ty) => {
        impl FaultyServer for $server {
            fn launch() -> Self {
                Self::start(&[])
            }

            fn port(&self) -> u16 {
                self.port()
            }

            fn kill(&mut self) {
                self.kill();
            }

            fn restart(&mut self) {
                self.restart();
            }

            fn stop(&self) {
                self.stop();
            }

            fn go_on(&self) {
                self.go_on();
            }
        }
    };
}

faulty_server!(Server);
faulty_server!(Memcached);

/// A cluster of one member.
impl FaultyServer for Etcd {
    fn launch() -> Self {
        Self::start(1)
    }

    fn port(&self) -> u16 {
        self.members[0].port()
    }

    fn kill(&mut self) {
        self.members[0].kill();
    }

    fn restart(&mut self) {
        self.members[0].restart();
    }

    fn stop(&self) {
        self.members[0].stop();
    }

    fn go_on(&self) {
        self.members[0].go_on();
    }
}

/// A Redis server that is running, unless it was killed or stopped.
#[derive(Debug)]
pub struct Server {
    /// None between `kill` and `restart`.
    process: Option<Process>,
    folder: PathBuf,
    port: u16,
    options: Vec<String>,
}

impl Server {
    /// With these options after those that every server here has: `--requirepass`, `secret`.
    pub fn start(options: &[&str]) -> Self {
        Self::configured("", options)
    }

    /// With a file of options too, which a sentinel needs to write to.
    fn configured(config: &str, options: &[&str]) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        loop {
            let number = COUNT.fetch_add(1, Ordering::Relaxed);
            let folder = env::temp_dir().join(format!("tower-ratelimit-{}-{number}", std::process::id()));
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join(CONFIG), config).unwrap();
            let options = options.iter().map(|&option| option.to_owned()).collect();
            let mut server = Self { process: None, folder, port: free_port(), options };
            if server.begin() {
                return server;
            }
            // Somebody else took the port.
        }
    }

    /// Whether it answers and is our child.
    fn begin(&mut self) -> bool {
        let mut command = Command::new(program());
        command.arg(self.folder.join(CONFIG));
        command.args(["--bind", "127.0.0.1", "--port", &self.port.to_string(), "--save", "", "--appendonly", "no"]);
        command.arg("--dir").arg(&self.folder).args(&self.options);
        let process = Process::start(&mut command, "redis-server redis-sentinel redis-tools");
        let password = self.password().map(str::to_owned);
        let process = self.process.insert(process);
        let (started, id) = (Instant::now(), format!("process_id:{}", process.id()));
        loop {
            if process.has_ended() {
                return false;
            }
            let info = resp::ask(self.port, password.as_deref(), &["INFO", "server"]);
            match info.map(|info| info.to_string()) {
                Ok(info) if info.contains(&id) => return true,
                Ok(info) if info.contains("process_id:") => return false,
                other => assert!(started.elapsed() < STARTS_WITHIN, "the server does not start: {other:?}"),
            }
            thread::sleep(Duration::from_millis(2));
        }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Where a unix socket or a file of its own can be.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Its reply to a command, on a connection of its own. A server that becomes a replica closes all it has: then it is
    /// asked again, so ask only what may be asked twice.
    pub fn ask(&self, command: &[&str]) -> Reply {
        let mut reply = resp::ask(self.port, self.password(), command);
        for _ in 0..5 {
            if reply.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::ConnectionReset) {
                reply = resp::ask(self.port, self.password(), command);
            }
        }
        reply.unwrap()
    }

    /// Returns how often the server has executed this command, given in lower case, also inside of scripts.
    pub fn calls(&self, command: &str) -> u64 {
        let stats = self.ask(&["INFO", "commandstats"]).to_string();
        let calls = stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
        calls.map_or(0, |calls| calls.split(',').next().unwrap().parse().unwrap())
    }

    fn password(&self) -> Option<&str> {
        let at = self.options.iter().position(|option| option == "--requirepass")?;
        Some(&self.options[at + 1])
    }

    /// As `kill -9`.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// It is asked to end, and does.
    pub fn end(&mut self) {
        if let Some(process) = self.process.take() {
            process.end();
        }
    }

    /// On the same port, with nothing in it but what it had written to a file.
    pub fn restart(&mut self) {
        let started = Instant::now();
        self.kill();
        while !self.begin() {
            assert!(started.elapsed() < STARTS_WITHIN, "port {} is not free again", self.port);
        }
    }

    /// It hangs: whatever it is sent waits, and so do new connections.
    pub fn stop(&self) {
        self.process.as_ref().unwrap().stop();
    }

    /// It goes on.
    pub fn go_on(&self) {
        self.process.as_ref().unwrap().go_on();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.process = None;
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn program() -> String {
    env::var(PROGRAM).unwrap_or_else(|_| "redis-server".to_owned())
}

/// Nobody listens there, nor 10,000 above, where a node of a cluster talks to others.
pub fn free_port() -> u16 {
    let free = |port| Ok::<u16, io::Error>(TcpListener::bind(("127.0.0.1", port))?.local_addr()?.port());
    loop {
        let port = free(0).unwrap();
        if port < 55_000 && free(port + 10_000).is_ok() {
            return port;
        }
    }
}

/// Waits until `done`, and fails with `what` if it takes too long.
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < STARTS_WITHIN, "{what}: not within {STARTS_WITHIN:?}");
        thread::sleep(Duration::from_millis(5));
    }
}
