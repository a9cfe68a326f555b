//! Header values for numbers, most of them from a cache.

use std::cell::RefCell;
use std::sync::LazyLock;

use http::header::HeaderValue;

/// Values below this number are kept forever, because most limits are small. Cloning one allocates
/// nothing.
const SMALL: usize = 1_025;

fn small(number: u64) -> Option<HeaderValue> {
    static VALUES: LazyLock<Vec<HeaderValue>> = LazyLock::new(|| {
        (0..SMALL).map(|number| HeaderValue::from_static(Box::leak(number.to_string().into_boxed_str()))).collect()
    });
    usize::try_from(number).ok().and_then(|number| VALUES.get(number)).cloned()
}

pub(super) fn number(number: u64) -> HeaderValue {
    small(number).unwrap_or_else(|| format(number))
}

/// A source of large numbers that repeat often enough to cache their header values.
#[derive(Clone, Copy)]
pub(super) enum Frequent {
    Amount,
    /// A separate cache, so that changing times do not evict constant amounts.
    Time,
}

/// Returns a value from a cache of recent large numbers, one for each thread.
pub(super) fn frequent(kind: Frequent, number: u64) -> HeaderValue {
    const SLOTS: usize = 32;
    type Recent = [[(u64, Option<HeaderValue>); SLOTS]; 2];
    thread_local! { static RECENT: RefCell<Recent> = const { RefCell::new([const { [const { (0, None) }; SLOTS] }; 2]) } }
    let find = |recent: &RefCell<Recent>| {
        #[allow(clippy::cast_possible_truncation)] // less than SLOTS
        let (cached, text) = &mut recent.borrow_mut()[kind as usize][(number % SLOTS as u64) as usize];
        if *cached != number {
            *text = None;
        }
        *cached = number;
        text.get_or_insert_with(|| format(number)).clone()
    };
    // The cache is gone while the thread exits.
    small(number).unwrap_or_else(|| RECENT.try_with(find).unwrap_or_else(|_| format(number)))
}

/// Formats a number with one allocation. `HeaderValue::from` needs two.
fn format(number: u64) -> HeaderValue {
    HeaderValue::from_str(itoa::Buffer::new().format(number)).expect("digits are a valid header value")
}
