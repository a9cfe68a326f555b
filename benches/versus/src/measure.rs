//! Takes short timing samples of several subjects in turn.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// The number of rounds. It is odd, so that the median is a sample.
const ROUNDS: usize = 31;

/// The duration of a sample. It is short, so that a machine that changes its speed does so between
/// rounds more often than within one.
const SAMPLE: Duration = Duration::from_millis(20);

/// The number of calls between two readings of the clock, so that their cost is negligible.
const CHUNK: u32 = 256;

/// One figure per round.
#[derive(Clone, Debug)]
pub struct Samples(Vec<f64>);

impl Samples {
    pub fn new(samples: Vec<f64>) -> Self {
        Self(samples)
    }

    pub fn one(figure: f64) -> Self {
        Self(vec![figure])
    }

    pub fn append(&mut self, others: &Self) {
        self.0.extend(&others.0);
    }

    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    pub fn quartiles(&self) -> (f64, f64) {
        (self.quantile(0.25), self.quantile(0.75))
    }

    /// Divides the samples of the same round, because a slow machine slows both.
    pub fn over(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(this, other)| this / other).collect())
    }

    pub fn minus(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(this, other)| this - other).collect())
    }

    pub fn times(&self, factor: f64) -> Self {
        Self(self.0.iter().map(|sample| sample * factor).collect())
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // an index
    fn quantile(&self, quantile: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted[((sorted.len() - 1) as f64 * quantile).round() as usize]
    }
}

/// Takes a sample of each subject in turn, after a warm-up round. Every other round has the reverse
/// order.
pub fn interleave<const N: usize>(subjects: [&mut dyn FnMut() -> f64; N]) -> [Samples; N] {
    interleave_rounds(ROUNDS, subjects)
}

/// Like [`interleave`], with another number of rounds, which should be odd.
pub fn interleave_rounds<const N: usize>(rounds: usize, mut subjects: [&mut dyn FnMut() -> f64; N]) -> [Samples; N] {
    let mut samples = [(); N].map(|()| Vec::with_capacity(rounds));
    for subject in &mut subjects {
        subject();
    }
    for round in 0..rounds {
        for turn in 0..N {
            let turn = if round % 2 == 0 { turn } else { N - 1 - turn };
            samples[turn].push(subjects[turn]());
        }
    }
    samples.map(Samples)
}

/// Returns the CPU time of this thread. Unlike wall-clock time, it excludes the time of other processes.
pub fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.cast_unsigned(), u32::try_from(time.tv_nsec).expect("less than a second"))
}

/// Returns the CPU time per call of `step`, in nanoseconds.
pub fn time(step: impl FnMut()) -> f64 {
    let start = thread_time();
    time_by(|| thread_time() - start, step)
}

fn time_by(elapsed: impl Fn() -> Duration, mut step: impl FnMut()) -> f64 {
    let mut calls = 0_u64;
    loop {
        for _ in 0..CHUNK {
            step();
        }
        calls += u64::from(CHUNK);
        let elapsed = elapsed();
        if elapsed >= SAMPLE {
            return elapsed.as_nanos() as f64 / calls as f64;
        }
    }
}

/// Returns the CPU time per item, in nanoseconds.
pub fn time_each<T>(items: &[T], mut step: impl FnMut(&T)) -> f64 {
    let start = thread_time();
    for item in items {
        step(item);
    }
    (thread_time() - start).as_nanos() as f64 / items.len() as f64
}

/// Returns the nanoseconds per call on each of `threads` concurrent threads. The argument of `step`
/// is the thread's number. The time of several threads includes their waits for each other, so it is
/// wall-clock time.
pub fn time_on<S: FnMut()>(threads: usize, step: impl Fn(usize) -> S + Sync) -> f64 {
    if threads == 1 {
        return time(step(0));
    }
    let start = Barrier::new(threads);
    let total: f64 = thread::scope(|scope| {
        let run = |number| {
            let (start, step) = (&start, &step);
            scope.spawn(move || {
                let step = step(number);
                start.wait();
                let start = Instant::now();
                time_by(|| start.elapsed(), step)
            })
        };
        let running: Vec<_> = (0..threads).map(run).collect();
        running.into_iter().map(|thread| thread.join().expect("a subject panicked")).sum()
    });
    total / threads as f64
}
