//! Replays golden vectors on a storage, the clock under its control.
//!
//! `cargo run --example replay -- [--storage URL] tests/vectors/*.json` prints one line for each mismatch and a last line
//! `N steps, M mismatches`; it exits with 1 when there are any, with 2 when a file cannot be read or the storage fails.
//! The storage is `memory://` unless it is said; on a server it leaves keys that begin with `replay`, and soon expire.

use std::fmt::{self, Display};
use std::process::ExitCode;
use std::time::Duration;

use serde::Deserialize;
use tokio::runtime::{Builder, Runtime};
use tower_ratelimit::storage::{AnyStorage, EtcdStorage, ManualClock, MemcachedStorage, RedisStorage};
use tower_ratelimit::{
    Decision, ElasticWindow, FixedWindow, Key, LeakyBucket, Limit, MemoryStorage, MovingWindow, Policy, Quota,
    RateLimiter, SlidingWindowCounter, Storage, Timestamp, TokenBucket,
};

type Error = tower_ratelimit::BoxError;

#[derive(Deserialize)]
struct Document {
    meta: Meta,
    #[serde(default)]
    scenarios: Vec<Scenario>,
    #[serde(default)]
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Meta {
    #[serde(default)]
    t0_unix_us: u64,
}

#[derive(Deserialize)]
struct Scenario {
    name: String,
    #[serde(flatten)]
    alone: Option<LimitSpec>,
    #[serde(default)]
    policy: Vec<LimitSpec>,
    steps: Vec<Step>,
}

#[derive(Clone, Deserialize)]
struct LimitSpec {
    strategy: String,
    limit: u32,
    period_us: u64,
    burst: Option<u32>,
    queue: Option<u32>,
}

#[derive(Deserialize)]
struct Step {
    t_us: u64,
    op: Op,
    key: String,
    cost: u32,
    #[serde(flatten)]
    expected: Answer,
    #[serde(default)]
    each: Option<Vec<Answer>>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Op {
    Hit,
    Peek,
    Clear,
}

#[derive(Deserialize, PartialEq)]
struct Answer {
    allowed: Option<bool>,
    remaining: u32,
    reset_after_us: u64,
    retry_after_us: Option<u64>,
    #[serde(default)]
    delay_us: Option<u64>,
}

#[derive(Deserialize)]
struct Case {
    input: String,
    ok: bool,
    #[serde(default)]
    limits: Vec<QuotaSpec>,
}

#[derive(Deserialize, PartialEq)]
struct QuotaSpec {
    limit: u32,
    period_us: u64,
}

/// Where states are kept.
struct Place {
    kept: Kept,
    runtime: Runtime,
}

enum Kept {
    InMemory,
    OnRedis(RedisStorage),
    OnMemcached(MemcachedStorage),
    OnEtcd(EtcdStorage),
}

/// Of a server's answer.
const DEADLINE: Duration = Duration::from_secs(5);

impl Place {
    fn at(url: &str) -> Result<Self, Error> {
        let kept = match url {
            "memory://" => Kept::InMemory,
            _ if url.starts_with("etcd") => Kept::OnEtcd(EtcdStorage::new(url)?.deadline(DEADLINE)),
            _ if url.starts_with("memcached") => Kept::OnMemcached(MemcachedStorage::new(url)?.deadline(DEADLINE)),
            _ => Kept::OnRedis(RedisStorage::new(url)?.deadline(DEADLINE)),
        };
        Ok(Self { kept, runtime: Builder::new_current_thread().enable_all().build()? })
    }

    /// An empty storage with this clock: on a server all that begins with a word of its own.
    fn storage(&self, scenario: &str, clock: ManualClock) -> Result<AnyStorage, Error> {
        let digest = scenario.bytes().fold(0_u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
        let prefix = format!("replay-{}-{digest:x}", std::process::id());
        Ok(match &self.kept {
            Kept::InMemory => MemoryStorage::builder().clock(clock).build()?.into(),
            Kept::OnRedis(server) => server.clone().try_prefix(&prefix)?.clock(clock).into(),
            Kept::OnMemcached(servers) => servers.clone().try_prefix(&prefix)?.clock(clock).into(),
            Kept::OnEtcd(members) => members.clone().try_prefix(&prefix)?.clock(clock).into(),
        })
    }
}

/// Replays one document. Returns how many steps it has and a line for each mismatch.
fn app(text: &str, place: &Place) -> Result<(usize, Vec<String>), Error> {
    replay(text, &place.runtime, |scenario, clock| place.storage(scenario, clock))
}

/// The same on what `make` makes for each scenario.
fn replay<St: Storage>(
    text: &str,
    runtime: &Runtime,
    make: impl Fn(&str, ManualClock) -> Result<St, Error>,
) -> Result<(usize, Vec<String>), Error> {
    let document: Document = serde_json::from_str(text)?;
    let mut steps = 0;
    let mut mismatches = Vec::new();
    for scenario in &document.scenarios {
        let clock = ManualClock::new(Timestamp::from_micros(document.meta.t0_unix_us));
        let storage = make(&scenario.name, clock.clone())?;
        let limiter = RateLimiter::with_storage(scenario.policy()?, storage);
        let mut now = 0;
        for (number, step) in scenario.steps.iter().enumerate() {
            clock.advance(Duration::from_micros(step.t_us - now));
            now = step.t_us;
            steps += 1;
            let (got, each) = runtime.block_on(step.run(&limiter))?;
            let name = &scenario.name;
            if got != step.expected {
                mismatches.push(format!("{name}, step {number}: expected {}, got {got}", step.expected));
            } else if step.each.as_ref().is_some_and(|expected| *expected != each) {
                let expected = list(step.each.as_deref().unwrap_or_default());
                mismatches.push(format!("{name}, step {number}: expected of each {expected}, got {}", list(&each)));
            }
        }
    }
    for (number, case) in document.cases.iter().enumerate() {
        steps += 1;
        let parsed = case.input.parse::<Policy>();
        let got =
            parsed.as_ref().map_or_else(|_| Vec::new(), |policy| policy.limits().iter().map(quota_spec).collect());
        if parsed.is_ok() != case.ok || got != case.limits {
            let outcome = parsed.map_or_else(|error| error.to_string(), |policy| policy.to_string());
            let expected = if case.ok { list(&case.limits) } else { "an error".to_owned() };
            mismatches.push(format!("{:?}, step {number}: expected {expected}, got {outcome}", case.input));
        }
    }
    Ok((steps, mismatches))
}

impl Scenario {
    fn policy(&self) -> Result<Policy, Error> {
        let specs = self.alone.iter().chain(&self.policy);
        let mut limits = specs.map(LimitSpec::limit);
        let first = limits.next().ok_or_else(|| format!("{}: neither a limit nor a policy", self.name))??;
        limits.try_fold(Policy::from(first), |policy, limit| Ok(policy.with(limit?)))
    }
}

impl LimitSpec {
    fn limit(&self) -> Result<Limit, Error> {
        let mut quota = Quota::try_per(self.limit, Duration::from_micros(self.period_us))?;
        if let Some(burst) = self.burst {
            quota = quota.try_burst(burst)?;
        }
        let limit = match (&*self.strategy, self.queue) {
            ("fixed-window" | "interval-token-bucket", None) => Limit::try_new(FixedWindow::new(), quota),
            ("fixed-window-aligned", None) => Limit::try_new(FixedWindow::aligned(), quota),
            ("elastic-window", None) => Limit::try_new(ElasticWindow::new(), quota),
            ("moving-window", None) => Limit::try_new(MovingWindow::new(), quota),
            ("sliding-window-counter", None) => Limit::try_new(SlidingWindowCounter::new(), quota),
            ("sliding-window-counter-aligned", None) => Limit::try_new(SlidingWindowCounter::aligned(), quota),
            ("token-bucket", None) => Limit::try_new(TokenBucket::new(), quota),
            ("leaky-bucket-queue", Some(queue)) => Limit::try_new(LeakyBucket::new().queue(queue), quota),
            (other, queue) => return Err(format!("unknown strategy {other:?} with queue {queue:?}").into()),
        };
        Ok(limit?)
    }
}

impl Step {
    async fn run<St: Storage>(&self, limiter: &RateLimiter<St>) -> Result<(Answer, Vec<Answer>), Error> {
        let key = Key::from(&self.key);
        let decision = match self.op {
            Op::Hit => limiter.hit_with_cost(&key, self.cost).await.map_err(Into::into)?,
            Op::Peek => limiter.peek_with_cost(&key, self.cost).await.map_err(Into::into)?,
            Op::Clear => {
                limiter.clear(&key).await.map_err(Into::into)?;
                let after = Answer::new(&limiter.peek(&key).await.map_err(Into::into)?);
                return Ok((Answer { allowed: None, delay_us: None, ..after }, Vec::new()));
            }
        };
        let delays = self.expected.delay_us.is_some();
        let mut answer = Answer::new(&decision);
        answer.delay_us = answer.delay_us.filter(|delay| delays || *delay > 0);
        let each = decision.limits().iter().map(|status| Answer {
            allowed: Some(status.is_admitted()),
            remaining: status.remaining(),
            reset_after_us: micros(status.reset_after()),
            retry_after_us: status.retry_after().map(micros),
            delay_us: None,
        });
        Ok((answer, each.collect()))
    }
}

impl Answer {
    fn new(decision: &Decision) -> Self {
        Self {
            allowed: Some(decision.is_admitted()),
            remaining: decision.remaining(),
            reset_after_us: micros(decision.reset_after()),
            retry_after_us: decision.retry_after().map(micros),
            delay_us: decision.is_admitted().then(|| micros(decision.delay())),
        }
    }
}

impl Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = match self.allowed {
            Some(true) => "admitted",
            Some(false) => "refused",
            None => "cleared",
        };
        write!(f, "{verdict} remaining {} reset {} ", self.remaining, self.reset_after_us)?;
        match self.retry_after_us {
            Some(wait) => write!(f, "retry {wait}")?,
            None => write!(f, "retry -")?,
        }
        self.delay_us.map_or(Ok(()), |delay| write!(f, " delay {delay}"))
    }
}

impl Display for QuotaSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} per {} us", self.limit, self.period_us)
    }
}

fn quota_spec(limit: &Limit) -> QuotaSpec {
    QuotaSpec { limit: limit.quota().amount(), period_us: limit.quota().period_micros() }
}

fn list(items: &[impl Display]) -> String {
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

fn micros(span: Duration) -> u64 {
    span.as_micros().try_into().unwrap_or(u64::MAX)
}

fn main() -> ExitCode {
    let mut files: Vec<String> = std::env::args().skip(1).collect();
    let mut url = "memory://".to_owned();
    if files.first().is_some_and(|first| first == "--storage") && files.len() > 1 {
        url = files.remove(1);
        files.remove(0);
    }
    if files.is_empty() {
        eprintln!("usage: replay [--storage URL] FILE..");
        return ExitCode::from(2);
    }
    let place = match Place::at(&url) {
        Ok(place) => place,
        Err(error) => {
            eprintln!("--storage: {error}");
            return ExitCode::from(2);
        }
    };
    let (mut steps, mut mismatches) = (0, 0);
    for file in files {
        match std::fs::read_to_string(&file).map_err(Error::from).and_then(|text| app(&text, &place)) {
            Ok((replayed, wrong)) => {
                for line in &wrong {
                    println!("{line}");
                }
                steps += replayed;
                mismatches += wrong.len();
            }
            Err(error) => {
                eprintln!("{file}: {error}");
                return ExitCode::from(2);
            }
        }
    }
    println!("{steps} steps, {mismatches} mismatches");
    ExitCode::from(u8::from(mismatches > 0))
}

#[cfg(test)]
#[path = "../tests/stores/mod.rs"]
mod stores;

#[cfg(test)]
mod tests {
    use tower_ratelimit::storage::Cas;

    use super::stores::Texts;
    use super::*;

    fn vectors() -> impl Iterator<Item = String> {
        let folder = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors")).unwrap();
        let files = folder.map(|entry| entry.unwrap().path());
        let documents = files.filter(|file| file.extension().is_some_and(|ending| ending == "json"));
        documents.map(|file| std::fs::read_to_string(file).unwrap())
    }

    #[test]
    fn every_vector_agrees() {
        let (mut steps, place) = (0, Place::at("memory://").unwrap());
        for document in vectors() {
            let (replayed, mismatches) = app(&document, &place).unwrap();
            assert_eq!(mismatches, Vec::<String>::new());
            steps += replayed;
        }
        assert_eq!(steps, 37_350 + 139, "all of them were replayed");
    }

    /// Through text, and swapped.
    #[test]
    fn every_vector_agrees_on_a_store_that_compares_and_swaps() {
        let (mut steps, runtime) = (0, Runtime::new().unwrap());
        for document in vectors() {
            let make = |_: &str, clock| Ok(Cas::new(Texts::default()).deadline(Duration::from_secs(20)).clock(clock));
            let (replayed, mismatches) = replay(&document, &runtime, make).unwrap();
            assert_eq!(mismatches, Vec::<String>::new());
            steps += replayed;
        }
        assert_eq!(steps, 37_350 + 139, "all of them were replayed");
    }

    #[test]
    fn a_wrong_expectation_is_told() {
        let document = vectors().find(|document| document.contains("\"strategy\": \"fixed-window\"")).unwrap();
        let wrong = document.replacen("\"remaining\":2", "\"remaining\":3", 1);
        let place = Place::at("memory://").unwrap();
        let (_, mismatches) = app(&wrong, &place).unwrap();
        assert_eq!(mismatches.len(), 1);
        assert!(mismatches[0].starts_with("fixed/rejected-hits-count-cost, step 0: expected admitted remaining 3"));
        assert!(app("{}", &place).is_err());
    }
}
