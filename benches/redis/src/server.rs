//! Starts a Redis server, and reads its statistics.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Client, cmd};

pub struct Server {
    process: Child,
    port: u16,
}

impl Server {
    pub fn start() -> Self {
        let program = std::env::var("TOWER_RATELIMIT_REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned());
        let free = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let port = free.local_addr().expect("it is bound").port();
        drop(free);
        let process = Command::new(program)
            .args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--port", &port.to_string()])
            .stdout(Stdio::null())
            .spawn()
            .expect("scripts/redis installs a server");
        Self { process, port }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Returns the processor times of this process and of the server in microseconds. Both do their
    /// work in one thread.
    pub fn processor_times(&self) -> [f64; 2] {
        ["self".to_owned(), self.process.id().to_string()].map(|process| {
            let text = std::fs::read_to_string(format!("/proc/{process}/schedstat")).expect("this is Linux");
            let nanos = text.split(' ').next().and_then(|number| number.parse::<f64>().ok());
            nanos.expect("the file begins with a number") / 1_000.0
        })
    }

    pub async fn connect(&self) -> MultiplexedConnection {
        let client = Client::open(self.url()).expect("the URL is valid");
        for _ in 0..200 {
            match client.get_multiplexed_async_connection().await {
                Ok(connection) => return connection,
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
        panic!("the server does not accept connections");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        _ = self.process.kill();
        _ = self.process.wait();
    }
}

pub async fn reset_statistics(connection: &mut MultiplexedConnection) {
    cmd("CONFIG").arg("RESETSTAT").exec_async(connection).await.expect("the server resets its statistics");
}

/// Returns the server time of a command in microseconds, since the last reset of the statistics.
pub async fn micros_of(command: &str, connection: &mut MultiplexedConnection) -> f64 {
    let text: String =
        cmd("INFO").arg("commandstats").query_async(connection).await.expect("the server has statistics");
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:")))
        .expect("the command was called");
    let value =
        line.split(',').find_map(|field| field.strip_prefix("usec=")).expect("the server reports the time per call");
    value.parse().expect("the time is a number")
}

/// Runs the benchmark of the Python package `limits`, if `PYTHON_WITH_LIMITS` is set.
pub fn run_peer(url: &str) {
    let Some(python) = std::env::var_os("PYTHON_WITH_LIMITS") else { return };
    println!();
    let peer = concat!(env!("CARGO_MANIFEST_DIR"), "/peer.py");
    let status = Command::new(python).args([peer, url]).status().expect("Python runs");
    assert!(status.success(), "{status}");
}

/// An entry of the slow log: number, time, duration, words of the command, address and name of the
/// client.
type SlowLogEntry = (u64, u64, u64, Vec<Vec<u8>>, String, String);

/// Returns the words of the `EVALSHA` command that `call` sends.
pub async fn script_call(call: impl Future<Output = ()>, connection: &mut MultiplexedConnection) -> Vec<Vec<u8>> {
    for (setting, value) in [("slowlog-log-slower-than", "0"), ("slowlog-max-len", "16")] {
        cmd("CONFIG").arg("SET").arg(setting).arg(value).exec_async(connection).await.expect("the setting is valid");
    }
    call.await;
    let log: Vec<SlowLogEntry> =
        cmd("SLOWLOG").arg("GET").query_async(connection).await.expect("the server keeps a log");
    let never = cmd("CONFIG").arg("SET").arg("slowlog-log-slower-than").arg(-1).to_owned();
    never.exec_async(connection).await.expect("the setting is valid");
    log.into_iter().map(|entry| entry.3).find(|words| words[0] == b"EVALSHA").expect("a script was called")
}

/// Returns the memory in bytes of the only key that matches the pattern.
pub async fn bytes_of(pattern: &str, connection: &mut MultiplexedConnection) -> u64 {
    let keys: Vec<String> = cmd("KEYS").arg(pattern).query_async(connection).await.expect("the server has keys");
    let [key] = &keys[..] else { panic!("{keys:?}") };
    cmd("MEMORY").arg("USAGE").arg(key).query_async(connection).await.expect("the server knows its memory")
}
