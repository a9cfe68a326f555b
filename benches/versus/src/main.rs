//! Does the same work with tower-ratelimit and with its peers, side by side, and judges the goals.
//!
//! Subjects take turns in one process, so whatever else the machine is doing slows all of them. Arguments are texts: only
//! rows whose name contains one of them are measured. `curves OUT.svg` instead draws how a hit's time grows with the
//! number of keys, limits and threads.

mod alloc;
mod curves;
mod keys;
mod measure;
mod panel;
mod plot;
mod rows;
mod subject;
mod table;

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [mode, file] = arguments.as_slice()
        && mode == "curves"
    {
        return plot::draw(file, &curves::measure());
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
