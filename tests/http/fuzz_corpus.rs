//! Runs the assertions of the fuzzers on their seeds, so that the fuzzers keep compiling.

#[path = "../../fuzz/src/lib.rs"]
#[allow(unreachable_pub, reason = "it is a separate library in `fuzz`")]
mod fuzz;

use std::fs;
use std::path::Path;

use fuzz::Reader;

fn replay(target: &str, reader: &Reader) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let mut inputs = 0;
    for input in fs::read_dir(corpus).unwrap() {
        reader.check(&fs::read(input.unwrap().path()).unwrap());
        inputs += 1;
    }
    assert!(inputs >= 10, "the seeds were found");
}

#[test]
fn seeds_of_x_forwarded_for_pass() {
    replay("x_forwarded_for", &Reader::x_forwarded_for());
}

#[test]
fn seeds_of_forwarded_pass() {
    replay("forwarded", &Reader::forwarded());
}
