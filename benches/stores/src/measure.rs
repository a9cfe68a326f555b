//! Runs tasks that hit as fast as they can, and measures the latencies.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The results of one measurement.
pub struct Row {
    name: String,
    keys: &'static str,
    in_flight: usize,
    per_second: f64,
    failed: usize,
    /// The latencies of the decisions in microseconds, sorted.
    latencies: Vec<u32>,
}

impl Row {
    pub const HEAD: &'static str = "| store | keys | in flight | decisions/s | p50 | p99 | p99.9 | not decided |\n\
                                    |---|---|---|---|---|---|---|---|";

    fn percentile(&self, part: f64) -> f64 {
        let at = (self.latencies.len() as f64 * part) as usize;
        f64::from(*self.latencies.get(at.min(self.latencies.len().saturating_sub(1))).unwrap_or(&0)) / 1_000.0
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, keys, in_flight, per_second, failed, .. } = self;
        write!(f, "| {name} | {keys} | {in_flight} | {per_second:.0} ")?;
        for part in [0.5, 0.99, 0.999] {
            write!(f, "| {:.2} ms ", self.percentile(part))?;
        }
        write!(f, "| {failed} |")
    }
}

/// Runs `in_flight` tasks for `time`. `hit` gets a number that differs between hits, and returns
/// `true` if the hit was admitted.
pub async fn measure<F>(
    name: &str,
    keys: &'static str,
    in_flight: usize,
    time: Duration,
    hit: Arc<impl Fn(u64) -> F + Send + Sync + 'static>,
) -> Row
where
    F: Future<Output = bool> + Send,
{
    let (started, warm) = (Instant::now(), time / 5);
    let tasks: Vec<_> = (0..in_flight as u64)
        .map(|task| {
            let hit = Arc::clone(&hit);
            tokio::spawn(async move {
                let (mut latencies, mut failed, mut number) = (Vec::new(), 0, task.wrapping_mul(7_919));
                while started.elapsed() < time + warm {
                    let begun = Instant::now();
                    let admitted = hit(number).await;
                    // The first fifth is a warm-up.
                    if started.elapsed() > warm {
                        failed += usize::from(!admitted);
                        latencies.push(begun.elapsed().as_micros() as u32);
                    }
                    number += in_flight as u64 * 31 + 1;
                }
                (latencies, failed)
            })
        })
        .collect();
    let (mut latencies, mut failed) = (Vec::new(), 0);
    for task in tasks {
        let (more, lost) = task.await.expect("the task does not panic");
        latencies.extend(more);
        failed += lost;
    }
    latencies.sort_unstable();
    let per_second = (latencies.len() - failed) as f64 / time.as_secs_f64();
    Row { name: name.to_owned(), keys, in_flight, per_second, failed, latencies }
}
