//! PostgreSQL, from the folder that `TOWER_RATELIMIT_POSTGRES_BIN` names.

use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::process::{self, Folder, Process};
use super::{STARTS_WITHIN, free_port, wait_until};

/// Names the folder with `postgres` and `initdb`. Defaults to the newest one that Debian installed.
const BIN: &str = "TOWER_RATELIMIT_POSTGRES_BIN";

const PACKAGES: &str = "postgresql";

/// A server with one database, `postgres`, and one user without a password, `postgres`.
#[derive(Debug)]
pub struct Postgres {
    /// `None` between `kill` and `restart`.
    process: Option<Process>,
    folder: PathBuf,
    port: u16,
    options: Vec<String>,
}

impl Postgres {
    /// Starts a server with additional options, for example `max_connections=5`.
    pub fn start(options: &[&str]) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let folder = scratch(&DATA, &format!("data-{}", COUNT.fetch_add(1, Ordering::Relaxed)));
        run(unprivileged("cp").args(["-a", "--no-target-directory"]).arg(&*TEMPLATE).arg(folder.join("data")));
        let options = options.iter().map(|&option| option.to_owned()).collect();
        let mut server = Self { process: None, folder, port: free_port(), options };
        let started = Instant::now();
        while !server.begin() {
            assert!(started.elapsed() < STARTS_WITHIN, "the server does not start: {server:?}");
            // Retries, because another process may have taken the port.
            server.port = free_port();
        }
        server
    }

    /// Returns `true` if our child accepts connections.
    fn begin(&mut self) -> bool {
        let data = self.folder.join("data");
        let mut command = unprivileged(bin().join("postgres"));
        command.arg("-D").arg(&data).args(["-p", &self.port.to_string(), "-c", "listen_addresses=127.0.0.1"]);
        command.arg("-c").arg(format!("unix_socket_directories={}", self.folder.display()));
        // Many servers share the machine. They are killed, and need not survive a crash of the machine.
        let own = ["shared_buffers=8MB", "max_wal_size=64MB", "fsync=off", "dynamic_shared_memory_type=mmap"];
        for option in own.into_iter().chain(self.options.iter().map(String::as_str)) {
            command.args(["-c", option]);
        }
        let process = self.process.insert(Process::start(&mut command, PACKAGES));
        let (started, id) = (Instant::now(), process.id().to_string());
        loop {
            if process.has_ended() {
                return false;
            }
            // The server writes its process ID and its state to this file.
            let state = fs::read_to_string(data.join("postmaster.pid")).unwrap_or_default();
            if state.lines().next() == Some(&id) && state.lines().any(|line| line.trim() == "ready") {
                return true;
            }
            assert!(started.elapsed() < STARTS_WITHIN, "the server does not start: {state}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    /// Returns the folder of the Unix socket.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Replaces the rules of access, and reloads them in the running server.
    pub fn set_access(&self, rules: &str) {
        let loaded_at = || self.ask("SELECT pg_conf_load_time()");
        let before = loaded_at();
        fs::write(self.folder.join("data/pg_hba.conf"), rules).unwrap();
        self.ask("SELECT pg_reload_conf()");
        wait_until("the rules are loaded", || loaded_at() != before);
    }

    /// Enables TLS with a certificate and its key, as PEM. TCP connections without TLS are then
    /// rejected. With an authority, so are clients without a certificate that it has signed.
    pub fn enable_tls(&self, certificate: &[u8], key: &[u8], authority: Option<&[u8]>) {
        let data = self.folder.join("data");
        let owner = fs::metadata(&data).unwrap();
        let files = [("ssl_cert_file", Some(certificate)), ("ssl_key_file", Some(key)), ("ssl_ca_file", authority)];
        for (setting, content) in files {
            let Some(content) = content else { continue };
            let file = data.join(setting);
            fs::write(&file, content).unwrap();
            // The server rejects a key that other users can read.
            fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
            chown(&file, Some(owner.uid()), Some(owner.gid())).unwrap();
            self.ask(&format!("ALTER SYSTEM SET {setting} = '{setting}'"));
        }
        self.ask("ALTER SYSTEM SET ssl = on");
        let verify = if authority.is_some() { " clientcert=verify-ca" } else { "" };
        self.set_access(&format!("local all all trust\nhostssl all all 127.0.0.1/32 trust{verify}\n"));
    }

    /// Executes statements through the Unix socket, and returns the rows as lines.
    pub fn ask(&self, sql: &str) -> String {
        ask(psql(&self.folder, self.port), sql)
    }

    /// Opens a session through the Unix socket. It can hold locks.
    pub fn session(&self) -> Session {
        let mut command = psql(&self.folder, self.port);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Session { child, input: Some(input), output }
    }

    /// Returns the processes of the server for connections over TCP, even of those that have not
    /// logged in yet. A cancel request has no such process.
    pub fn backends(&self) -> Vec<u32> {
        let title = |process: &u32| fs::read_to_string(format!("/proc/{process}/cmdline")).unwrap_or_default();
        let mut processes = children(self.process.as_ref().unwrap().id());
        processes.retain(|process| title(process).contains(" 127.0.0.1("));
        processes
    }

    /// Suspends the backends of the connections over TCP (SIGSTOP). `resume` resumes them.
    pub fn stop_backends(&self) {
        suspend(&self.backends());
    }

    /// Kills all processes of the server (SIGKILL).
    pub fn kill(&mut self) {
        drop(self.take_processes());
    }

    /// Starts the process again on the same port, with its data.
    pub fn restart(&mut self) {
        let started = Instant::now();
        self.kill();
        while !self.begin() {
            assert!(started.elapsed() < STARTS_WITHIN, "the server does not start again");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Limits the size of each file that the server writes, or removes the limit. Writes beyond it
    /// fail as on a full disk.
    pub fn limit_files(&self, bytes: Option<u64>) {
        let limit = bytes.map_or_else(|| "unlimited".to_owned(), |bytes| bytes.to_string());
        let server = self.process.as_ref().unwrap().id();
        for process in [vec![server], children(server)].concat() {
            let limit = format!("--fsize={limit}:unlimited");
            let output = unprivileged("prlimit").args(["--pid", &process.to_string(), &limit]).output().unwrap();
            // A child may have ended.
            assert!(output.status.success() || !children(server).contains(&process), "{output:?}");
        }
    }

    /// Suspends all processes of the server (SIGSTOP).
    pub fn stop(&self) {
        let process = self.process.as_ref().unwrap();
        process.stop();
        suspend(&children(process.id()));
    }

    /// Resumes all processes (SIGCONT).
    pub fn resume(&self) {
        let process = self.process.as_ref().unwrap();
        signal(&children(process.id()), "CONT");
        process.resume();
    }

    fn take_processes(&mut self) -> Option<Processes> {
        let process = self.process.take()?;
        Some(Processes { process, data: self.folder.join("data") })
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        process::discard((self.take_processes(), Folder(self.folder.clone())));
    }
}

/// All processes of the server, which are killed when this is dropped.
struct Processes {
    process: Process,
    data: PathBuf,
}

impl Drop for Processes {
    fn drop(&mut self) {
        let (children, memory) = (children(self.process.id()), shared_memory(&self.data));
        self.process.kill();
        signal(&children, "KILL");
        // A killed server leaves its segment, and a kernel has 4,096 of them.
        if let Some(id) = memory {
            let _ = Command::new("ipcrm").args(["--shmem-id", &id]).output();
        }
    }
}

/// A session of `psql`. Dropping it ends the session, and rolls back its transaction.
#[derive(Debug)]
pub struct Session {
    child: Child,
    /// `None` when the session ends.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Session {
    /// Executes statements, and waits until they have ended.
    pub fn execute(&mut self, sql: &str) {
        self.begin(&format!("{sql};\n\\echo done"));
        let mut line = String::new();
        while line.trim() != "done" {
            line.clear();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the session has ended: {sql}");
        }
    }

    /// Begins to execute a statement that blocks.
    pub fn begin(&mut self, sql: &str) {
        writeln!(self.input.as_mut().unwrap(), "{sql}").unwrap();
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.input = None;
        let _ = self.child.wait();
    }
}

/// Returns a command that connects to the database `postgres` as the user `postgres`. The host is
/// an address, or the folder of a Unix socket.
pub(super) fn psql(host: impl AsRef<std::ffi::OsStr>, port: u16) -> Command {
    // Debian's `psql` in the path is a script in Perl that needs more time than the program itself.
    let program = Some(bin().join("psql")).filter(|program| program.exists()).unwrap_or_else(|| "psql".into());
    let mut command = Command::new(program);
    command.args(["-X", "-A", "-t", "-q", "-v", "ON_ERROR_STOP=1", "-U", "postgres", "-d", "postgres", "-h"]);
    command.arg(host).args(["-p", &port.to_string()]);
    command
}

/// Executes statements, and returns the rows as lines.
pub(super) fn ask(mut psql: Command, sql: &str) -> String {
    let output = psql.args(["-c", sql]).output().unwrap_or_else(|error| panic!("cannot start psql: {error}"));
    assert!(output.status.success(), "{sql}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// A data directory that each server copies, because creating one takes more than a second. It is
/// small: one database, and a log of 1 MB files.
static TEMPLATE: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = scratch(&env::temp_dir(), "template").join("data");
    let mut command = unprivileged(bin().join("initdb"));
    command.arg("-D").arg(&folder).args(["-A", "trust", "-U", "postgres", "-N", "-E", "UTF8", "--locale", "C.UTF-8"]);
    run(command.arg("--wal-segsize=1"));
    // Executes its input without a server.
    let mut single = unprivileged(bin().join("postgres"));
    single.args(["--single", "-F", "-D"]).arg(&folder).args(["-c", "shared_buffers=8MB", "postgres"]);
    let statements = folder.join("statements");
    fs::write(
        &statements,
        "UPDATE pg_database SET datistemplate = false\nDROP DATABASE template0\nDROP DATABASE template1\n",
    )
    .unwrap();
    run(single.stdin(fs::File::open(&statements).unwrap()));
    fs::remove_file(statements).unwrap();
    folder
});

/// The folder for the data of servers. It is in memory if there is room for many servers, because a
/// server has hundreds of files.
static DATA: LazyLock<PathBuf> = LazyLock::new(|| {
    let room = Command::new("df").args(["--output=avail", "--block-size=1M", "/dev/shm"]).output();
    let room = room.ok().and_then(|output| {
        let text = String::from_utf8(output.stdout).ok()?;
        text.lines().nth(1)?.trim().parse::<u64>().ok()
    });
    if room.is_some_and(|megabytes| megabytes >= 2_048) { "/dev/shm".into() } else { env::temp_dir() }
});

/// Creates a folder that the server may write to. Removes those of processes that have ended.
pub(super) fn scratch(parent: &Path, name: &str) -> PathBuf {
    let own = std::process::id();
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let file = entry.file_name().to_string_lossy().into_owned();
        let process = file.strip_prefix("tower-ratelimit-postgres-").and_then(|rest| rest.split('-').next());
        if process.is_some_and(|process| !Path::new("/proc").join(process).exists()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    let folder = parent.join(format!("tower-ratelimit-postgres-{own}-{name}"));
    fs::create_dir_all(&folder).unwrap();
    if is_root() {
        run(Command::new("chown").arg("postgres").arg(&folder));
    }
    folder
}

fn bin() -> PathBuf {
    if let Ok(bin) = env::var(BIN) {
        return bin.into();
    }
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let newest = versions.max_by_key(|version| version.file_name().to_string_lossy().parse::<u32>().unwrap_or(0));
    newest.map_or_else(PathBuf::new, |version| version.path().join("bin"))
}

/// Returns a command that runs as the user `postgres` if this process runs as root, because
/// PostgreSQL refuses to run as root.
pub(super) fn unprivileged(program: impl AsRef<std::ffi::OsStr>) -> Command {
    if !is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "postgres", "--regid", "postgres", "--clear-groups"]).arg(program);
    command
}

fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}

fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| {
        panic!("cannot start {command:?}: {error}\nscripts/test installs it, or\n    apt-get install -y {PACKAGES}")
    });
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn children(process: u32) -> Vec<u32> {
    let text = fs::read_to_string(format!("/proc/{process}/task/{process}/children")).unwrap_or_default();
    text.split_whitespace().map(|id| id.parse().unwrap()).collect()
}

/// Returns the segment of shared memory by which a server recognizes that another one uses its data.
fn shared_memory(data: &Path) -> Option<String> {
    let state = fs::read_to_string(data.join("postmaster.pid")).ok()?;
    // The key and the ID of the segment.
    state.lines().nth(6)?.split_whitespace().nth(1).map(str::to_owned)
}

/// Suspends processes (SIGSTOP), and waits until they are suspended. They may have ended.
fn suspend(processes: &[u32]) {
    signal(processes, "STOP");
    for process in processes {
        let stat = format!("/proc/{process}/stat");
        wait_until("a process of the server is suspended", || {
            let Ok(stat) = fs::read_to_string(&stat) else { return true };
            stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with(['T', 'Z']))
        });
    }
}

/// Sends a signal to processes, which may have ended.
fn signal(processes: &[u32], name: &str) {
    let _ = Command::new("kill").arg(format!("-{name}")).args(processes.iter().map(u32::to_string)).output();
}
