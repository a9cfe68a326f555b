//! Keys, made before the clock starts, in the order in which they are hit.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicUsize, Ordering};

use tower_ratelimit::Key;

/// A table that calls microseconds what one step of so many hits takes has said nanoseconds of one hit.
pub(crate) const BATCH: usize = 1_000;

/// Makes key number `i`; no two are the same.
pub(crate) type MakeKey = fn(u32) -> Key;

pub(crate) fn address(i: u32) -> Key {
    Key::from(Ipv4Addr::from_bits(i.wrapping_mul(2_654_435_761)))
}

/// Of 13 bytes, up to a million of them.
pub(crate) fn string(i: u32) -> Key {
    Key::from(format!("client-{i:06}"))
}

/// As long as a signed token: more than a key keeps without an allocation.
pub(crate) fn long_string(i: u32) -> Key {
    Key::from(format!("{:=<193}{i:07}", "token-"))
}

/// Hits to come, which go round and round in batches. Threads take turns at them.
pub(crate) struct Hits {
    keys: Vec<Key>,
    next: AtomicUsize,
}

impl Hits {
    /// Each of `count` keys once a round. Their hashes are secret, so nobody foresees where in memory the next one is.
    pub(crate) fn in_turn(count: u32, key: MakeKey) -> Self {
        Self::of((0..count).map(key).collect())
    }

    /// By Zipf's law: the second of `count` keys is hit half as often as the first, the third a third as often.
    pub(crate) fn by_popularity(count: u32, key: MakeKey) -> Self {
        let popular = |chance: f64| {
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // from 0 to `count`
            let rank = f64::from(count).powf(chance) as u32;
            key(rank.saturating_sub(1))
        };
        Self::of(chances().take(count as usize).map(popular).collect())
    }

    fn of(keys: Vec<Key>) -> Self {
        assert!(keys.len().is_multiple_of(BATCH) || BATCH.is_multiple_of(keys.len()), "no batch is cut short");
        Self { keys, next: AtomicUsize::new(0) }
    }

    pub(crate) fn batch(&self) -> Batch<'_> {
        let start = self.next.fetch_add(BATCH, Ordering::Relaxed) % self.keys.len();
        Batch(&self.keys[start..self.keys.len().min(start + BATCH)])
    }
}

/// So many keys as there are in a batch, or fewer to be hit several times each.
#[derive(Clone, Copy)]
pub(crate) struct Batch<'a>(&'a [Key]);

impl Batch<'_> {
    pub(crate) fn each(self, mut hit: impl FnMut(&Key)) {
        for _ in 0..BATCH / self.0.len() {
            self.0.iter().for_each(&mut hit);
        }
    }
}

/// From 0 to 1, the same ones each time.
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
