//! Traffic: the times of hits, and the clients that send them.

use serde::Deserialize;

use crate::setup::Checked;

pub(crate) const MAX_HITS: u32 = 20_000;

/// The number of clients of [`Traffic::Zipf`].
pub(crate) const CLIENTS: u8 = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Traffic {
    /// A greedy client around the end of a window, a steady client, a pause, and a burst.
    Mixed,
    Steady,
    Bursts,
    /// One hit, and then as many as possible around the end of the first window.
    Greedy,
    Poisson,
    /// Ten clients. The second one sends half as many hits as the first.
    Zipf,
    /// A client that waits for `Retry-After` after each refusal.
    Retry,
    /// Hits at given times.
    Clicks,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Hit {
    /// The time in microseconds since the start.
    pub(crate) at: u64,
    pub(crate) client: u8,
}

impl Traffic {
    /// Returns the parts of the traffic that the pictures name.
    pub(crate) fn scenes(self) -> &'static [Scene] {
        if self == Self::Mixed { &SCENES } else { &[] }
    }

    /// Returns the hits in order. Those of [`Traffic::Retry`] depend on the responses, so this
    /// returns only the times at which the client would send them without a refusal.
    pub(crate) fn hits(self, setup: &Checked) -> Vec<Hit> {
        let (span, period, hits) = (setup.span, setup.period, u64::from(setup.hits));
        let mut random = Random::new(setup.seed);
        let mut times: Vec<Hit> = match self {
            Self::Mixed => mixed(hits, period),
            Self::Steady => even(hits, 0, span),
            Self::Bursts => bursts(hits, period, span),
            Self::Greedy => {
                let rest = even(hits.saturating_sub(1), period - period / 8, period / 4);
                [0].into_iter().take(setup.hits as usize).chain(rest).collect()
            }
            Self::Poisson | Self::Zipf => poisson(hits, span, &mut random),
            // Twice as fast as the quota, so that it is refused.
            Self::Retry => even(hits, 0, period.saturating_mul(hits) / (2 * quota(setup)).max(1)),
            Self::Clicks => setup.clicks.iter().map(|click| span / 10_000 * u64::from(*click)).collect(),
        }
        .into_iter()
        .map(|at| Hit { at, client: if self == Self::Zipf { zipf(&mut random) } else { 0 } })
        .collect();
        times.retain(|hit| hit.at < span);
        times.sort_unstable();
        times
    }
}

fn quota(setup: &Checked) -> u64 {
    setup.policies[0].limits()[0].quota().amount().into()
}

fn even(hits: u64, start: u64, span: u64) -> Vec<u64> {
    (0..hits).map(|i| start + part(span, i, hits)).collect()
}

/// Returns `span * i / of` without overflow.
fn part(span: u64, i: u64, of: u64) -> u64 {
    u64::try_from(u128::from(span) * u128::from(i) / u128::from(of.max(1))).unwrap_or(span)
}

/// A part of [`Traffic::Mixed`].
pub(crate) struct Scene {
    pub(crate) name: &'static str,
    /// The share of the hits, in sixtieths.
    hits: u64,
    /// The start in hundredths of a period.
    pub(crate) start: u64,
    /// The duration in hundredths of a period.
    pub(crate) length: u64,
}

const SCENES: [Scene; 6] = [
    Scene { name: "", hits: 1, start: 0, length: 1 },
    Scene { name: "greedy", hits: 24, start: 75, length: 50 },
    Scene { name: "steady", hits: 16, start: 140, length: 100 },
    Scene { name: "quiet", hits: 0, start: 240, length: 110 },
    Scene { name: "burst", hits: 15, start: 350, length: 8 },
    Scene { name: "slow", hits: 4, start: 410, length: 80 },
];

fn mixed(hits: u64, period: u64) -> Vec<u64> {
    let at = |hundredths: u64| part(period, hundredths, 100);
    let mut before = 0;
    let mut times = Vec::new();
    for scene in &SCENES {
        // The rounded parts add up to all hits.
        let count = part(hits, before + scene.hits, 60) - part(hits, before, 60);
        before += scene.hits;
        times.extend(even(count, at(scene.start), at(scene.length)));
    }
    times
}

/// Sends a burst every 0.7 periods, so that bursts start at different offsets in their windows.
fn bursts(hits: u64, period: u64, span: u64) -> Vec<u64> {
    let every = (period / 10 * 7).max(1);
    let count = span.div_ceil(every).max(1);
    let burst = |i: u64| even(part(hits, i + 1, count) - part(hits, i, count), i * every, period / 20);
    (0..count).flat_map(burst).collect()
}

#[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)] // times of a simulation
fn poisson(hits: u64, span: u64, random: &mut Random) -> Vec<u64> {
    let mean = span as f64 / hits.max(1) as f64;
    let mut at = 0.0;
    let mut times = Vec::new();
    while times.len() < MAX_HITS as usize {
        at -= mean * (1.0 - random.next()).ln();
        if at >= span as f64 || hits == 0 {
            break;
        }
        times.push(at as u64);
    }
    times
}

fn zipf(random: &mut Random) -> u8 {
    let weight = |client: u8| 1.0 / f64::from(client + 1);
    let mut rest = random.next() * (0..CLIENTS).map(weight).sum::<f64>();
    (0..CLIENTS - 1)
        .find(|client| {
            rest -= weight(*client);
            rest < 0.0
        })
        .unwrap_or(CLIENTS - 1)
}

/// Pseudorandom numbers. A seed always produces the same numbers.
struct Random(u64);

impl Random {
    fn new(seed: u32) -> Self {
        Self(0x9E37_79B9_7F4A_7C15 ^ u64::from(seed).wrapping_mul(0xD134_2543_DE82_EF95))
    }

    /// Returns a number from 0 to 1, without 1.
    fn next(&mut self) -> f64 {
        // xorshift64
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        f64::from((self.0 >> 32) as u32) / (f64::from(u32::MAX) + 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setup::Setup;

    fn hits(traffic: Traffic, hits: u32) -> (Vec<Hit>, Checked) {
        let setup = Setup { traffic, hits: Some(hits), at: "10000,5000,0".to_owned(), ..Setup::default() };
        let checked = setup.checked().unwrap();
        (traffic.hits(&checked), checked)
    }

    #[test]
    fn hits_are_in_order_and_within_the_span() {
        use Traffic::{Bursts, Clicks, Greedy, Mixed, Poisson, Retry, Steady, Zipf};
        for traffic in [Mixed, Steady, Bursts, Greedy, Poisson, Zipf, Retry, Clicks] {
            for count in [0, 1, 60, 20_000] {
                let (hits, setup) = hits(traffic, count);
                assert!(hits.is_sorted(), "{traffic:?} {count}");
                assert!(hits.iter().all(|hit| hit.at < setup.span), "{traffic:?} {count}");
                assert!(hits.len() <= MAX_HITS as usize, "{traffic:?} {count}: {}", hits.len());
            }
        }
    }

    #[test]
    fn number_of_hits_is_as_configured() {
        for traffic in [Traffic::Mixed, Traffic::Steady, Traffic::Bursts, Traffic::Greedy] {
            assert_eq!(hits(traffic, 60).0.len(), 60, "{traffic:?}");
        }
        assert_eq!(hits(Traffic::Clicks, 60).0.len(), 2, "a click at the end is outside");
        let many = hits(Traffic::Poisson, 1_000).0.len();
        assert!((900..1_100).contains(&many), "{many}");
    }

    #[test]
    fn clients_follow_the_law_of_zipf() {
        let (hits, _) = hits(Traffic::Zipf, 10_000);
        let of = |client: u8| hits.iter().filter(|hit| hit.client == client).count();
        assert!(of(0) > of(1) && of(1) > of(4) && of(4) > of(9) && of(9) > 0);
        assert!((150..250).contains(&(of(0) * 100 / of(1))), "{} and {}", of(0), of(1));
    }
}
