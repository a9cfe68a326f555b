//! memcached, or the program that `TOWER_RATELIMIT_MEMCACHED_SERVER` names.

use std::env;
use std::io::{self, BufRead, BufReader, Write};
use std::net::TcpStream;
#[cfg(unix)]
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use super::process::{self, Process};
use super::{STARTS_WITHIN, free_port, wait_until};

/// The environment variable that names a program to start instead of `memcached`.
const PROGRAM: &str = "TOWER_RATELIMIT_MEMCACHED_SERVER";

const PACKAGES: &str = "memcached";

/// A memcached server.
#[derive(Debug)]
pub struct Memcached {
    /// `None` between `kill` and `restart`.
    process: Option<Process>,
    port: u16,
    options: Vec<String>,
}

impl Memcached {
    /// Starts a server with additional options, for example `-I 512k`.
    pub fn start(options: &[&str]) -> Self {
        let started = Instant::now();
        loop {
            let options = options.iter().map(|&option| option.to_owned()).collect();
            let mut server = Self { process: None, port: free_port(), options };
            if server.begin() {
                return server;
            }
            // Retries, because another process may have taken the port. Fails later if the server
            // rejects its options.
            assert!(started.elapsed() < STARTS_WITHIN, "the server does not start: {server:?}");
        }
    }

    /// Starts a server that listens on a unix socket only.
    #[cfg(unix)]
    pub fn on(socket: &Path) -> Self {
        let mut command = program();
        command.arg("-s").arg(socket);
        let process = Process::start(&mut command, PACKAGES);
        wait_until("the socket exists", || UnixStream::connect(socket).is_ok());
        Self { process: Some(process), port: 0, options: Vec::new() }
    }

    /// Returns `true` if the server on the port is our child, and replies.
    fn begin(&mut self) -> bool {
        let mut command = program();
        command.args(["-l", "127.0.0.1", "-U", "0", "-p", &self.port.to_string()]).args(&self.options);
        let process = self.process.insert(Process::start(&mut command, PACKAGES));
        let (started, id) = (Instant::now(), format!("STAT pid {}", process.id()));
        loop {
            if process.has_ended() {
                return false;
            }
            match ask(self.port, "stats") {
                Ok(stats) if stats.contains(&id) => return true,
                Ok(stats) if stats.iter().any(|line| line.starts_with("STAT pid ")) => return false,
                other => assert!(started.elapsed() < STARTS_WITHIN, "the server does not start: {other:?}"),
            }
            thread::sleep(Duration::from_millis(2));
        }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        format!("memcached://127.0.0.1:{}", self.port)
    }

    /// Returns all lines of the reply to a command, which is sent on a new connection.
    pub fn ask(&self, command: &str) -> Vec<String> {
        ask(self.port, command).unwrap()
    }

    /// Returns the statistic of this name.
    pub fn stat(&self, name: &str) -> u64 {
        let stats = self.ask("stats");
        let value = stats.iter().find_map(|line| line.strip_prefix(&format!("STAT {name} ")));
        value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{name}: {stats:?}"))
    }

    /// Kills the process (SIGKILL).
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Starts the process again on the same port, without its items.
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

impl Drop for Memcached {
    fn drop(&mut self) {
        process::discard(self.process.take());
    }
}

fn program() -> Command {
    let mut command = Command::new(env::var(PROGRAM).unwrap_or_else(|_| "memcached".to_owned()));
    // memcached refuses to run as root without `-u`.
    command.args(["-u", "root"]);
    command
}

fn ask(port: u16, command: &str) -> io::Result<Vec<String>> {
    let stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut stream = BufReader::new(stream);
    stream.get_mut().write_all(format!("{command}\r\nmn\r\n").as_bytes())?;
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match line.trim_end() {
            "MN" => return Ok(lines),
            line => lines.push(line.to_owned()),
        }
    }
}
