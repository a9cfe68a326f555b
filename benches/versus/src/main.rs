//! Compares tower-ratelimit with similar crates, and checks the goals.
//!
//! All limiters take turns in one process, so other load on the machine slows all of them.
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

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [mode, file] = arguments.as_slice()
        && mode == "curves"
    {
        std::fs::write(file, picture::draw(&curves::measure()))?;
        return Ok(());
    }
    rows(arguments);
    Ok(())
}

fn rows(filter: Vec<String>) {
    let mut table = table::Table::new(filter);
    rows::decisions::measure(&mut table);
    rows::policies::measure(&mut table);
    rows::refusals::measure(&mut table);
    rows::memory::measure(&mut table);
    rows::growth::measure(&mut table);
    rows::flood::measure(&mut table);
    rows::middleware::measure(&mut table);
    rows::router::measure(&mut table);
    table.finish();
}
