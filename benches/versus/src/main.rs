//! Compares tower-ratelimit with similar crates, and checks the goals.
//!
//! All limiters take turns in one process, so other load on the machine slows all of them. A process
//! can be slower than others for as long as it lives, for example by the addresses of its code and its
//! stack. So several processes measure, and a row shows the median of their medians.
//!
//! The arguments are filters: only rows whose name contains one of them are measured. `curves
//! OUT.svg` draws the time of a hit by the number of keys, limits and threads instead.

mod alloc;
mod curves;
mod keys;
mod measure;
#[path = "../../support/picture.rs"]
mod picture;
mod rows;
mod subject;
mod table;

use std::env;
use std::error::Error;
use std::fs;
use std::process::{Command, Stdio};

use table::Table;

/// The number of processes that measure. It is odd, so that the median is a figure of one of them.
const PROCESSES: usize = 5;

/// The first argument of a process that measures once, and prints its medians.
const ONCE: &str = "--once";

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match arguments.as_slice() {
        [mode, file] if mode == "curves" => fs::write(file, picture::draw(&curves::measure()))?,
        [mode, filter @ ..] if mode == ONCE => print!("{}", measured(filter.to_vec()).medians()),
        filter => {
            let mut table = Table::new(Vec::new());
            for number in 1..=PROCESSES {
                eprintln!("process {number} of {PROCESSES}");
                let output =
                    Command::new(env::current_exe()?).arg(ONCE).args(filter).stderr(Stdio::inherit()).output()?;
                if !output.status.success() {
                    return Err(format!("process {number} failed: {}", output.status).into());
                }
                table.add(&String::from_utf8(output.stdout)?);
            }
            table.print();
        }
    }
    Ok(())
}

fn measured(filter: Vec<String>) -> Table {
    let mut table = Table::new(filter);
    rows::decisions::measure(&mut table);
    rows::policies::measure(&mut table);
    rows::refusals::measure(&mut table);
    rows::memory::measure(&mut table);
    rows::growth::measure(&mut table);
    rows::flood::measure(&mut table);
    rows::middleware::measure(&mut table);
    rows::router::measure(&mut table);
    table
}
