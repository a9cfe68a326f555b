//! Numbers as the values of header fields, most of them without writing them anew.

use std::cell::RefCell;
use std::sync::LazyLock;

use http::header::HeaderValue;

/// Most limits, and what remains of them, are small: their texts are kept ready, and cloning one allocates nothing.
const SMALL: usize = 1_025;

fn ready_made(number: u64) -> Option<HeaderValue> {
    static READY: LazyLock<Vec<HeaderValue>> = LazyLock::new(|| {
        (0..SMALL).map(|number| HeaderValue::from_static(Box::leak(number.to_string().into_boxed_str()))).collect()
    });
    usize::try_from(number).ok().and_then(|number| READY.get(number)).cloned()
}

pub(super) fn number(number: u64) -> HeaderValue {
    ready_made(number).unwrap_or_else(|| written(number))
}

/// Large limits and instants come again and again for a while: each thread keeps the texts of those it met last.
pub(super) fn frequent(number: u64) -> HeaderValue {
    const KEPT: usize = 64;
    type Recent = [(u64, Option<HeaderValue>); KEPT];
    thread_local! { static RECENT: RefCell<Recent> = const { RefCell::new([const { (0, None) }; KEPT]) } }
    let find = |recent: &RefCell<Recent>| {
        #[allow(clippy::cast_possible_truncation)] // less than KEPT
        let (of, text) = &mut recent.borrow_mut()[(number % KEPT as u64) as usize];
        if *of != number {
            *text = None;
        }
        *of = number;
        text.get_or_insert_with(|| written(number)).clone()
    };
    // A thread that is ending has none any more.
    ready_made(number).unwrap_or_else(|| RECENT.try_with(find).unwrap_or_else(|_| written(number)))
}

/// Not `HeaderValue::from`, which reserves room for the longest number and gives it back: two allocations for one.
fn written(number: u64) -> HeaderValue {
    HeaderValue::from_str(itoa::Buffer::new().format(number)).expect("digits can stand in a header")
}
