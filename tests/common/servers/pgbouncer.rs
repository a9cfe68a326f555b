//! PgBouncer, the connection pooler, in transaction mode.

use std::env;
use std::fs;
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::postgres::{Postgres, ask, psql, scratch, unprivileged};
use super::process::Process;
use super::{STARTS_WITHIN, free_port};

/// A PgBouncer in front of a server, which it connects to at most `pool_size` times.
#[derive(Debug)]
pub struct PgBouncer {
    _process: Process,
    folder: PathBuf,
    port: u16,
}

impl PgBouncer {
    pub fn start(server: &Postgres, pool_size: u32) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let folder = scratch(&env::temp_dir(), &format!("pgbouncer-{}", COUNT.fetch_add(1, Ordering::Relaxed)));
        let file = folder.join("pgbouncer.ini");
        let started = Instant::now();
        loop {
            let port = free_port();
            let config = format!(
                "[databases]\npostgres = host=127.0.0.1 port={} user=postgres\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
                 listen_port = {port}\nunix_socket_dir =\nauth_type = any\npool_mode = transaction\n\
                 default_pool_size = {pool_size}\n",
                server.port()
            );
            fs::write(&file, config).unwrap();
            let mut process = Process::start(unprivileged("pgbouncer").arg(&file), "pgbouncer");
            while !process.has_ended() {
                if TcpStream::connect(("127.0.0.1", port)).is_ok() && !process.has_ended() {
                    return Self { _process: process, folder, port };
                }
                assert!(started.elapsed() < STARTS_WITHIN, "PgBouncer does not start");
                thread::sleep(Duration::from_millis(5));
            }
            // Retries, because another process may have taken the port.
            assert!(started.elapsed() < STARTS_WITHIN, "PgBouncer does not start");
        }
    }

    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    /// Executes a statement as another program, and returns the rows as lines.
    pub fn ask(&self, sql: &str) -> String {
        ask(psql("127.0.0.1", self.port), sql)
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}
