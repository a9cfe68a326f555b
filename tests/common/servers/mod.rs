//! Real servers for tests, each on its own port: Redis, memcached, etcd, PostgreSQL and PgBouncer.
//!
//! `TOWER_RATELIMIT_REDIS_SERVER` names a program to start instead of `redis-server`. Dropping the
//! value of a server ends its process. A watchdog ends the process if the test process dies.

mod etcd;
mod fleet;
mod memcached;
mod pgbouncer;
mod ports;
mod postgres;
mod process;
mod proxy;
mod resp;
mod sharding_proxy;
pub mod storage;

use std::env;
use std::fmt::Display;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tower_ratelimit::storage::PostgresStorage;

pub use self::etcd::{Etcd, Member};
pub use self::fleet::{Cluster, Sentinels, SlotMove, wait_until_replicated};
pub use self::memcached::Memcached;
pub use self::pgbouncer::PgBouncer;
pub use self::ports::free_port;
pub use self::postgres::{Postgres, Session};
use self::process::{Folder, Process};
pub use self::proxy::{Mode, Proxy};
pub use self::resp::Reply;
pub use self::sharding_proxy::ShardingProxy;
use crate::time::EVENTUALLY;
pub use crate::time::wait_until;

/// Returns the URL of a storage with another option.
pub fn with_option(url: &str, name: &str, value: impl Display) -> String {
    format!("{url}{}{name}={value}", if url.contains('?') { '&' } else { '?' })
}

/// Returns the URL of a storage with a timeout.
pub fn with_timeout(url: &str, timeout: Duration) -> String {
    with_option(url, "timeout", format_args!("{timeout:?}"))
}

/// The environment variable that names a program to start instead of `redis-server`.
const PROGRAM: &str = "TOWER_RATELIMIT_REDIS_SERVER";

/// The name of the configuration file in the folder of each server.
const CONFIG: &str = "server.conf";

/// The time that a server may take to start.
const STARTS_WITHIN: Duration = EVENTUALLY;

/// A server on one port, with methods that cause outages.
pub trait FaultyServer: Send + Sync + Sized + 'static {
    fn launch() -> Self;
    fn port(&self) -> u16;

    /// Kills the process (SIGKILL).
    fn kill(&mut self);

    /// Starts the process again on the same port.
    fn restart(&mut self);

    /// Suspends the process (SIGSTOP): it accepts connections, but replies to nothing.
    fn stop(&self);

    /// Resumes the process (SIGCONT).
    fn resume(&self);
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

            fn resume(&self) {
                self.resume();
            }
        }
    };
}

faulty_server!(Server);
faulty_server!(Memcached);

/// The server does not wait for the disk. The tests kill processes only, which loses nothing that
/// is in the system's cache.
impl FaultyServer for Postgres {
    fn launch() -> Self {
        let server = Self::start(&[]);
        // Creates the table before the test, because that takes longer than to connect.
        server.ask(&PostgresStorage::new(&server.url()).unwrap().definition());
        server
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

    fn resume(&self) {
        self.resume();
    }
}

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

    fn resume(&self) {
        self.members[0].resume();
    }
}

/// A Redis server.
#[derive(Debug)]
pub struct Server {
    /// `None` between `kill` and `restart`.
    process: Option<Process>,
    folder: PathBuf,
    port: u16,
    options: Vec<String>,
}

impl Server {
    /// Starts a server with additional options, for example `--requirepass secret`.
    pub fn start(options: &[&str]) -> Self {
        Self::configured("", options)
    }

    /// Starts a server with a configuration file, which a sentinel needs and writes to.
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
            // Retries, because another process may have taken the port.
        }
    }

    /// Returns `true` if the server on the port is our child, and replies.
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

    /// Returns a folder for files of this server, such as a Unix socket.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Sends a command on a new connection and returns the reply.
    ///
    /// A server that becomes a replica closes all connections. Then the command is sent again, so
    /// it has to be idempotent.
    pub fn ask(&self, command: &[&str]) -> Reply {
        let mut reply = resp::ask(self.port, self.password(), command);
        for _ in 0..5 {
            let closed = [io::ErrorKind::ConnectionReset, io::ErrorKind::UnexpectedEof];
            if reply.as_ref().is_err_and(|error| closed.contains(&error.kind())) {
                reply = resp::ask(self.port, self.password(), command);
            }
        }
        reply.unwrap()
    }

    /// Returns the number of times that the server has executed this command, including in scripts.
    /// The name is in lower case.
    pub fn calls(&self, command: &str) -> u64 {
        let stats = self.ask(&["INFO", "commandstats"]).to_string();
        let calls = stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
        calls.map_or(0, |calls| calls.split(',').next().unwrap().parse().unwrap())
    }

    fn password(&self) -> Option<&str> {
        let at = self.options.iter().position(|option| option == "--requirepass")?;
        Some(&self.options[at + 1])
    }

    /// Kills the process (SIGKILL).
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Ends the process (SIGTERM).
    pub fn end(&mut self) {
        if let Some(process) = self.process.take() {
            process.end();
        }
    }

    /// Starts the process again on the same port, without its data unless the data was written to a
    /// file.
    pub fn restart(&mut self) {
        let started = Instant::now();
        self.kill();
        while !self.begin() {
            assert!(started.elapsed() < STARTS_WITHIN, "port {} is not free again", self.port);
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
}

impl Drop for Server {
    fn drop(&mut self) {
        process::discard((self.process.take(), Folder(self.folder.clone())));
    }
}

fn program() -> String {
    env::var(PROGRAM).unwrap_or_else(|_| "redis-server".to_owned())
}
