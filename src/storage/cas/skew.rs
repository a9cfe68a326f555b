//! Corrects the differences between the clocks of nodes.
//!
//! A key has one time. Each text begins with the newest instant at which its key was decided, and
//! no later decision is made at an earlier instant. So the time of a key never goes back, although
//! the clocks of its nodes differ.
//!
//! A clock that is behind by more than `max_skew` has an offset of its own: a constant difference to
//! the time of the key. So the time of the key goes on by the time that passes on any clock, and
//! does not jump to the fastest clock again after each decision of a slower one.
//!
//! An earlier version moved the states back to the slow clock. The next decision of a fast node
//! then got the whole difference as time that had passed, once per alternation: with clocks 7 s
//! apart, `token-bucket 100/minute` admitted 6,098 hits in 6 s.
//!
//! The bound is the promise plus one quota per change of a clock. The key's time runs ahead of the
//! real time only if a node that is not behind has a faster clock than all before it, or if a
//! process that has never decided the key continues with an offset that is greater than the
//! difference of its clock. Each process does one of them once.
//!
//! A process remembers its own offset. Offsets in the text alone would admit more: an offset cannot
//! distinguish time that has passed from a faster clock, so each jump makes the other offsets
//! outdated, and five nodes could jump ten times. The mark shows that the key has expired since, so
//! that the offset is outdated.

use std::hash::{BuildHasher, RandomState};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::decision::Decision;
use crate::policy::{Op, Policy};
use crate::storage::recent_map::RecentMap;
use crate::storage::text::{self, TextHead, UnknownVersion};
use crate::storage::{StorageError, StorageErrorKind};
use crate::sync::unpoisoned;
use crate::time::{Timestamp, micros};

/// The shortest time between two warnings.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// The latest time of a node, in microseconds since 1970: it is in the year 2255. A clock that is
/// further ahead would store instants that no node can parse.
const LATEST: u64 = 1 << 53;

/// The metric that counts keys whose time is too far ahead of the node's clock.
#[cfg(feature = "metrics")]
const SKEWED: &str = "ratelimit_clock_skew_total";

/// The limit for the difference between a key's time and this node's clock.
#[derive(Debug)]
pub(in crate::storage) struct Skew {
    max: Duration,
    known: Known,
    warned: Mutex<Option<Instant>>,
}

impl Skew {
    pub(in crate::storage) fn new(max: Duration) -> Self {
        Self { max, known: Known::default(), warned: Mutex::default() }
    }

    /// Returns `false` if `max_skew` is zero, so that each node decides at its own time.
    fn is_on(&self) -> bool {
        !self.max.is_zero()
    }

    pub(in crate::storage) fn max(&self) -> Duration {
        self.max
    }

    /// Remembers the difference between the time of `key` and this node's clock in a view that is
    /// the base of a change. A peek changes nothing, and a recalled text may be outdated, so their
    /// differences are not remembered.
    pub(in crate::storage) fn remember(&self, key: &str, behind: Behind) {
        if self.is_on() {
            self.known.insert(key, behind);
        }
    }

    /// Returns the states in `text`, and the instant to decide `key` at. `own` is the time of this
    /// node.
    pub(in crate::storage) fn view<'a>(&self, key: &str, text: &'a str, own: Timestamp) -> View<'a> {
        let own = own.min(Timestamp::from_micros(LATEST));
        let (stored, states, unknown) = match text::split(text) {
            Ok((head, states)) => (head, states, None),
            Err(version) => (None, "", Some(unknown_version(&version))),
        };
        let head = self.is_on().then(|| stored.unwrap_or_else(|| TextHead::new(own)));
        let mut view = View { at: own, behind: Behind::default(), states, head, has_new_offset: false, unknown };
        let Some(head) = &mut view.head else { return view };
        let (gap, max) = (head.newest.since(own), micros(self.max));
        if gap <= max {
            view.at = head.newest.max(own);
            head.newest = view.at;
            return view;
        }
        let behind = match self.known.get(key) {
            Some(known) if head.mark > 0 && known.mark == head.mark && gap <= known.micros.saturating_add(max) => {
                known.micros
            }
            // Another clock has moved the time of the key ahead, or this clock has gone back. The
            // time that has passed is unknown.
            Some(_) => gap,
            // This node may have decided the key before it was restarted.
            None => head.offset(gap - max).unwrap_or(gap).max(gap),
        };
        // The time on this clock since the newest decision.
        head.newest = head.newest.plus(behind.saturating_sub(gap));
        view.has_new_offset = head.add_offset(behind, max);
        (view.at, view.behind) = (head.newest, Behind { mark: head.mark, micros: behind });
        self.report(Duration::from_micros(gap));
        view
    }

    #[cold]
    fn report(&self, ahead: Duration) {
        #[cfg(feature = "metrics")]
        metrics::counter!(SKEWED).increment(1);
        let mut warned = unpoisoned(self.warned.lock());
        if warned.is_some_and(|at| at.elapsed() < WARN_EVERY) {
            return;
        }
        *warned = Some(Instant::now());
        #[cfg(feature = "tracing")]
        tracing::warn!(?ahead, max_skew = ?self.max, "clocks of nodes differ by more than max_skew, check NTP on all nodes");
        let _ = ahead;
    }
}

/// The states of a key, and the instant to decide at.
#[derive(Debug)]
pub(in crate::storage) struct View<'a> {
    /// The instant to decide at, in the time of the key.
    pub(in crate::storage) at: Timestamp,
    /// The difference between the time of the key and this node's clock, if it exceeds `max_skew`.
    pub(in crate::storage) behind: Behind,
    pub(in crate::storage) states: &'a str,
    /// The time of the key to store, or `None` if `max_skew` is zero.
    pub(in crate::storage) head: Option<TextHead>,
    /// `true` if `head` has a new offset, which must be stored.
    pub(in crate::storage) has_new_offset: bool,
    /// The error of all decisions, if the text has an unknown version.
    pub(in crate::storage) unknown: Option<StorageError>,
}

impl View<'_> {
    /// Decides a peek.
    pub(in crate::storage) fn peek(self, policy: &Policy, op: Op, cost: u32) -> Result<Decision, StorageError> {
        self.unknown.map_or(Ok(()), Err)?;
        let mut states = text::read(policy, self.states);
        Ok(policy.decide(&mut states, self.at, op, cost).with_at(self.at.minus(self.behind.micros)))
    }
}

/// Creates the error of a decision on a text of another version of this crate.
fn unknown_version(UnknownVersion(version): &UnknownVersion<'_>) -> StorageError {
    let message = format!(
        "the state of the key has the unknown format v{version}, which another version of this program wrote; upgrade \
         all processes, use another prefix for each version, or clear the key"
    );
    StorageError::new(StorageErrorKind::Unsupported, message)
}

/// The difference between the time of a key and the clock of this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::storage) struct Behind {
    /// The [mark](crate::storage::text::TextHead::mark) of the key's time.
    mark: u64,
    /// The microseconds by which the clock is behind the time of the key.
    pub(in crate::storage) micros: u64,
}

/// The keys that this process decided last, with the differences of their times to its clock.
#[derive(Debug, Default)]
struct Known {
    /// Keys are stored as hashes. The secrets are random, so clients cannot choose keys with equal
    /// hashes.
    secrets: RandomState,
    offsets: Mutex<RecentMap<u64, Behind>>,
}

impl Known {
    fn get(&self, key: &str) -> Option<Behind> {
        unpoisoned(self.offsets.lock()).get(&self.secrets.hash_one(key)).copied()
    }

    fn insert(&self, key: &str, behind: Behind) {
        unpoisoned(self.offsets.lock()).insert(self.secrets.hash_one(key), behind);
    }
}
