//! Keys in the order of their hits. They are created before the timing starts.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicUsize, Ordering};

use tower_ratelimit::Key;

/// The number of hits per step. So the microseconds of a step are the nanoseconds of a hit.
pub(crate) const BATCH: usize = 1_000;

/// Creates key number `i`. All keys are different.
pub(crate) type MakeKey = fn(u32) -> Key;

pub(crate) fn address(i: u32) -> Key {
    Key::from(Ipv4Addr::from_bits(i.wrapping_mul(2_654_435_761)))
}

/// Returns a key of 13 bytes, for up to a million keys.
pub(crate) fn string(i: u32) -> Key {
    Key::from(format!("client-{i:06}"))
}

/// Returns a key as long as a signed token. It is too long to be stored without an allocation.
pub(crate) fn long_string(i: u32) -> Key {
    Key::from(format!("{:=<193}{i:07}", "token-"))
}

/// An endless sequence of hits, in batches that threads take in turn.
pub(crate) struct Hits {
    keys: Vec<Key>,
    next: AtomicUsize,
}

impl Hits {
    /// Hits each of `count` keys once per round. The hashes are random, so the processor cannot
    /// prefetch the memory of the next key.
    pub(crate) fn round_robin(count: u32, key: MakeKey) -> Self {
        Self::new((0..count).map(key).collect())
    }

    /// Hits `count` keys by Zipf's law: the second key half as often as the first, the third a
    /// third as often.
    pub(crate) fn by_popularity(count: u32, key: MakeKey) -> Self {
        let popular = |chance: f64| {
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // from 0 to `count`
            let rank = f64::from(count).powf(chance) as u32;
            key(rank.saturating_sub(1))
        };
        Self::new(chances().take(count as usize).map(popular).collect())
    }

    fn new(keys: Vec<Key>) -> Self {
        assert!(
            keys.len().is_multiple_of(BATCH) || BATCH.is_multiple_of(keys.len()),
            "the keys divide into full batches"
        );
        Self { keys, next: AtomicUsize::new(0) }
    }

    pub(crate) fn batch(&self) -> Batch<'_> {
        let start = self.next.fetch_add(BATCH, Ordering::Relaxed) % self.keys.len();
        Batch(&self.keys[start..self.keys.len().min(start + BATCH)])
    }
}

/// The keys of one batch. If they are fewer than [`BATCH`], each is hit several times.
#[derive(Clone, Copy)]
pub(crate) struct Batch<'a>(&'a [Key]);

impl Batch<'_> {
    pub(crate) fn each(self, mut hit: impl FnMut(&Key)) {
        for _ in 0..BATCH / self.0.len() {
            self.0.iter().for_each(&mut hit);
        }
    }
}

/// Returns pseudorandom numbers from 0 to 1. The sequence is always the same.
fn chances() -> impl Iterator<Item = f64> {
    let mut random = 0x9E37_79B9_7F4A_7C15_u64;
    std::iter::repeat_with(move || {
        // xorshift64
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        f64::from((random >> 32) as u32) / f64::from(u32::MAX)
    })
}
