//! Connections to servers: opened at the first use, and opened again after failures.

mod calls;
mod reconnect;
#[cfg(any(feature = "redis", feature = "memcached", feature = "etcd"))]
mod stream;

use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpStream, ToSocketAddrs};
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep};

#[cfg(feature = "redis")]
pub(super) use self::calls::CallInFlight;
pub(super) use self::calls::WithCalls;
pub(super) use self::reconnect::{Reconnecting, Usable};
#[cfg(any(feature = "redis", feature = "etcd"))]
pub(super) use self::stream::ServerStream;
#[cfg(any(feature = "redis", feature = "memcached", feature = "etcd"))]
pub(super) use self::stream::{Driver, FirstBytes, connecting, open};
use crate::storage::StorageError;

/// The timeout of an attempt to connect. It does not depend on the timeouts of the waiting calls.
pub(super) const CONNECT_WITHIN: Duration = Duration::from_secs(1);

/// Creates the error of an attempt to connect to `server` that takes too long.
pub(super) fn too_slow(server: &str) -> StorageError {
    StorageError::unreachable(server, format!("connecting took longer than {CONNECT_WITHIN:?}"))
}

/// The number of calls in progress, or of callers that wait. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Gauge(Arc<AtomicUsize>);

/// Counts in a [`Gauge`] until it is dropped.
#[derive(Debug)]
pub(super) struct Counted {
    gauge: Gauge,
    count: usize,
}

impl Gauge {
    pub(super) fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// Adds `count`. Returns `None` if the number is `limit` or more already, so it can exceed the
    /// limit by less than `count`.
    pub(super) fn enter(&self, count: usize, limit: usize) -> Option<Counted> {
        let before = self.0.fetch_add(count, Ordering::Relaxed);
        let counted = Counted { gauge: self.clone(), count };
        (before < limit).then_some(counted)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.gauge.0.fetch_sub(self.count, Ordering::Relaxed);
    }
}

/// The maximum number of calls in flight on one connection, and of callers that wait for a
/// connection. The documentation of the storages contains this number.
pub(in crate::storage) const MOST: usize = 1_024;

/// Returns `error` after three quarters of `timeout`, the timeout of the call. Without the delay,
/// callers that retry immediately would take all processor time from the connection.
pub(in crate::storage) async fn fail_delayed<T>(error: StorageError, timeout: Duration) -> Result<T, StorageError> {
    // Timers panic without a runtime.
    Handle::try_current().map_err(|_| StorageError::no_runtime())?;
    sleep(timeout * 3 / 4).await;
    Err(error)
}

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

/// The connection breaks if sent data is not acknowledged within this time.
#[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
const UNACKNOWLEDGED: Duration = Duration::from_secs(2);

/// TCP sends keepalive probes after this idle time.
const IDLE: Duration = Duration::from_secs(15);

/// Connects to `address`. The caller sets the timeout.
pub(in crate::storage) async fn open_tcp(address: impl ToSocketAddrs) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let socket = SockRef::from(&stream);
    #[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
    socket.set_tcp_user_timeout(Some(UNACKNOWLEDGED))?;
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(IDLE))?;
    Ok(stream)
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
