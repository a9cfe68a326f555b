//! Keys in an order that defeats the prefetcher. They are created before the timing starts.

use std::hash::Hash;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicUsize, Ordering};

use tower_ratelimit::Key;

/// A key type of a peer, with a conversion to our key.
pub trait PeerKey: Clone + Eq + Hash + Send + Sync + 'static {
    fn ours(&self) -> Key;
}

impl PeerKey for IpAddr {
    fn ours(&self) -> Key {
        Key::from(*self)
    }
}

impl PeerKey for String {
    fn ours(&self) -> Key {
        Key::from(self)
    }
}

/// Returns address number `i`. All addresses are different.
pub fn address(i: u32) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from_bits(i.wrapping_mul(2_654_435_761)))
}

/// Returns string number `i`. It has 13 bytes, for up to a million strings.
pub fn string(i: u32) -> String {
    format!("client-{i:06}")
}

pub const THREADS: usize = 2;

/// A set of keys in a shuffled order, which differs per thread. The sequence repeats, with each key
/// once per round.
pub struct Orders<K> {
    orders: [Vec<K>; THREADS],
    /// The next index of each thread, because a sample may be shorter than a round.
    next: [AtomicUsize; THREADS],
}

impl<K> Orders<K> {
    pub fn new(count: u32, key: impl Fn(u32) -> K) -> Self {
        let order = |thread: usize| shuffled(count, thread as u64 + 1).into_iter().map(&key).collect();
        Self { orders: std::array::from_fn(order), next: Default::default() }
    }

    pub fn all(&self) -> &[K] {
        &self.orders[0]
    }

    pub fn walk(&self, thread: usize) -> Walk<'_, K> {
        let resume = &self.next[thread];
        Walk { keys: &self.orders[thread], at: resume.load(Ordering::Relaxed), resume }
    }
}

pub struct Walk<'a, K> {
    keys: &'a [K],
    at: usize,
    resume: &'a AtomicUsize,
}

impl<'a, K> Walk<'a, K> {
    pub fn next(&mut self) -> &'a K {
        let key = &self.keys[self.at];
        self.at += 1;
        if self.at == self.keys.len() {
            self.at = 0;
        }
        key
    }
}

impl<K> Drop for Walk<'_, K> {
    fn drop(&mut self) {
        self.resume.store(self.at, Ordering::Relaxed);
    }
}

fn shuffled(count: u32, seed: u64) -> Vec<u32> {
    let mut random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut order: Vec<u32> = (0..count).collect();
    for end in (1..order.len()).rev() {
        // xorshift64
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        #[allow(clippy::cast_possible_truncation)] // at most `end`
        let other = (random % (end as u64 + 1)) as usize;
        order.swap(end, other);
    }
    order
}
