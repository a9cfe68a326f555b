//! Runs the load generator wrk for a second.

use std::process::Command;

/// The report of wrk.
pub struct Load {
    pub requests: u64,
    pub refused: u64,
    pub per_second: f64,
}

/// Sends requests from one thread, so that two cores are enough.
pub fn run(url: &str) -> Load {
    let output = Command::new("wrk").args(["-t1", "-c32", "-d1s", url]).output().expect("scripts/load installs wrk");
    let report = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && !report.contains("Socket errors"), "{report}");
    let after = |label: &str| report.lines().find_map(|line| line.trim().strip_prefix(label)).map(str::trim);
    let requests = report.lines().find_map(|line| line.trim().split_once(" requests in ")).map(|(count, _)| count);
    Load {
        requests: number(requests),
        refused: after("Non-2xx or 3xx responses:").map_or(0, |count| number(Some(count))),
        per_second: number(after("Requests/sec:")),
    }
}

fn number<T: std::str::FromStr>(text: Option<&str>) -> T {
    text.and_then(|text| text.parse().ok()).expect("wrk reports it")
}
