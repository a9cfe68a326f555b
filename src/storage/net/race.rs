//! Several tries to connect, of which the first result is taken.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, sleep};

/// A second try of an attempt begins after this time, beside the first, and so on. A packet that was lost while
/// the network was away is not repeated in time otherwise: TCP repeats a lost SYN after a second.
const BESIDE: Duration = Duration::from_millis(250);

/// The most tries of an attempt.
pub(super) const TRIES: usize = 4;

/// Returns the result of the try that ends first.
pub(super) async fn race<F: Future>(tries: [F; TRIES]) -> F::Output {
    let mut tries = tries.map(Box::pin);
    let mut begun = 1;
    let mut next = pin!(sleep(BESIDE));
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
            next.as_mut().reset(Instant::now() + BESIDE);
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn try_that_hangs_is_overtaken_by_one_beside_it() {
        let started = Instant::now();
        let tries = [0, 1, 2, 3].map(async |number| if number == 2 { number } else { pending().await });
        assert_eq!(race(tries).await, 2);
        assert_eq!(started.elapsed(), 2 * BESIDE);
    }

    #[tokio::test(start_paused = true)]
    async fn try_that_ends_in_time_is_the_only_one() {
        let started = Instant::now();
        let tries = [0, 1, 2, 3].map(async |number| {
            assert_eq!(number, 0, "the others do not begin");
            sleep(BESIDE / 2).await;
            number
        });
        assert_eq!(race(tries).await, 0);
        assert_eq!(started.elapsed(), BESIDE / 2);
    }
}
