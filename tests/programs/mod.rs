//! The examples as programs of their own.

#![allow(dead_code, reason = "each file of tests takes what it needs")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// An example's executable, built if it is not there yet.
pub(crate) fn example(name: &str) -> PathBuf {
    let built = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--example", name, "--manifest-path"])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
        .status();
    assert!(built.is_ok_and(|status| status.success()), "the example {name} does not build");
    let deps = std::env::current_exe().unwrap();
    deps.parent().unwrap().parent().unwrap().join("examples").join(name)
}

/// The example server, running.
pub(crate) struct Server {
    pub(crate) child: Child,
    address: String,
}

impl Server {
    pub(crate) fn start(flags: &[&str]) -> Self {
        Self::start_with(flags, Stdio::inherit())
    }

    pub(crate) fn start_with(flags: &[&str], log: Stdio) -> Self {
        let mut child = Command::new(server())
            .args(["--listen", "127.0.0.1:0"])
            .args(flags)
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .expect("the server starts");
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let first = lines.next().unwrap().unwrap();
        let address = first.strip_prefix("listening on http://").expect("the first line says where").to_owned();
        let second = lines.next().unwrap().unwrap();
        assert!(second.contains(&format!("curl -i http://{address}/")), "{second}");
        Self { child, address }
    }

    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// The status, and the head in lower case.
    pub(crate) fn get(&self, path: &str, headers: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let head = answer.split("\r\n\r\n").next().unwrap().to_lowercase();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), head)
    }

    pub(crate) fn status(&self, path: &str, headers: &str) -> u16 {
        self.get(path, headers).0
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Built once for all tests of a file.
pub(crate) fn server() -> PathBuf {
    static BUILT: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();
    BUILT.get_or_init(|| example("server")).clone()
}
