//! A compare-and-swap store in this process. It is correct or has one fault.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::task::yield_now;
use tower_ratelimit::storage::{CasStorage, Clock, Loaded, ManualClock, Swapped};
use tower_ratelimit::{BoxError, Timestamp};

/// The fault of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    #[default]
    None,
    DoesNotCompare,
    /// A known defect: GET then SET.
    ComparesThenPuts,
    Trims,
    IgnoresCase,
    CutsKeys,
    ReusesVersions,
    ReturnsTheGivenText,
    RemovesWhenStale,
    /// A known defect: seconds given as milliseconds.
    SecondsAreMillis,
    /// A known defect: a time to live above 30 days is treated as an instant in the past.
    MonthsArePast,
    /// A known defect: the time to live is set only when a key is created.
    KeepsTheFirstExpiry,
    ExpiresAfterASecond,
    /// Removes a text after four fifths of its time to live.
    ExpiresAFifthEarly,
    /// Keeps texts for whole seconds, rounded down.
    RoundsSecondsDown,
    ReportsMillis,
    /// Keeps the first 65,535 bytes of a text.
    CutsTexts,
    /// Keeps the first megabyte of a text.
    CutsTextsAtAMegabyte,
    /// A lost swap returns the text before the current one.
    ReturnsThePreviousText,
    /// A lost swap returns at most 255 bytes of the text.
    CutsReturnedTexts,
    /// A lost swap returns the removed text of an absent key.
    ReturnsRemovedTexts,
    /// Stores one stale swap in a thousand.
    StoresAStaleSwapInAThousand,
    /// Does not store one swap in a thousand.
    DropsASwapInAThousand,
    /// Recalls the first text that was loaded.
    RecallsOutdatedTexts,
    /// Treats `_` in a key as any character.
    MatchesUnderscores,
    /// Keeps the slots of the process that has claimed last.
    KeepsSlotsOfOneProcess,
    /// Forgets a process that has given all slots back.
    ForgetsReturnedSlots,
    /// Forgets the numbers of the claims, so late ones count.
    ForgetsSequences,
    /// Keeps slots a microsecond longer than their time to live.
    KeepsSlotsLonger,
    /// Forgets slots a microsecond before the end of their time to live.
    ForgetsSlotsEarly,
    /// Has one ledger for all keys.
    SharesSlots,
}

/// The begin of the keys of ledgers.
const LEDGER: char = '*';

/// A store in this process that yields before each reply. The version of a text is the number of
/// its write.
#[derive(Clone, Debug, Default)]
pub struct FakeCasStore(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    fault: Fault,
    reports_time: bool,
    longest: Option<usize>,
    /// Expires texts by this clock. `None` is real time.
    clock: Option<ManualClock>,
    texts: Mutex<HashMap<String, Written>>,
    /// Held during a compare-and-swap.
    step: Mutex<()>,
    writings: AtomicU64,
    loads: AtomicU64,
    swaps: AtomicU64,
    /// The number of swaps to lose before one succeeds.
    losing: AtomicU64,
    hangs: AtomicBool,
    /// The number of the first swap without a reply, or 0.
    swaps_hang_from: AtomicU64,
    keep: Mutex<Duration>,
    fails: AtomicBool,
    /// The delay of each reply in milliseconds.
    millis: AtomicU64,
    /// The number of swaps that could have had a rare fault.
    chances: AtomicU64,
    /// Recalls an empty text of each key, like a store that has forgotten it.
    forgets: bool,
    /// The first loaded text of each key, for [`Fault::RecallsOutdatedTexts`].
    recalled: Mutex<HashMap<String, Loaded<u64>>>,
}

#[derive(Clone, Debug, Default)]
struct Written {
    text: String,
    previous: String,
    version: u64,
    gone_at: Option<Timestamp>,
}

impl FakeCasStore {
    pub fn with_fault(fault: Fault) -> Self {
        let reports_time = fault == Fault::ReportsMillis;
        Self(Arc::new(Inner { fault, reports_time, ..Inner::default() }))
    }

    pub fn with_clock() -> Self {
        Self(Arc::new(Inner { reports_time: true, ..Inner::default() }))
    }

    /// A store that reports no time, and expires texts by this clock.
    pub fn expiring_by(clock: ManualClock) -> Self {
        Self(Arc::new(Inner { clock: Some(clock), ..Inner::default() }))
    }

    /// The same, but it takes each key for a missing one until a swap shows that it exists.
    pub fn forgetful(clock: ManualClock) -> Self {
        Self(Arc::new(Inner { clock: Some(clock), forgets: true, ..Inner::default() }))
    }

    pub fn with_max_len(longest: usize) -> Self {
        Self(Arc::new(Inner { longest: Some(longest), ..Inner::default() }))
    }

    /// Returns the numbers of loads and swaps, and resets them.
    pub fn trips(&self) -> (u64, u64) {
        (self.0.loads.swap(0, Ordering::SeqCst), self.0.swaps.swap(0, Ordering::SeqCst))
    }

    pub fn lose(&self, swaps: u64) {
        self.0.losing.store(swaps, Ordering::SeqCst);
    }

    pub fn hang(&self, hangs: bool) {
        self.0.hangs.store(hangs, Ordering::SeqCst);
    }

    /// Hangs the swap with this number and later ones, until this method is called with 0.
    pub fn hang_from_swap(&self, number: u64) {
        self.0.swaps_hang_from.store(number, Ordering::SeqCst);
    }

    /// Returns the time to live of the last text.
    pub fn keep(&self) -> Duration {
        *self.0.keep.lock().unwrap()
    }

    pub fn fail(&self, fails: bool) {
        self.0.fails.store(fails, Ordering::SeqCst);
    }

    pub fn answer_after(&self, millis: u64) {
        self.0.millis.store(millis, Ordering::SeqCst);
    }

    pub fn text(&self, key: &str) -> String {
        self.0.texts.lock().unwrap().get(key).cloned().unwrap_or_default().text
    }

    /// Writes a text without a swap, like another process.
    pub fn put(&self, key: &str, text: &str) {
        let version = self.0.writings.fetch_add(1, Ordering::SeqCst) + 1;
        let text = Written { text: text.to_owned(), version, ..Written::default() };
        self.0.texts.lock().unwrap().insert(key.to_owned(), text);
    }

    async fn answer(&self) -> Result<(), BoxError> {
        let (hangs, millis) = (self.0.hangs.load(Ordering::SeqCst), self.0.millis.load(Ordering::SeqCst));
        yield_now().await;
        if millis > 0 {
            tokio::time::sleep(Duration::from_millis(millis)).await;
        }
        if hangs {
            std::future::pending::<()>().await;
        }
        if self.0.fails.load(Ordering::SeqCst) { Err("the disk is full".into()) } else { Ok(()) }
    }

    fn called(&self, key: &str) -> String {
        match self.0.fault {
            Fault::IgnoresCase => key.to_ascii_lowercase(),
            Fault::CutsKeys => key.chars().take(250).collect(),
            Fault::SharesSlots if key.starts_with(LEDGER) => LEDGER.to_string(),
            Fault::MatchesUnderscores if key.ends_with("a%b") => key.replace("a%b", "a_b"),
            _ => key.to_owned(),
        }
    }

    fn current(&self, key: &str) -> Written {
        let stored = self.0.texts.lock().unwrap().get(&self.called(key)).cloned().unwrap_or_default();
        let is_live = stored.gone_at.is_none_or(|gone_at| self.now() < gone_at);
        if is_live { stored } else { Written { text: String::new(), ..stored } }
    }

    fn loaded(&self, Written { text, version, .. }: Written) -> Loaded<u64> {
        let now = Timestamp::wall_clock();
        let now =
            if self.0.fault == Fault::ReportsMillis { Timestamp::from_micros(now.as_micros() / 1_000) } else { now };
        Loaded { text, version, now: self.0.reports_time.then_some(now) }
    }

    fn now(&self) -> Timestamp {
        self.0.clock.as_ref().map_or_else(Timestamp::wall_clock, Clock::now)
    }

    fn gone_at(&self, keep: Duration) -> Timestamp {
        let keep = match self.0.fault {
            Fault::SecondsAreMillis => keep / 1_000,
            Fault::MonthsArePast if keep > Duration::from_secs(30 * 86_400) => Duration::ZERO,
            Fault::ExpiresAfterASecond => keep.min(Duration::from_secs(1)),
            Fault::ExpiresAFifthEarly => keep * 4 / 5,
            Fault::RoundsSecondsDown => Duration::from_secs(keep.as_secs()),
            _ => keep,
        };
        self.now().plus(u64::try_from(keep.as_micros()).unwrap_or(u64::MAX))
    }

    fn swap_in_one_step(&self, key: &str, version: u64, text: &str, keep: Duration) -> Swapped<u64> {
        let _alone = self.0.step.lock().unwrap();
        let (fault, stored) = (self.0.fault, self.current(key));
        let is_stale = stored.version != version;
        if is_stale && fault == Fault::ReturnsTheGivenText {
            return Swapped::Lost(Some(Loaded { text: text.to_owned(), version, now: None }));
        }
        let removes = fault == Fault::RemovesWhenStale && text.is_empty();
        let is_thousandth = |with: Fault| fault == with && self.0.chances.fetch_add(1, Ordering::SeqCst) % 1_000 == 999;
        let stores_stale =
            fault == Fault::DoesNotCompare || is_stale && is_thousandth(Fault::StoresAStaleSwapInAThousand);
        if is_stale && !removes && !stores_stale {
            // Every other lost swap returns the current text, too.
            let returns_text = self.0.swaps.load(Ordering::SeqCst).is_multiple_of(2);
            return Swapped::Lost(returns_text.then(|| self.returned(stored)));
        }
        if !is_thousandth(Fault::DropsASwapInAThousand) {
            self.write(key, text, keep);
        }
        Swapped::Stored
    }

    /// Returns the text that a lost swap returns.
    fn returned(&self, stored: Written) -> Loaded<u64> {
        let text = match self.0.fault {
            Fault::ReturnsThePreviousText => stored.previous.clone(),
            Fault::CutsReturnedTexts => stored.text.chars().take(255).collect(),
            Fault::ReturnsRemovedTexts if stored.text.is_empty() => stored.previous.clone(),
            _ => stored.text.clone(),
        };
        self.loaded(Written { text, ..stored })
    }

    fn write(&self, key: &str, text: &str, keep: Duration) {
        *self.0.keep.lock().unwrap() = keep;
        let text = if self.0.fault == Fault::Trims { text.trim() } else { text };
        let ledger = key.starts_with(LEDGER).then(|| broken_ledger(self.0.fault, text));
        let text = ledger.as_deref().unwrap_or(text);
        let mut texts = self.0.texts.lock().unwrap();
        let text = match self.0.fault {
            Fault::CutsTexts => &text[..text.len().min(65_535)],
            Fault::CutsTextsAtAMegabyte => &text[..text.len().min(1 << 20)],
            _ => text,
        };
        let stored = texts.entry(self.called(key)).or_default();
        let writing = self.0.writings.fetch_add(1, Ordering::SeqCst) + 1;
        let version = match (self.0.fault, text) {
            (Fault::ReusesVersions, "") => 0,
            (Fault::ReusesVersions, _) => stored.version + 1,
            _ => writing,
        };
        let gone_at = match stored.gone_at {
            Some(gone_at) if self.0.fault == Fault::KeepsTheFirstExpiry => Some(gone_at),
            _ => Some(self.gone_at(keep)),
        };
        let previous = std::mem::take(&mut stored.text);
        *stored = Written { text: text.to_owned(), previous, version, gone_at };
    }
}

/// Returns a ledger, `slots1 PROCESS,COUNT,SEQUENCE,ALIVE_UNTIL ...`, as a store with this fault
/// keeps it.
fn broken_ledger(fault: Fault, text: &str) -> String {
    let mut words = text.split(' ');
    let version = words.next().unwrap_or_default();
    let moved = |instant: &str, micros| instant.parse::<u64>().unwrap().saturating_add_signed(micros).to_string();
    let mut holdings: Vec<Vec<String>> = words.map(|word| word.split(',').map(str::to_owned).collect()).collect();
    match fault {
        Fault::KeepsSlotsOfOneProcess => drop(holdings.drain(..holdings.len().saturating_sub(1))),
        Fault::ForgetsReturnedSlots => holdings.retain(|holding| holding[1] != "0"),
        Fault::ForgetsSequences => holdings.iter_mut().for_each(|holding| "0".clone_into(&mut holding[2])),
        Fault::KeepsSlotsLonger => holdings.iter_mut().for_each(|holding| holding[3] = moved(&holding[3], 1)),
        Fault::ForgetsSlotsEarly => holdings.iter_mut().for_each(|holding| holding[3] = moved(&holding[3], -1)),
        _ => {}
    }
    let holdings = holdings.iter().map(|holding| format!(" {}", holding.join(",")));
    format!("{version}{}", holdings.collect::<String>())
}

impl CasStorage for FakeCasStore {
    type Error = BoxError;
    type Version = u64;

    async fn load(&self, key: &str, _: Instant) -> Result<Loaded<u64>, BoxError> {
        self.0.loads.fetch_add(1, Ordering::SeqCst);
        self.answer().await?;
        let loaded = self.loaded(self.current(key));
        if self.0.fault == Fault::RecallsOutdatedTexts {
            self.0.recalled.lock().unwrap().entry(key.to_owned()).or_insert_with(|| loaded.clone());
        }
        yield_now().await;
        Ok(loaded)
    }

    async fn swap(
        &self,
        key: &str,
        version: &u64,
        text: &str,
        keep: Duration,
        _: Instant,
    ) -> Result<Swapped<u64>, BoxError> {
        let number = self.0.swaps.fetch_add(1, Ordering::SeqCst) + 1;
        while (1..=number).contains(&self.0.swaps_hang_from.load(Ordering::SeqCst)) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        self.answer().await?;
        let fault = self.0.fault;
        if self.0.longest.is_some_and(|longest| text.len() > longest) {
            return Err("the text is too long".into());
        }
        let losing = |losing: u64| losing.checked_sub(1);
        if self.0.losing.fetch_update(Ordering::SeqCst, Ordering::SeqCst, losing).is_ok() {
            return Ok(Swapped::Lost(None));
        }
        if fault == Fault::ComparesThenPuts {
            if self.current(key).version != *version {
                return Ok(Swapped::Lost(None));
            }
            yield_now().await;
            self.write(key, text, keep);
            return Ok(Swapped::Stored);
        }
        let swapped = self.swap_in_one_step(key, *version, text, keep);
        yield_now().await;
        Ok(swapped)
    }

    async fn check(&self, _: Instant) -> Result<(), BoxError> {
        self.answer().await
    }

    fn recall(&self, key: &str) -> Option<Loaded<u64>> {
        let forgotten = || Loaded { text: String::new(), version: 0, now: None };
        self.0.recalled.lock().unwrap().get(key).cloned().or_else(|| self.0.forgets.then(forgotten))
    }

    fn max_text_len(&self) -> Option<usize> {
        self.0.longest
    }
}
