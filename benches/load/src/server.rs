//! Runs the server as a separate process.

use std::env;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

pub struct Server {
    process: Child,
    address: String,
}

impl Server {
    /// Starts the program `server` in the directory of this program.
    pub fn start() -> Self {
        let program = env::current_exe().expect("this program has a path").with_file_name("server");
        let mut process = Command::new(program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the server was built with this program");
        let mut address = String::new();
        let output = process.stdout.take().expect("stdout is piped");
        BufReader::new(output).read_line(&mut address).expect("the server prints its address");
        Self { process, address: address.trim().to_owned() }
    }

    pub fn url(&self, route: &str) -> String {
        format!("http://{}/{route}", self.address)
    }

    /// Returns the CPU time of the first thread, which does all the work, in microseconds. Uses
    /// `schedstat`, because `stat` has a resolution of 10 ms.
    pub fn cpu_micros(&self) -> f64 {
        let path = format!("/proc/{}/schedstat", self.process.id());
        let text = fs::read_to_string(path).expect("Linux reports the CPU time");
        let nanos: u64 = text.split(' ').next().and_then(|nanos| nanos.parse().ok()).expect("nanoseconds come first");
        nanos as f64 / 1_000.0
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The server exits when its standard input ends.
        drop(self.process.stdin.take());
        _ = self.process.wait();
    }
}
