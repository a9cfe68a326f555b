//! memcached, or the program that `TOWER_RATELIMIT_MEMCACHED_SERVER` names.

use std::env;
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::net::TcpStream;
#[cfg(unix)]
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::process::{self, Folder, Process};
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
    /// The user and the password, separated by a space, and the folder of the file that contains them.
    login: Option<(String, Folder)>,
}

impl Memcached {
    /// Starts a server with additional options, for example `-I 512k`.
    ///
    /// With `-Z`, the server has TLS on the port of another `-l`, and none on [`port`](Self::port).
    pub fn start(options: &[&str]) -> Self {
        Self::launch(options, None)
    }

    /// Starts a server that requires a login, with additional options.
    pub fn with_login(user: &str, password: &str, options: &[&str]) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = env::temp_dir().join(format!("tower-ratelimit-memcached-{}-{number}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let file = folder.join("logins");
        fs::write(&file, format!("{user}:{password}\n")).unwrap();
        let login = (format!("{user} {password}"), Folder(folder));
        Self::launch(&[&["-Y", file.to_str().unwrap()], options].concat(), Some(login))
    }

    fn launch(options: &[&str], login: Option<(String, Folder)>) -> Self {
        let started = Instant::now();
        let options = options.iter().map(|&option| option.to_owned()).collect();
        let mut server = Self { process: None, port: free_port(), options, login };
        while !server.begin() {
            // Retries, because another process may have taken the port. Fails later if the server
            // rejects its options.
            assert!(started.elapsed() < STARTS_WITHIN, "the server does not start: {server:?}");
            server.port = free_port();
        }
        server
    }

    /// Starts a server that listens on a unix socket only.
    #[cfg(unix)]
    pub fn on(socket: &Path) -> Self {
        let mut command = program();
        command.arg("-s").arg(socket);
        let process = Process::start(&mut command, PACKAGES);
        wait_until("the socket exists", || UnixStream::connect(socket).is_ok());
        Self { process: Some(process), port: 0, options: Vec::new(), login: None }
    }

    /// Returns `true` if the server on the port is our child, and replies.
    fn begin(&mut self) -> bool {
        let mut command = program();
        let is_tls = self.options.iter().any(|option| option == "-Z");
        let listens = format!("{}127.0.0.1:{}", if is_tls { "notls:" } else { "" }, self.port);
        command.args(["-l", &listens, "-U", "0"]).args(&self.options);
        let process = self.process.insert(Process::start(&mut command, PACKAGES));
        let (started, id) = (Instant::now(), format!("STAT pid {}", process.id()));
        loop {
            if process.has_ended() {
                return false;
            }
            match ask(self.port, self.login.as_ref(), "stats") {
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
        ask(self.port, self.login.as_ref(), command).unwrap()
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
        process::discard((self.process.take(), self.login.take()));
    }
}

fn program() -> Command {
    let mut command = Command::new(env::var(PROGRAM).unwrap_or_else(|_| "memcached".to_owned()));
    // memcached refuses to run as root without `-u`.
    command.args(["-u", "root"]);
    command
}

fn ask(port: u16, login: Option<&(String, Folder)>, command: &str) -> io::Result<Vec<String>> {
    let stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut stream = BufReader::new(stream);
    if let Some((login, _)) = login {
        stream.get_mut().write_all(format!("set auth 0 0 {}\r\n{login}\r\n", login.len()).as_bytes())?;
        let mut line = String::new();
        stream.read_line(&mut line)?;
        assert_eq!(line, "STORED\r\n");
    }
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
