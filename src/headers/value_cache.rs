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

/// What comes again and again for a while.
#[derive(Clone, Copy)]
pub(super) enum Frequent {
    Amount,
    /// Kept apart, so that none of those that pass by takes the place of an amount that stays.
    Time,
}

/// Each thread keeps the texts of the large numbers that it met last.
pub(super) fn frequent(kind: Frequent, number: u64) -> HeaderValue {
    const KEPT: usize = 32;
    type Recent = [[(u64, Option<HeaderValue>); KEPT]; 2];
    thread_local! { static RECENT: RefCell<Recent> = const { RefCell::new([const { [const { (0, None) }; KEPT] }; 2]) } }
    let find = |recent: &RefCell<Recent>| {
        #[allow(clippy::cast_possible_truncation)] // less than KEPT
        let (of, text) = &mut recent.borrow_mut()[kind as usize][(number % KEPT as u64) as usize];
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
