//! Does the same work with tower-ratelimit and with its peers, side by side, and judges the goals.
//!
//! Subjects take turns in one process, so whatever else the machine is doing slows all of them. Arguments are texts: only
//! rows whose name contains one of them are measured.

mod alloc;
mod keys;
mod measure;
mod rows;
mod subject;
mod table;

fn main() {
    let mut table = table::Table::new(std::env::args().skip(1).collect());
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
