//! Runs several tries to connect, with staggered starts, and returns the first result.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, sleep};

/// The delay before another try starts, while the earlier ones continue. TCP repeats a lost SYN
/// packet only after a second, which is too late if the network was down.
const STAGGER: Duration = Duration::from_millis(250);

/// The number of tries in one race to connect. Later tries start only if the earlier ones are slow.
const TRIES: usize = 4;

/// Makes the tries of a race.
pub(in crate::storage) fn tries<F>(make: impl Fn() -> F) -> [F; TRIES] {
    [(); TRIES].map(|()| make())
}

/// Runs the tries with staggered starts. Returns the result of the one that ends first, even if it
/// failed, and drops the others.
pub(in crate::storage) async fn race<F: Future>(tries: [F; TRIES]) -> F::Output {
    let mut tries = tries.map(Box::pin);
    let mut begun = 1;
    let mut next = pin!(sleep(STAGGER));
    poll_fn(|cx| {
        loop {
            for attempt in &mut tries[..begun] {
                if let Poll::Ready(result) = attempt.as_mut().poll(cx) {
                    return Poll::Ready(result);
                }
            }
            if begun == TRIES || next.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            begun += 1;
            next.as_mut().reset(Instant::now() + STAGGER);
        }
    })
    .await
}

/// Polls both futures. Returns the result of `first`, or `None` if `second` ends before it.
#[cfg(feature = "postgres")]
pub(in crate::storage) async fn before<A: Future + Unpin>(first: &mut A, second: impl Future) -> Option<A::Output> {
    let mut second = pin!(second);
    poll_fn(|cx| match std::pin::Pin::new(&mut *first).poll(cx) {
        Poll::Ready(result) => Poll::Ready(Some(result)),
        Poll::Pending => second.as_mut().poll(cx).map(|_| None),
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn later_try_wins_if_the_first_one_hangs() {
        let started = Instant::now();
        let tries = [0, 1, 2, 3].map(async |number| if number == 2 { number } else { pending().await });
        assert_eq!(race(tries).await, 2);
        assert_eq!(started.elapsed(), 2 * STAGGER);
    }

    #[tokio::test(start_paused = true)]
    async fn later_tries_do_not_start_if_the_first_one_is_fast() {
        let started = Instant::now();
        let tries = [0, 1, 2, 3].map(async |number| {
            assert_eq!(number, 0, "the others do not begin");
            sleep(STAGGER / 2).await;
            number
        });
        assert_eq!(race(tries).await, 0);
        assert_eq!(started.elapsed(), STAGGER / 2);
    }
}
