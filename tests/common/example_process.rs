//! The example server as a process.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};

/// A running example server. Dropping it kills the process.
#[derive(Debug)]
pub struct Server {
    pub child: Child,
    address: String,
}

impl Server {
    pub fn start(flags: &[&str]) -> Self {
        Self::start_with(flags, Stdio::inherit())
    }

    pub fn start_with(flags: &[&str], log: Stdio) -> Self {
        let mut child = Command::new(server())
            // The documented commands expect the root of the repository as the current directory.
            .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
            .args(["--listen", "127.0.0.1:0"])
            .args(flags)
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .expect("the server starts");
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let first = lines.next().unwrap().unwrap();
        let address =
            first.strip_prefix("listening on http://").expect("the first line contains the address").to_owned();
        let second = lines.next().unwrap().unwrap();
        assert!(second.contains(&format!("curl -i http://{address}/")), "{second}");
        Self { child, address }
    }

    /// Sends SIGTERM and waits until the process ends.
    pub fn terminate(&mut self) -> ExitStatus {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        self.child.wait().unwrap()
    }

    pub fn address(&self) -> &str {
        &self.address
    }

    /// Returns the status, and the response head in lower case.
    pub fn get(&self, path: &str, headers: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let head = answer.split("\r\n\r\n").next().unwrap().to_lowercase();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), head)
    }

    pub fn status(&self, path: &str, headers: &str) -> u16 {
        self.get(path, headers).0
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The path of the example server, which cargo builds for the tests of this package.
pub fn server() -> PathBuf {
    let deps = std::env::current_exe().unwrap();
    deps.parent().unwrap().parent().unwrap().join("server")
}
