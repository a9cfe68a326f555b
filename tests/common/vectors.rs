//! Replays the golden vectors on a storage.

use std::collections::HashMap;
use std::fmt::{self, Display};
use std::future::ready;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, TryStreamExt, stream};
use serde::Deserialize;
use tokio::runtime::{Builder, Runtime};
use tower_ratelimit::storage::{AnyStorage, ManualClock};
#[cfg(feature = "servers")]
use tower_ratelimit::storage::{EtcdStorage, MemcachedStorage, PostgresStorage, RedisStorage, SqliteStorage};
use tower_ratelimit::strategy::Weekday;
use tower_ratelimit::{
    CalendarWindow, Decision, ElasticWindow, FixedWindow, Key, LeakyBucket, Limit, Lockout, MemoryStorage,
    MovingWindow, Policy, Quota, RateLimiter, SlidingWindowCounter, Storage, Timestamp, TokenBucket,
};

#[cfg(feature = "servers")]
use crate::servers::{with_option, with_timeout};
use crate::time::EVENTUALLY;

pub type Error = tower_ratelimit::BoxError;

/// The number of steps in all files together.
pub const STEPS: usize = 37_350 + 139 + 8_430 + 7_611 + 12_000 + 1_660;

/// Returns the paths of the JSON files with the vectors.
pub fn files() -> Vec<PathBuf> {
    let folder = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/vectors")).unwrap();
    let files = folder.map(|entry| entry.unwrap().path());
    files.filter(|file| file.extension().is_some_and(|ending| ending == "json")).collect()
}

/// Iterates over the texts of the files.
pub fn documents() -> impl Iterator<Item = String> {
    files().into_iter().map(|file| std::fs::read_to_string(file).unwrap())
}

/// Replays every file on the storage with this URL. Panics at the first file with a mismatch.
pub fn assert_all_agree(url: &str) {
    let target = ReplayTarget::at(url).unwrap();
    let steps: usize = documents()
        .map(|document| {
            let (steps, mismatches) = target.replay(&document).unwrap();
            assert_eq!(mismatches, Vec::<String>::new());
            steps
        })
        .sum();
    assert_eq!(steps, STEPS, "every step was replayed");
}

/// The kind of storage on which the vectors are replayed.
#[derive(Debug)]
pub struct ReplayTarget {
    kind: Kind,
    runtime: Runtime,
}

/// The storage. On a server, all scenarios share its connections, and each has its own clock.
#[derive(Debug)]
enum Kind {
    Memory,
    #[cfg(feature = "servers")]
    Redis(RedisStorage),
    #[cfg(feature = "servers")]
    Memcached(MemcachedStorage),
    #[cfg(feature = "servers")]
    Etcd(EtcdStorage),
    #[cfg(feature = "servers")]
    Postgres(PostgresStorage),
    #[cfg(feature = "servers")]
    Sqlite(SqliteStorage),
}

/// The timeout of each call to a server.
#[cfg(feature = "servers")]
const TIMEOUT: Duration = EVENTUALLY;

impl ReplayTarget {
    /// Creates the target of this URL.
    ///
    /// # Errors
    ///
    /// Returns an error if the URL is invalid, or if its storage was not compiled in.
    pub fn at(url: &str) -> Result<Self, Error> {
        // Programs that replay on one server at the same time use different keys.
        #[cfg(feature = "servers")]
        let shared = || with_option(&with_timeout(url, TIMEOUT), "prefix", format!("replay-{}", std::process::id()));
        #[cfg(feature = "servers")]
        let with_long_logs = || with_option(&shared(), "long-logs", "allow");
        let kind = match url {
            "memory://" => Kind::Memory,
            #[cfg(feature = "servers")]
            _ if url.starts_with("etcd") => Kind::Etcd(EtcdStorage::new(&with_long_logs())?),
            #[cfg(feature = "servers")]
            _ if url.starts_with("memcached") => Kind::Memcached(MemcachedStorage::new(&with_long_logs())?),
            #[cfg(feature = "servers")]
            _ if url.starts_with("postgres") => Kind::Postgres(PostgresStorage::new(&with_long_logs())?),
            #[cfg(feature = "servers")]
            _ if url.starts_with("sqlite") => Kind::Sqlite(SqliteStorage::new(&shared())?),
            #[cfg(feature = "servers")]
            _ => Kind::Redis(RedisStorage::new(&shared())?),
            #[cfg(not(feature = "servers"))]
            _ => return Err(format!("cannot replay on {url:?}: add --features servers, or use memory://").into()),
        };
        Ok(Self { kind, runtime: Builder::new_current_thread().enable_all().build()? })
    }

    /// Replays one document. See [`replay`].
    ///
    /// # Errors
    ///
    /// Returns an error if the document is invalid or the storage fails.
    pub fn replay(&self, document: &str) -> Result<(usize, Vec<String>), Error> {
        replay(document, &self.runtime, |clock| self.storage(clock))
    }

    /// Creates a storage with this clock. It is empty, or a server that scenarios share.
    fn storage(&self, clock: ManualClock) -> Result<AnyStorage, Error> {
        Ok(match &self.kind {
            Kind::Memory => MemoryStorage::builder().clock(clock).build()?.into(),
            #[cfg(feature = "servers")]
            Kind::Redis(storage) => AnyStorage::new(storage.clone().clock(clock)),
            #[cfg(feature = "servers")]
            Kind::Memcached(storage) => AnyStorage::new(storage.clone().clock(clock)),
            #[cfg(feature = "servers")]
            Kind::Etcd(storage) => AnyStorage::new(storage.clone().clock(clock)),
            #[cfg(feature = "servers")]
            Kind::Postgres(storage) => AnyStorage::new(storage.clone().clock(clock)),
            #[cfg(feature = "servers")]
            Kind::Sqlite(storage) => AnyStorage::new(storage.clone().clock(clock)),
        })
    }
}

#[derive(Deserialize)]
struct Document {
    meta: Meta,
    #[serde(default)]
    scenarios: Vec<Scenario>,
    #[serde(default)]
    boundaries: Vec<Boundary>,
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
    period_us: Option<u64>,
    burst: Option<u32>,
    queue: Option<u32>,
    lock_us: Option<u64>,
    factor: Option<u32>,
    max_lock_us: Option<u64>,
    forget_us: Option<u64>,
    by: Option<String>,
    #[serde(flatten)]
    calendar: Option<Calendar>,
}

/// The calendar of a window.
#[derive(Clone, Deserialize)]
struct Calendar {
    unit: String,
    start: Option<Start>,
    zone: String,
}

/// The first day of a window: of a week or a month, or of a year as `MM-DD`.
#[derive(Clone, Deserialize)]
#[serde(untagged)]
enum Start {
    Number(u8),
    Date(String),
}

/// The window that contains an instant.
#[derive(Deserialize)]
struct Boundary {
    #[serde(flatten)]
    calendar: Calendar,
    at_us: u64,
    begin_us: u64,
    end_us: u64,
}

#[derive(Deserialize)]
struct Step {
    t_us: u64,
    op: Op,
    key: String,
    cost: u32,
    /// The step of the hit that is settled.
    of: Option<usize>,
    /// The units to be refunded.
    units: Option<u32>,
    /// The actual cost of a settled hit.
    actual: Option<u32>,
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
    Refund,
    Charge,
    Settle,
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

/// The number of scenarios that are replayed at the same time. Most of the time is spent waiting
/// for a server.
const CONCURRENT: usize = 32;

/// The longest duration of a scenario whose mismatches count, with a manual clock. A server removes
/// a key by its own clock, half a second after the state expires. So a slow scenario can have mismatches without a
/// fault, and is replayed again.
pub const IN_TIME: Duration = Duration::from_millis(400);

/// The maximum number of times that a slow scenario is replayed again.
const ATTEMPTS: u32 = 5;

/// Replays one document, each scenario on the storage that `make` returns for its clock. The policy
/// has the name of the scenario, so scenarios can share a server.
///
/// Returns the number of steps and a line for each mismatch.
///
/// # Errors
///
/// Returns an error if the document is invalid or the storage fails.
pub fn replay<St: Storage>(
    text: &str,
    runtime: &Runtime,
    make: impl Fn(ManualClock) -> Result<St, Error>,
) -> Result<(usize, Vec<String>), Error> {
    let document: Document = serde_json::from_str(text)?;
    let attempt = async |scenario: &Scenario, number| {
        let clock = ManualClock::new(Timestamp::from_micros(document.meta.t0_unix_us));
        scenario.replay(number, make(clock.clone())?, &clock).await
    };
    let replays = document.scenarios.iter().map(async |scenario| {
        let started = Instant::now();
        Ok::<_, Error>((scenario, started, attempt(scenario, 0).await?))
    });
    let replays = stream::iter(replays).buffered(CONCURRENT);
    let mut replayed = Vec::new();
    runtime.block_on(replays.try_for_each(|(scenario, started, lines)| {
        replayed.push((scenario, started.elapsed(), lines));
        ready(Ok(()))
    }))?;
    let mut mismatches = Vec::new();
    for (scenario, mut took, mut lines) in replayed {
        for number in 1..=ATTEMPTS {
            if lines.is_empty() || took < IN_TIME {
                break;
            }
            let started = Instant::now();
            lines = runtime.block_on(attempt(scenario, number))?;
            took = started.elapsed();
        }
        mismatches.append(&mut lines);
    }
    let zones = document.boundaries.chunk_by(|one, other| one.calendar.zone == other.calendar.zone).map(|boundaries| {
        let clock = ManualClock::default();
        let storage = make(clock.clone());
        async move { replay_boundaries(boundaries, storage?, &clock).await }
    });
    let wrong: Vec<Vec<String>> = runtime.block_on(stream::iter(zones).buffered(CONCURRENT).try_collect())?;
    mismatches.extend(wrong.concat());
    let mut steps = document.boundaries.len();
    steps += document.scenarios.iter().map(|scenario| scenario.steps.len()).sum::<usize>();
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

/// Returns a line for each instant that is in another window, or whose hit on the storage has another
/// end.
async fn replay_boundaries(
    boundaries: &[Boundary],
    storage: impl Storage,
    clock: &ManualClock,
) -> Result<Vec<String>, Error> {
    let (storage, mut mismatches) = (AnyStorage::new(storage), Vec::new());
    // On a busy machine, connecting takes several attempts.
    storage.ready(EVENTUALLY).await?;
    for (number, boundary) in boundaries.iter().enumerate() {
        let Boundary { calendar, at_us, begin_us, end_us } = boundary;
        let at = Timestamp::from_micros(*at_us);
        clock.set(at);
        let limit = Limit::try_new(calendar.window()?, calendar.quota(1)?)?;
        let window = limit.strategy().window(limit.quota(), at).ok_or("the strategy has no windows")?;
        let policy = Policy::from(limit);
        let key = Key::from(format!("boundary {number} in {}", calendar.zone));
        let hit = RateLimiter::with_storage(policy.clone(), storage.clone()).hit(&key).await?;
        let got = [window.start.as_micros(), window.end.as_micros(), at_us + micros(hit.reset_after())];
        if got != [*begin_us, *end_us, *end_us] {
            mismatches
                .push(format!("{policy}, boundary {number} at {at_us}: expected {begin_us} to {end_us}, got {got:?}"));
        }
    }
    Ok(mismatches)
}

impl Calendar {
    fn quota(&self, limit: u32) -> Result<Quota, Error> {
        Ok(match &*self.unit {
            "day" => Quota::per_day(limit),
            "week" => Quota::per_week(limit),
            "month" => Quota::per_month(limit),
            "year" => Quota::per_year(limit),
            other => return Err(format!("unknown unit {other:?}").into()),
        })
    }

    fn window(&self) -> Result<CalendarWindow, Error> {
        let window = CalendarWindow::new().in_zone(&self.zone)?;
        Ok(match (&*self.unit, &self.start) {
            (_, None) => window,
            ("week", Some(Start::Number(day))) => window.first_weekday(WEEKDAYS[usize::from(*day) - 1]),
            ("month", Some(Start::Number(day))) => window.first_day(*day)?,
            ("year", Some(Start::Date(date))) => {
                let (month, day) = date.split_once('-').ok_or("the start of a year is not MM-DD")?;
                window.first_date(month.parse()?, day.parse()?)?
            }
            (unit, Some(_)) => return Err(format!("a {unit} cannot start on this day").into()),
        })
    }
}

/// The days of the week, from 1.
const WEEKDAYS: [Weekday; 7] = [
    Weekday::Monday,
    Weekday::Tuesday,
    Weekday::Wednesday,
    Weekday::Thursday,
    Weekday::Friday,
    Weekday::Saturday,
    Weekday::Sunday,
];

impl Scenario {
    /// Returns a line for each mismatch.
    async fn replay(&self, attempt: u32, storage: impl Storage, clock: &ManualClock) -> Result<Vec<String>, Error> {
        // On a busy machine, connecting takes several attempts.
        storage.ready(EVENTUALLY).await?;
        let policy = self.policy()?;
        let unique = format!("{} {attempt} {policy}", self.name);
        let limiter = RateLimiter::with_storage(policy.with_name(unique), storage);
        let (name, mut now, mut mismatches) = (&self.name, 0, Vec::new());
        let mut decisions = HashMap::new();
        for (number, step) in self.steps.iter().enumerate() {
            clock.advance(Duration::from_micros(step.t_us - now));
            now = step.t_us;
            let (got, each) = step.run(number, &limiter, &mut decisions).await?;
            if got != step.expected {
                mismatches.push(format!("{name}, step {number}: expected {}, got {got}", step.expected));
            } else if step.each.as_ref().is_some_and(|expected| *expected != each) {
                let expected = list(step.each.as_deref().unwrap_or_default());
                mismatches
                    .push(format!("{name}, step {number}: expected for each limit {expected}, got {}", list(&each)));
            }
        }
        Ok(mismatches)
    }

    fn policy(&self) -> Result<Policy, Error> {
        let specs = self.alone.iter().chain(&self.policy);
        let mut limits = specs.map(LimitSpec::limit);
        let first = limits.next().ok_or_else(|| format!("{}: neither a limit nor a policy", self.name))??;
        limits.try_fold(Policy::from(first), |policy, limit| Ok(policy.with(limit?)))
    }
}

impl LimitSpec {
    fn limit(&self) -> Result<Limit, Error> {
        if let ("calendar-window", Some(calendar)) = (&*self.strategy, &self.calendar) {
            return Ok(Limit::try_new(calendar.window()?, calendar.quota(self.limit)?)?);
        }
        let mut quota = Quota::try_per(self.limit, Duration::from_micros(self.period_us.ok_or("no period")?))?;
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
            ("lockout", None) => Limit::try_new(self.lockout().ok_or("an option of the lockout is missing")?, quota),
            (other, queue) => return Err(format!("unknown strategy {other:?} with queue {queue:?}").into()),
        };
        Ok(limit?)
    }

    fn lockout(&self) -> Option<Lockout> {
        let lockout = Lockout::lasting(Duration::from_micros(self.lock_us?))
            .escalating(self.factor?, Duration::from_micros(self.max_lock_us?))
            .forgetting_after(Duration::from_micros(self.forget_us?));
        Some(if self.by.as_deref() == Some("refusals") { lockout.by_refusals() } else { lockout })
    }
}

impl Step {
    /// Runs this step. `decisions` contains the decisions on earlier hits, by step number.
    async fn run(
        &self,
        number: usize,
        limiter: &RateLimiter,
        decisions: &mut HashMap<usize, Decision>,
    ) -> Result<(Answer, Vec<Answer>), Error> {
        let key = Key::from(&self.key);
        let decision = match self.op {
            Op::Hit => limiter.hit_with_cost(&key, self.cost).await?,
            Op::Peek => limiter.peek_with_cost(&key, self.cost).await?,
            Op::Clear => {
                limiter.clear(&key).await?;
                return self.after(limiter, &key).await;
            }
            Op::Charge => {
                let charged = Answer::new(&limiter.charge(&key, self.cost).await?);
                let (after, each) = self.after(limiter, &key).await?;
                let is_same = charged.allowed == Some(true)
                    && (charged.remaining, charged.reset_after_us) == (after.remaining, after.reset_after_us);
                return if is_same { Ok((after, each)) } else { Ok((charged, each)) };
            }
            Op::Refund | Op::Settle => {
                let hit = self.of.and_then(|hit| decisions.get(&hit)).ok_or("`of` is not the step of a hit")?;
                let actual = match (self.units, self.actual) {
                    (Some(units), None) => hit.cost() - units,
                    (None, Some(actual)) => actual,
                    _ => return Err("neither `units` nor `actual`".into()),
                };
                limiter.storage().settle(&limiter.policy(), &key, hit, actual).await?;
                return self.after(limiter, &key).await;
            }
        };
        if let Op::Hit = self.op {
            decisions.insert(number, decision.clone());
        }
        let delays = self.expected.delay_us.is_some();
        let mut answer = Answer::new(&decision);
        answer.delay_us = answer.delay_us.filter(|delay| delays || *delay > 0);
        let each = decision.statuses().iter().map(|status| Answer {
            allowed: Some(status.is_admitted()),
            remaining: status.remaining(),
            reset_after_us: micros(status.reset_after()),
            retry_after_us: status.retry_after().map(micros),
            delay_us: None,
        });
        Ok((answer, each.collect()))
    }

    /// Returns the numbers after a change, which has no verdict.
    async fn after(&self, limiter: &RateLimiter, key: &Key) -> Result<(Answer, Vec<Answer>), Error> {
        let after = Answer::new(&limiter.peek(key).await?);
        Ok((Answer { allowed: None, delay_us: None, retry_after_us: None, ..after }, Vec::new()))
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
            None => "changed",
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
