//! The setup of a simulation, as in the query of the page's address.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tower_ratelimit::{ConfigError, ElasticWindow, FixedWindow, LeakyBucket, Limit, Lockout, MovingWindow, Policy};
use tower_ratelimit::{Quota, SlidingWindowCounter, TokenBucket};

use crate::traffic::{MAX_HITS, Traffic};

const MAX_LIMITS: usize = 4;

#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
pub(crate) struct Setup {
    /// `all` compares all strategies with the quota of the first limit. `policy` shows one policy.
    pub(crate) mode: Mode,
    pub(crate) policy: String,
    pub(crate) traffic: Traffic,
    /// The number of hits. Defaults to a number that suits the quota.
    pub(crate) hits: Option<u32>,
    /// The simulated time, in periods of the first limit.
    pub(crate) periods: u32,
    pub(crate) seed: u32,
    /// The times of hand-made hits in 1/10,000 of the simulated time, separated by commas.
    pub(crate) at: String,
    /// The width of the pictures in pixels.
    pub(crate) width: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Mode {
    All,
    Policy,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            mode: Mode::All,
            policy: "10/minute".to_owned(),
            traffic: Traffic::Mixed,
            hits: None,
            periods: 5,
            seed: 1,
            at: String::new(),
            width: 720,
        }
    }
}

/// A valid setup.
pub(crate) struct Checked {
    pub(crate) mode: Mode,
    pub(crate) policies: Vec<Policy>,
    pub(crate) traffic: Traffic,
    pub(crate) hits: u32,
    /// The period of the first limit in microseconds.
    pub(crate) period: u64,
    /// The simulated time in microseconds.
    pub(crate) span: u64,
    pub(crate) seed: u32,
    pub(crate) clicks: Vec<u32>,
    pub(crate) width: u32,
}

/// The reason why a setup is invalid, and its field.
#[derive(Debug, Serialize)]
pub(crate) struct Invalid {
    field: &'static str,
    error: String,
}

fn invalid<T>(field: &'static str, error: impl Into<String>) -> Result<T, Invalid> {
    Err(Invalid { field, error: error.into() })
}

impl Setup {
    pub(crate) fn checked(&self) -> Result<Checked, Invalid> {
        let policy: Policy = match self.policy.parse() {
            Ok(policy) => policy,
            Err(error) => return invalid("policy", ConfigError::to_string(&error)),
        };
        if policy.limits().len() > MAX_LIMITS {
            return invalid("policy", format!("the playground shows at most {MAX_LIMITS} limits of a policy"));
        }
        let first = &policy.limits()[0];
        let (amount, period) = (first.quota().amount(), first.quota().period_micros());
        if !(1..=20).contains(&self.periods) {
            return invalid("periods", "choose 1 to 20 periods");
        }
        let Some(span) = period.checked_mul(u64::from(self.periods)).filter(|span| *span < MAX_SPAN) else {
            return invalid("policy", "the playground simulates at most 100 years: choose a shorter period");
        };
        // Ten clients have ten quotas.
        let (clients, of) = if self.traffic == Traffic::Zipf { (4, 1) } else { (6, 5) };
        let suitable = amount.saturating_mul(self.periods).saturating_mul(clients) / of;
        let hits = self.hits.unwrap_or(suitable.clamp(12, MAX_HITS));
        if hits > MAX_HITS {
            return invalid("hits", format!("choose at most {MAX_HITS} hits"));
        }
        let policies = match self.mode {
            Mode::Policy => vec![policy],
            Mode::All => match all(first) {
                Ok(policies) => policies,
                Err(error) => return invalid("policy", error.to_string()),
            },
        };
        let clicks = clicks(&self.at)?;
        let width = self.width.clamp(280, 2_000);
        Ok(Checked {
            mode: self.mode,
            policies,
            traffic: self.traffic,
            hits,
            period,
            span,
            seed: self.seed,
            clicks,
            width,
        })
    }
}

/// A hundred years in microseconds. The clock does not support times after the year 9999.
const MAX_SPAN: u64 = 100 * 365 * 86_400 * 1_000_000;

fn clicks(text: &str) -> Result<Vec<u32>, Invalid> {
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    let clicks = parts.map(|part| {
        let click = part.parse().ok().filter(|click| *click <= 10_000);
        click.map_or_else(|| invalid("at", format!("cannot read {part:?}: write numbers from 0 to 10000")), Ok)
    });
    clicks.collect()
}

/// Returns a policy for each strategy, with the quota of `first`. `first` itself is the policy of
/// its own strategy, so that its burst, its queue and its alignment are shown. A calendar window takes
/// the place of the fixed window.
pub(crate) fn all(first: &Limit) -> Result<Vec<Policy>, ConfigError> {
    let quota = first.quota();
    let plain = Quota::try_per(quota.amount(), quota.period())?;
    let bucket = quota.burst_size().map_or(Ok(plain), |burst| plain.try_burst(burst))?;
    let limits = [
        Limit::try_new(FixedWindow::new(), plain)?,
        Limit::try_new(SlidingWindowCounter::new(), plain)?,
        Limit::try_new(MovingWindow::new(), plain)?,
        Limit::try_new(ElasticWindow::new(), plain)?,
        Limit::try_new(lockout(quota.period()), plain)?,
        Limit::try_new(TokenBucket::new(), bucket)?,
        Limit::try_new(LeakyBucket::new(), plain)?,
    ];
    let family = |limit: &Limit| match limit.strategy().name() {
        "calendar" => "fixed-window",
        name => name.trim_end_matches("-aligned"),
    };
    Ok(limits
        .into_iter()
        .map(|limit| if family(&limit) == family(first) { first.clone() } else { limit })
        .map(Policy::from)
        .collect())
}

/// Returns a lockout whose locks last for one, two, four and then eight periods.
fn lockout(period: Duration) -> Lockout {
    let longest = period.saturating_mul(8).min(Duration::from_micros(MAX_SPAN));
    Lockout::lasting(period).escalating(2, longest)
}
