//! Limits the calls in flight on a connection, and detects a connection without replies.
//!
//! A server can only reply in time if it handles all calls in flight within one deadline (Little's
//! law). So the number of calls in flight has a limit. The limit falls when a call times out, and
//! rises with each reply.
//!
//! Overlapping waits count once as silence, so it does not matter whether callers wait for their
//! whole deadline. A wait that is noticed long after its deadline does not count, because then this
//! process is slow, not the server.
//!
//! A call that does not fit fails after three quarters of its time. Failing at once was measured
//! too: callers that retry immediately use all the time of the connection. With 10,000 tasks and a
//! timeout of 50 ms, Redis then replied to 4,000 to 6,000 calls per second, instead of 42,000 to
//! 47,000.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use super::reconnect::{Reconnecting, Usable};
use super::{Counted, Gauge, MOST, fail_delayed};
use crate::storage::StorageError;
use crate::sync::unpoisoned;

/// The smallest value of the limit.
const LEAST: usize = 16;

/// The number of replies that raise the limit by one.
const REPLIES_PER_STEP: usize = 16;

/// A connection is replaced when calls have waited without a reply for this many halves of a
/// deadline. This happens at the third call in a row that times out.
const HALF_DEADLINES: u32 = 5;

/// The state of the calls on one connection.
struct Calls {
    in_flight: Gauge,
    /// The limit of `in_flight`, times `REPLIES_PER_STEP`.
    limit: AtomicUsize,
    /// `true` from a call without a reply until the next reply. A reply locks `silence` only if
    /// this is `true`.
    is_silent: AtomicBool,
    silence: Mutex<Silence>,
}

/// The time that calls have waited since the last reply.
#[derive(Default)]
struct Silence {
    total: Duration,
    /// The end of the last wait. Waits that overlap are counted once.
    until: Option<Instant>,
    /// The longest timeout of these calls.
    timeout: Duration,
    /// The time when the limit last fell. Calls that began earlier do not lower it again.
    lowered: Option<Instant>,
}

/// An open connection whose calls are counted.
pub(in crate::storage) struct WithCalls<T> {
    connection: T,
    calls: Calls,
}

impl<T> WithCalls<T> {
    pub(in crate::storage) fn new(connection: T) -> Self {
        Self { connection, calls: Calls::default() }
    }

    /// Returns the number of calls in flight.
    #[cfg(feature = "postgres")]
    pub(in crate::storage) fn calls_in_flight(&self) -> usize {
        self.calls.in_flight.count()
    }

    /// Records a reply to a call whose caller no longer waits. It ends the silence.
    #[cfg(feature = "postgres")]
    pub(in crate::storage) fn record_sign_of_life(&self) {
        self.calls.record_sign_of_life();
    }
}

impl<T> Deref for WithCalls<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.connection
    }
}

impl<T: Usable> Usable for WithCalls<T> {
    fn is_usable(&self) -> bool {
        self.connection.is_usable()
    }

    fn close(&self) {
        self.connection.close();
    }
}

/// A call in flight. If it is dropped without a reply, its time counts as silence, even if its
/// caller stopped waiting before the deadline.
pub(in crate::storage) struct CallInFlight<'a, T: Usable> {
    of: &'a Reconnecting<WithCalls<T>>,
    connection: &'a Arc<WithCalls<T>>,
    begun: Instant,
    timeout: Duration,
    /// The number of hits in the call.
    count: usize,
    counted: Option<Counted>,
    is_answered: bool,
}

impl<T: Usable> Reconnecting<WithCalls<T>> {
    /// Returns an error if too many calls are in flight, or too many callers wait for a connection.
    /// Callers check this before they prepare a call, which costs more.
    pub(in crate::storage) fn overload(&self) -> Option<StorageError> {
        let (count, limit) = self.value().map_or_else(
            || (self.waiting.count(), MOST),
            |connection| {
                let Calls { in_flight, limit, .. } = &connection.calls;
                (in_flight.count(), limit.load(Ordering::Relaxed) / REPLIES_PER_STEP)
            },
        );
        (count >= limit).then(|| StorageError::overloaded(self.name(), limit))
    }

    /// Begins a call that times out at `deadline`.
    ///
    /// # Errors
    ///
    /// Returns an error if too many calls are in flight. The error is delayed by three quarters of
    /// the time until the deadline.
    pub(in crate::storage) async fn begin<'a>(
        &'a self,
        connection: &'a Arc<WithCalls<T>>,
        deadline: Instant,
    ) -> Result<CallInFlight<'a, T>, StorageError> {
        self.begin_several(connection, deadline, 1).await
    }

    /// Begins a call with several hits, like [`begin`](Self::begin). It counts as `count` calls, so
    /// the calls in flight can exceed the limit by less than `count`.
    ///
    /// # Errors
    ///
    /// The errors are those of `begin`.
    pub(in crate::storage) async fn begin_several<'a>(
        &'a self,
        connection: &'a Arc<WithCalls<T>>,
        deadline: Instant,
        count: usize,
    ) -> Result<CallInFlight<'a, T>, StorageError> {
        let Calls { in_flight, limit, .. } = &connection.calls;
        let limit = limit.load(Ordering::Relaxed) / REPLIES_PER_STEP;
        let Some(counted) = in_flight.enter(count, limit) else {
            let timeout = deadline.saturating_duration_since(Instant::now());
            return fail_delayed(StorageError::overloaded(self.name(), limit), timeout).await;
        };
        let begun = Instant::now();
        let timeout = deadline.saturating_duration_since(begun);
        Ok(CallInFlight { of: self, connection, begun, timeout, count, counted: Some(counted), is_answered: false })
    }
}

impl<T: Usable> CallInFlight<'_, T> {
    /// Ends the call with a reply.
    pub(in crate::storage) fn answered(mut self) {
        self.is_answered = true;
    }
}

impl<T: Usable> Drop for CallInFlight<'_, T> {
    fn drop(&mut self) {
        let calls = &self.connection.calls;
        self.counted = None;
        if self.is_answered {
            calls.record_reply(self.count);
        } else if calls.record_silence(self.begun, self.timeout) {
            self.of.give_up(self.connection, None);
        }
    }
}

impl Default for Calls {
    fn default() -> Self {
        Self {
            in_flight: Gauge::default(),
            limit: AtomicUsize::new(MOST * REPLIES_PER_STEP),
            is_silent: AtomicBool::new(false),
            silence: Mutex::default(),
        }
    }
}

impl Calls {
    fn record_reply(&self, count: usize) {
        // Not atomic: of two calls that end at the same time, only one may raise the limit.
        let limit = self.limit.load(Ordering::Relaxed);
        if limit < MOST * REPLIES_PER_STEP {
            self.limit.store((limit + count).min(MOST * REPLIES_PER_STEP), Ordering::Relaxed);
        }
        self.record_sign_of_life();
    }

    fn record_sign_of_life(&self) {
        // Read before writing: a write would invalidate the cache line of all other threads.
        if self.is_silent.load(Ordering::Relaxed) {
            let mut silence = unpoisoned(self.silence.lock());
            (silence.total, silence.until, silence.timeout) = (Duration::ZERO, None, Duration::ZERO);
            self.is_silent.store(false, Ordering::Relaxed);
        }
    }

    /// Records a call without a reply. Returns `true` if the connection has been silent for too
    /// long.
    fn record_silence(&self, begun: Instant, timeout: Duration) -> bool {
        // A call that began at its deadline has not waited for the server.
        if timeout.is_zero() {
            return false;
        }
        let mut silence = unpoisoned(self.silence.lock());
        let now = Instant::now();
        let from = silence.until.map_or(begun, |until| until.max(begun));
        // A call that ends much later than its deadline indicates that this machine is busy, and
        // may not have read the reply yet. Its time does not count.
        if now < begun + timeout * 3 / 2 {
            silence.total += now.saturating_duration_since(from);
        }
        silence.until = Some(now);
        silence.timeout = silence.timeout.max(timeout);
        if now >= begun + timeout && silence.lowered.is_none_or(|lowered| lowered <= begun) {
            let limit = self.limit.load(Ordering::Relaxed) / 10 * 7;
            self.limit.store(limit.max(LEAST * REPLIES_PER_STEP), Ordering::Relaxed);
            silence.lowered = Some(now);
        }
        self.is_silent.store(true, Ordering::Relaxed);
        silence.total * 2 >= silence.timeout * HALF_DEADLINES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_millis(100);

    fn limit(calls: &Calls) -> usize {
        calls.limit.load(Ordering::Relaxed) / REPLIES_PER_STEP
    }

    #[tokio::test(start_paused = true)]
    async fn callers_that_leave_early_count_as_silence() {
        let calls = Calls::default();
        let mut left = 0;
        loop {
            let begun = Instant::now();
            tokio::time::advance(TIMEOUT / 10).await;
            left += 1;
            if calls.record_silence(begun, TIMEOUT) {
                break;
            }
        }
        assert_eq!(left, 25, "two and a half deadlines");
        assert_eq!(limit(&calls), MOST, "no deadline passed");
    }

    #[tokio::test(start_paused = true)]
    async fn overlapping_waits_count_once_and_a_reply_ends_the_silence() {
        let calls = Calls::default();
        for _ in 0..2 {
            for _ in 0..2 {
                let begun = Instant::now();
                tokio::time::advance(TIMEOUT).await;
                assert!((0..50).all(|_| !calls.record_silence(begun, TIMEOUT)));
            }
            calls.record_reply(1);
        }
    }

    /// Guards against this defect: one call with a long timeout, such as `ready`, delays the detection
    /// of a hang for good.
    #[tokio::test(start_paused = true)]
    async fn reply_ends_the_effect_of_a_call_with_a_long_timeout() {
        let calls = Calls::default();
        let silences = async |timeout: Duration| {
            let begun = Instant::now();
            tokio::time::advance(TIMEOUT).await;
            calls.record_silence(begun, timeout)
        };
        assert!(!silences(100 * TIMEOUT).await);
        for _ in 0..3 {
            assert!(!silences(TIMEOUT).await, "the long call may still have a reply");
        }
        calls.record_reply(1);
        assert!(!silences(TIMEOUT).await && !silences(TIMEOUT).await);
        assert!(silences(TIMEOUT).await, "two and a half deadlines");
    }

    /// Guards against this defect: a call that begins at its deadline closes a healthy connection.
    #[tokio::test(start_paused = true)]
    async fn call_that_begins_at_its_deadline_does_not_count_as_silence() {
        let calls = Calls::default();
        assert!(!calls.record_silence(Instant::now(), Duration::ZERO));
        assert_eq!(limit(&calls), MOST);
    }

    #[tokio::test(start_paused = true)]
    async fn limit_falls_once_per_deadline_and_rises_with_replies() {
        let calls = Calls::default();
        let begun = Instant::now();
        tokio::time::advance(TIMEOUT).await;
        assert!((0..50).all(|_| !calls.record_silence(begun, TIMEOUT)));
        let lowered = limit(&calls);
        assert!((700..720).contains(&lowered), "{lowered}");
        (0..160).for_each(|_| calls.record_reply(1));
        assert_eq!(limit(&calls), lowered + 10);
        (0..100_000).for_each(|_| calls.record_reply(1));
        assert_eq!(limit(&calls), MOST);
        for _ in 0..50 {
            let begun = Instant::now();
            tokio::time::advance(TIMEOUT).await;
            let _ = calls.record_silence(begun, TIMEOUT);
        }
        assert_eq!(limit(&calls), LEAST);
    }
}
