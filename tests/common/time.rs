//! Time in tests: conditions that are awaited, and durations that are measured beside a probe of
//! the machine. `tests/README.md` explains when to use which.

use std::fmt;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::pin::pin;
use std::sync::LazyLock;
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use futures_util::future::{Either, select};
use tokio::time::sleep;

/// The time that a condition may take on a busy machine. Only a test that hangs reaches it.
pub const EVENTUALLY: Duration = Duration::from_secs(120);

/// The pause between two rounds of the probe.
const TICK: Duration = Duration::from_millis(5);

/// The longest duration of a round on an idle machine: the pause, the inaccuracy of the system's
/// timer, and a round trip.
const ON_TIME: Duration = Duration::from_micros(5_500);

/// A call on a server needs the processor much more often than a round of the probe, and each time
/// it can be as late as the probe.
const WEIGHT: u32 = 20;

/// Waits until `done` returns `true`, and panics with `what` if that never happens.
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        thread::sleep(pause(what, started));
    }
}

/// Waits like [`wait_until`], without blocking the other tasks of the thread.
pub async fn eventually(what: &str, mut done: impl AsyncFnMut() -> bool) {
    let started = Instant::now();
    while !done().await {
        sleep(pause(what, started)).await;
    }
}

/// Returns the time until the next look at a condition. It grows, because a look at a server starts a
/// process or opens a connection.
fn pause(what: &str, started: Instant) -> Duration {
    let waited = started.elapsed();
    assert!(waited < EVENTUALLY, "{what}: not within {EVENTUALLY:?}");
    (waited / 20).clamp(Duration::from_millis(5), Duration::from_millis(50))
}

/// Measures a duration without the delays that a busy machine causes.
#[derive(Clone, Copy, Debug)]
pub struct Stopwatch {
    started: Instant,
    late: Duration,
}

impl Stopwatch {
    pub fn start() -> Self {
        Self { late: PROBE.late(), started: Instant::now() }
    }

    /// Returns the elapsed time minus [`WEIGHT`] times the delays of the probe. On an idle machine
    /// this is the elapsed time.
    pub fn elapsed(&self) -> Duration {
        self.wall().saturating_sub(self.excess())
    }

    /// Asserts that less than `limit` has elapsed, and that the test does not hang. If the machine
    /// alone has caused as much delay, only asserts that the test does not hang.
    pub fn assert_below(&self, limit: Duration, what: &str) {
        let is_late = self.elapsed() >= limit && self.excess() < limit || self.wall() >= EVENTUALLY;
        assert!(
            !is_late,
            "{what}: not within {limit:?}, but {:?}, less {:?} of the machine",
            self.wall(),
            self.excess()
        );
    }

    /// Returns `true` if a call with this timeout has failed only because the machine was busy.
    /// Compare-and-swap gives up before the timeout, and PostgreSQL cancels a statement at 75 % of it.
    pub fn excuses(&self, timeout: Duration) -> bool {
        self.wall() >= timeout * 7 / 10 && self.elapsed() < timeout && !self.excess().is_zero()
    }

    /// Returns the elapsed time of the system's clock.
    pub fn wall(&self) -> Duration {
        self.started.elapsed()
    }

    /// Returns the part of the elapsed time that is attributed to the machine.
    pub fn excess(&self) -> Duration {
        WEIGHT * self.late()
    }

    fn late(&self) -> Duration {
        PROBE.late().saturating_sub(self.late)
    }
}

/// A thread that measures how late it wakes up and gets a reply on the loopback interface.
#[derive(Debug)]
struct Probe(Mutex<Rounds>);

#[derive(Debug)]
struct Rounds {
    /// The total delay of the rounds that have ended.
    late: Duration,
    /// The begin of the current round.
    begun: Instant,
}

static PROBE: LazyLock<&'static Probe> = LazyLock::new(|| {
    let probe: &'static Probe =
        Box::leak(Box::new(Probe(Mutex::new(Rounds { late: Duration::ZERO, begun: Instant::now() }))));
    let mut stream = echo();
    thread::spawn(move || {
        loop {
            probe.rounds().begun = Instant::now();
            thread::sleep(TICK);
            stream.write_all(&[1]).and_then(|()| stream.read_exact(&mut [0])).unwrap();
            let mut rounds = probe.rounds();
            let late = rounds.begun.elapsed().saturating_sub(ON_TIME);
            rounds.late += late;
        }
    });
    probe
});

impl Probe {
    fn rounds(&self) -> MutexGuard<'_, Rounds> {
        self.0.lock().unwrap()
    }

    /// Returns the total delay, including that of the current round.
    fn late(&self) -> Duration {
        let rounds = self.rounds();
        rounds.late + rounds.begun.elapsed().saturating_sub(ON_TIME)
    }
}

/// Returns a connection to a thread that returns each byte.
fn echo() -> TcpStream {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut server, _) = listener.accept().unwrap();
    for stream in [&client, &server] {
        stream.set_nodelay(true).unwrap();
    }
    thread::spawn(move || {
        let mut byte = [0];
        while server.read_exact(&mut byte).and_then(|()| server.write_all(&byte)).is_ok() {}
    });
    client
}

/// Awaits a result, and asserts that it arrives within `limit`.
///
/// A late result is accepted if a plain sleep of the same length is as late on this runtime, or if
/// the [`Stopwatch`] attributes the delay to the machine.
pub async fn within<T: fmt::Debug>(limit: Duration, answer: impl Future<Output = T>) -> T {
    let watch = Stopwatch::start();
    let control = async {
        sleep(limit).await;
        // Results of the same turn of the runtime take some further turns.
        for _ in 0..5 {
            sleep(Duration::from_millis(1)).await;
        }
    };
    let (answer, is_late) = match select(pin!(answer), pin!(control)).await {
        // The runtime may have been blocked by the answer itself.
        Either::Left((answer, _)) => (answer, watch.elapsed() > limit + Duration::from_secs(1)),
        Either::Right(((), answer)) => {
            let answer = answer.await;
            (answer, watch.elapsed() >= limit)
        }
    };
    assert!(!is_late, "after {:?}, less {:?} of the machine: {answer:?}", watch.wall(), watch.excess());
    answer
}
