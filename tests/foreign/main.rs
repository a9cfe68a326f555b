//! The library beside independent implementations in Rust. `scripts/foreign` runs it, and then passes
//! the lists to a parser in Python.

#[path = "../common/random.rs"]
#[allow(dead_code)] // other tests use the rest
mod random;
mod read;
mod services;
mod written;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use serde_json::Value;
use sfv::{BareItem, Item, List, ListEntry, Parser};

/// The number of lists in each direction.
const LISTS: usize = 100_000;

/// Parses a list of strings with parameters, by the crate `sfv`. Returns `None` for other lists, and for
/// an empty one.
fn members(line: &str) -> Option<Vec<Item>> {
    let list: List = Parser::new(line).parse().ok()?;
    let is_string = |entry: &ListEntry| matches!(entry, ListEntry::Item(item) if text(item).is_some());
    if list.is_empty() || !list.iter().all(is_string) {
        return None;
    }
    let items = list.into_iter().filter_map(|entry| if let ListEntry::Item(item) = entry { Some(item) } else { None });
    Some(items.collect())
}

fn text(item: &Item) -> Option<&str> {
    if let BareItem::String(text) = &item.bare_item { Some(text.as_str()) } else { None }
}

/// Returns a number, multiplied by 1,000.
fn thousandths(item: &Item, name: &str) -> Option<i64> {
    match item.params.get(name)? {
        BareItem::Integer(integer) => Some(i64::from(*integer) * 1_000),
        BareItem::Decimal(decimal) => Some(decimal.as_integer_scaled_1000().into()),
        _ => None,
    }
}

/// A file with one value per line, for `lists.py`.
struct Lines(BufWriter<File>);

impl Lines {
    fn create(name: &str) -> Self {
        Self(BufWriter::new(File::create(Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)).unwrap()))
    }

    fn add(&mut self, value: &Value) {
        writeln!(self.0, "{value}").unwrap();
    }
}
