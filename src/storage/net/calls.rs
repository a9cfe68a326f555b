//! The calls on one connection: how many may be in flight, and whether they are answered.
//!
//! By Little's law a server answers within the deadline only while no more calls are in flight than it answers in a
//! deadline's time. So their number has a limit, which falls when a deadline passes and rises with answers.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{LinkError, Reconnecting, Usable};

/// The most calls that may be in flight on one connection. The docs of the storages name it.
pub(in crate::storage) const MOST: usize = 1_024;

/// The limit never falls below this number.
const LEAST: usize = 16;

/// So many answers raise the limit by one.
const ANSWERS_PER_STEP: usize = 16;

/// A connection is replaced when calls have waited in vain for this many halves of a deadline. Callers that wait for the
/// whole deadline do so three times.
const HALF_DEADLINES: u32 = 5;

/// Fails with this error, after three quarters of the time that the call has. Callers that try again at once would take all time from the
/// connection otherwise.
pub(in crate::storage) async fn overloaded<T, E>(error: E, patience: Duration) -> Result<T, E> {
    sleep(patience * 3 / 4).await;
    Err(error)
}

/// The calls on one connection.
pub(in crate::storage) struct Calls {
    in_flight: AtomicUsize,
    /// The limit of `in_flight`, times `ANSWERS_PER_STEP`.
    limit: AtomicUsize,
    /// Set while `waits` is not empty. Most answers need not take its lock.
    is_silent: AtomicBool,
    waits: Mutex<Waits>,
}

/// The time that calls have waited in vain since anything was heard.
#[derive(Default)]
struct Waits {
    total: Duration,
    /// The end of the last wait. Waits that overlap are counted once.
    until: Option<Instant>,
    /// The longest time that a call was willing to wait.
    patience: Duration,
    /// When the limit fell. Calls that began before do not lower it again.
    lowered: Option<Instant>,
}

/// The callers that wait for a connection. Their number has a limit too.
#[derive(Default)]
pub(super) struct Waiters(AtomicUsize);

/// One of the callers that wait.
pub(super) struct Waiter<'a>(&'a Waiters);

impl Waiters {
    /// Returns `None` if too many wait.
    pub(super) fn enter(&self) -> Option<Waiter<'_>> {
        let waiter = Waiter(self);
        (self.0.fetch_add(1, Ordering::Relaxed) < MOST).then_some(waiter)
    }

    pub(super) fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A connection whose calls are counted.
pub(in crate::storage) trait Connected: Usable {
    fn calls(&self) -> &Calls;
}

/// A call in flight. Dropped without an answer it counts as a wait in vain, also when its caller left early.
pub(in crate::storage) struct Call<'a, T: Connected + Send + Sync + 'static, E: LinkError> {
    of: &'a Reconnecting<T, E>,
    connection: &'a Arc<T>,
    begun: Instant,
    patience: Duration,
    is_answered: bool,
}

impl<T: Connected + Send + Sync + 'static, E: LinkError> Reconnecting<T, E> {
    /// Returns the error of a call that does not fit at the moment. This is cheaper than preparing the call first.
    pub(in crate::storage) fn overload(&self) -> Option<E> {
        let (count, limit) = self.value().map_or_else(
            || (self.waiting.count(), MOST),
            |connection| {
                let Calls { in_flight, limit, .. } = connection.calls();
                (in_flight.load(Ordering::Relaxed), limit.load(Ordering::Relaxed) / ANSWERS_PER_STEP)
            },
        );
        (count >= limit).then(|| E::overloaded(self.name(), limit))
    }

    /// Begins a call that is willing to wait until `deadline`.
    ///
    /// # Errors
    ///
    /// When too many are in flight, after three quarters of the time until the deadline.
    pub(in crate::storage) async fn begin<'a>(
        &'a self,
        connection: &'a Arc<T>,
        deadline: Instant,
    ) -> Result<Call<'a, T, E>, E> {
        let Calls { in_flight, limit, .. } = connection.calls();
        let limit = limit.load(Ordering::Relaxed) / ANSWERS_PER_STEP;
        if in_flight.fetch_add(1, Ordering::Relaxed) >= limit {
            in_flight.fetch_sub(1, Ordering::Relaxed);
            let patience = deadline.saturating_duration_since(Instant::now());
            return overloaded(E::overloaded(self.name(), limit), patience).await;
        }
        let begun = Instant::now();
        let patience = deadline.saturating_duration_since(begun);
        Ok(Call { of: self, connection, begun, patience, is_answered: false })
    }
}

impl<T: Connected + Send + Sync + 'static, E: LinkError> Call<'_, T, E> {
    /// Something was heard on the connection.
    pub(in crate::storage) fn answered(mut self) {
        self.is_answered = true;
    }
}

impl<T: Connected + Send + Sync + 'static, E: LinkError> Drop for Call<'_, T, E> {
    fn drop(&mut self) {
        let calls = self.connection.calls();
        calls.in_flight.fetch_sub(1, Ordering::Relaxed);
        if self.is_answered {
            calls.heard();
        } else if calls.waited_in_vain(self.begun, self.patience) {
            self.of.give_up(self.connection, None);
        }
    }
}

impl Default for Calls {
    fn default() -> Self {
        Self {
            in_flight: AtomicUsize::new(0),
            limit: AtomicUsize::new(MOST * ANSWERS_PER_STEP),
            is_silent: AtomicBool::new(false),
            waits: Mutex::default(),
        }
    }
}

impl Calls {
    fn heard(&self) {
        // Calls that end at the same time may raise it a little above the most, or lose a step.
        let limit = self.limit.load(Ordering::Relaxed);
        if limit < MOST * ANSWERS_PER_STEP {
            self.limit.store(limit + 1, Ordering::Relaxed);
        }
        // A write would be shared by all who use the connection.
        if self.is_silent.load(Ordering::Relaxed) {
            let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
            (waits.total, waits.until) = (Duration::ZERO, None);
            self.is_silent.store(false, Ordering::Relaxed);
        }
    }

    /// Returns `true` when the connection has been silent for too long.
    fn waited_in_vain(&self, begun: Instant, patience: Duration) -> bool {
        let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let from = waits.until.map_or(begun, |until| until.max(begun));
        // Who looks at the clock so late is on a busy machine, which may not have read the answer yet.
        if now < begun + patience * 3 / 2 {
            waits.total += now.saturating_duration_since(from);
        }
        waits.until = Some(now);
        waits.patience = waits.patience.max(patience);
        if now >= begun + patience && waits.lowered.is_none_or(|lowered| lowered <= begun) {
            let limit = self.limit.load(Ordering::Relaxed) / 10 * 7;
            self.limit.store(limit.max(LEAST * ANSWERS_PER_STEP), Ordering::Relaxed);
            waits.lowered = Some(now);
        }
        self.is_silent.store(true, Ordering::Relaxed);
        waits.total * 2 >= waits.patience * HALF_DEADLINES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_millis(100);

    fn limit(calls: &Calls) -> usize {
        calls.limit.load(Ordering::Relaxed) / ANSWERS_PER_STEP
    }

    #[tokio::test(start_paused = true)]
    async fn callers_that_leave_early_show_silence_too() {
        let calls = Calls::default();
        let mut left = 0;
        loop {
            let begun = Instant::now();
            tokio::time::advance(PATIENCE / 10).await;
            left += 1;
            if calls.waited_in_vain(begun, PATIENCE) {
                break;
            }
        }
        assert_eq!(left, 25, "two and a half deadlines");
        assert_eq!(limit(&calls), MOST, "no deadline passed");
    }

    #[tokio::test(start_paused = true)]
    async fn waits_that_overlap_count_once_and_an_answer_ends_the_silence() {
        let calls = Calls::default();
        for _ in 0..2 {
            for _ in 0..2 {
                let begun = Instant::now();
                tokio::time::advance(PATIENCE).await;
                assert!((0..50).all(|_| !calls.waited_in_vain(begun, PATIENCE)));
            }
            calls.heard();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn limit_falls_once_per_deadline_and_rises_with_answers() {
        let calls = Calls::default();
        let begun = Instant::now();
        tokio::time::advance(PATIENCE).await;
        assert!((0..50).all(|_| !calls.waited_in_vain(begun, PATIENCE)));
        let lowered = limit(&calls);
        assert!((700..720).contains(&lowered), "{lowered}");
        (0..160).for_each(|_| calls.heard());
        assert_eq!(limit(&calls), lowered + 10);
        (0..100_000).for_each(|_| calls.heard());
        assert_eq!(limit(&calls), MOST);
        for _ in 0..50 {
            let begun = Instant::now();
            tokio::time::advance(PATIENCE).await;
            let _ = calls.waited_in_vain(begun, PATIENCE);
        }
        assert_eq!(limit(&calls), LEAST);
    }
}
