#![no_main]

use std::sync::LazyLock;

use fuzz::Reader;
use libfuzzer_sys::fuzz_target;

static READER: LazyLock<Reader> = LazyLock::new(Reader::forwarded);

fuzz_target!(|input: &[u8]| READER.check(input));
