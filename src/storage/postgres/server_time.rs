//! The server's time, with which a hit on a recent text needs no load.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::sync::unpoisoned;
use crate::time::{Timestamp, micros};

/// The age from which the recorded time is not used, because the clocks of two machines drift. The
/// next hit then loads its key, and gets the server's time with the reply.
const LASTS: Duration = Duration::from_secs(10);

/// The server's time in the last reply, and the instant at which this machine received it. One
/// storage and its clones share it.
#[derive(Debug, Default)]
pub(super) struct ServerTime(Mutex<Option<(Timestamp, Instant)>>);

impl ServerTime {
    /// Returns the server's time, or `None` if it is unknown or too old. It is behind the server's
    /// clock by the delay of the last reply.
    pub(super) fn now(&self) -> Option<Timestamp> {
        let (server, at) = (*unpoisoned(self.0.lock()))?;
        let elapsed = at.elapsed();
        (elapsed <= LASTS).then(|| server.plus(micros(elapsed)))
    }

    /// Records the server's time, as a reply that has just arrived contains it.
    pub(super) fn record(&self, now: Timestamp) {
        *unpoisoned(self.0.lock()) = Some((now, Instant::now()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_goes_on_from_the_last_reply() {
        let time = ServerTime::default();
        assert_eq!(time.now(), None, "no reply has arrived");
        time.record(Timestamp::from_micros(1_000_000));
        assert!(time.now() >= Some(Timestamp::from_micros(1_000_000)));
    }
}
