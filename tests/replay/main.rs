//! Replays golden vectors on a storage whose clock it controls.
//!
//! `cargo run --example replay -- [--storage URL] tests/vectors/*.json` prints a line for each
//! mismatch and a last line `N steps, M mismatches`. The exit status is 1 if there are mismatches,
//! and 2 if a file cannot be read or the storage fails.
//!
//! A boundary of a calendar counts as a step.
//!
//! The storage defaults to `memory://`. Other storages need `--features servers`. Their keys begin
//! with `replay`, and expire with their windows.

use std::process::ExitCode;

use common::vectors::{Error, ReplayTarget};

fn main() -> ExitCode {
    let mut files: Vec<String> = std::env::args().skip(1).collect();
    let mut url = "memory://".to_owned();
    if files.first().is_some_and(|first| first == "--storage") && files.len() > 1 {
        url = files.remove(1);
        files.remove(0);
    }
    if files.is_empty() {
        eprintln!("usage: replay [--storage URL] FILE..");
        return ExitCode::from(2);
    }
    let target = match ReplayTarget::at(&url) {
        Ok(target) => target,
        Err(error) => {
            eprintln!("--storage: {error}");
            return ExitCode::from(2);
        }
    };
    let (mut steps, mut mismatches) = (0, 0);
    for file in files {
        match std::fs::read_to_string(&file).map_err(Error::from).and_then(|text| target.replay(&text)) {
            Ok((replayed, wrong)) => {
                for line in &wrong {
                    println!("{line}");
                }
                steps += replayed;
                mismatches += wrong.len();
            }
            Err(error) => {
                eprintln!("{file}: {error}");
                return ExitCode::from(2);
            }
        }
    }
    println!("{steps} steps, {mismatches} mismatches");
    ExitCode::from(u8::from(mismatches > 0))
}
