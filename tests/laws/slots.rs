//! Law 16: processes that share the slots of a key never use more than there are while each of them renews
//! its slots in time. Random schedules of whole layers over compare-and-swap, on a store whose messages are
//! late or lost. Tokio's time is paused.

use std::convert::Infallible;
use std::future::{pending, ready};
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::ask;
use common::fake_cas_store::FakeCasStore;
use common::random::Numbers;
use http::{Request, Response};
use tokio::runtime::Builder;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tower::{Layer, service_fn};
use tower_ratelimit::extract::Head;
use tower_ratelimit::storage::{Cas, CasStorage, Clock, Loaded, ManualClock, Swapped, TokioClock};
use tower_ratelimit::{BoxError, Global, InFlightBody, InFlightLayer, OnError, Permit, Timestamp};

type Answer = Response<InFlightBody<String>>;

const SECOND: Duration = Duration::from_secs(1);

const TIME_TO_LIVE: Duration = Duration::from_secs(30);

/// The time between two claims of a process with slots in use: a third of the time to live, the timeout of
/// a claim that fails meanwhile, that of the renewal, and the time between two checks.
const RENEWAL: Duration = Duration::from_secs(13);

/// The time by which a message is late at most, with the timeout of a call and the time between two checks.
const LATE: Duration = Duration::from_secs(6);

const STEPS: usize = 60;

/// The link of a process to the store. It delays messages, and loses some of them.
#[derive(Clone, Debug)]
struct Link {
    store: FakeCasStore,
    numbers: Arc<Mutex<Numbers>>,
    /// The number of losses in 100 messages.
    losses: u64,
    is_up: Arc<AtomicBool>,
    /// The instant at which the process began its last claim.
    begun: Arc<Mutex<Instant>>,
    /// The instant of the last claim that was stored.
    stored: Arc<Mutex<Instant>>,
}

impl Link {
    fn below(&self, limit: u64) -> u64 {
        self.numbers.lock().unwrap().below(limit)
    }

    /// Delays a message. A message that is lost never arrives.
    async fn pass(&self) {
        sleep(Duration::from_millis(self.below(20))).await;
        if !self.is_up.load(Ordering::SeqCst) || self.below(100) < self.losses {
            pending::<()>().await;
        }
    }
}

impl CasStorage for Link {
    type Error = BoxError;
    type Version = u64;

    async fn load(&self, key: &str, deadline: std::time::Instant) -> Result<Loaded<u64>, BoxError> {
        *self.begun.lock().unwrap() = Instant::now();
        self.pass().await;
        let loaded = self.store.load(key, deadline).await?;
        self.pass().await;
        Ok(loaded)
    }

    async fn swap(
        &self,
        key: &str,
        version: &u64,
        text: &str,
        keep: Duration,
        deadline: std::time::Instant,
    ) -> Result<Swapped<u64>, BoxError> {
        let (link, key, version, text) = (self.clone(), key.to_owned(), *version, text.to_owned());
        // The message arrives, although its caller may have given up.
        let swapped = tokio::spawn(async move {
            if link.losses > 0 && link.below(20) == 0 {
                sleep(Duration::from_millis(link.below(4_000))).await;
            }
            link.pass().await;
            let swapped = link.store.swap(&key, &version, &text, keep, deadline).await;
            if matches!(swapped, Ok(Swapped::Stored)) {
                *link.stored.lock().unwrap() = Instant::now();
            }
            swapped
        });
        let swapped = swapped.await??;
        self.pass().await;
        Ok(swapped)
    }
}

/// A clock that is ahead of the others.
#[derive(Debug)]
struct Ahead {
    clock: Arc<TokioClock>,
    by: u64,
}

impl Clock for Ahead {
    fn now(&self) -> Timestamp {
        self.clock.now().plus(self.by)
    }
}

/// A process with its requests. Dropping it is a crash, if its link is down.
struct Process {
    layer: InFlightLayer,
    link: Link,
    requests: JoinSet<Answer>,
    held: Vec<Answer>,
    /// The instant at which a partition ends.
    up_at: Instant,
}

struct Schedule {
    /// Repeats this schedule as the value of `FIRST_SCHEDULE`, with a number of `SCHEDULES` of 1.
    seed: u64,
    numbers: Numbers,
    slots: u32,
    /// The microseconds by which clocks differ at most.
    skew: u64,
    losses: u64,
    store: FakeCasStore,
    clock: Arc<TokioClock>,
    processes: Vec<Process>,
    /// `true` while more slots may be in use, because a process has not renewed its own in time.
    was_late: bool,
    /// The instant by which the last late process has claimed its slots again.
    back_by: Instant,
    /// `true` if requests could be admitted at the last check although too many slots are in use.
    may_exceed: bool,
    checked: Instant,
    reached: Reached,
}

/// Counts of the situations that the schedules have reached.
#[derive(Default)]
struct Reached {
    admitted: u64,
    full: u64,
    late: u64,
}

impl Schedule {
    fn new(seed: u64) -> Self {
        let mut numbers = Numbers((seed + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let mut schedule = Self {
            seed,
            slots: 1 + u32::try_from(numbers.below(5)).unwrap(),
            skew: numbers.one_of(&[0, 8_000_000]),
            losses: numbers.one_of(&[0, 0, 2, 10]),
            numbers,
            // Its texts do not expire when the machine stops for a while.
            store: FakeCasStore::expiring_by(ManualClock::default()),
            clock: Arc::default(),
            processes: Vec::new(),
            was_late: false,
            back_by: Instant::now(),
            may_exceed: true,
            checked: Instant::now(),
            reached: Reached::default(),
        };
        for _ in 0..2 + schedule.numbers.below(3) {
            let process = schedule.process();
            schedule.processes.push(process);
        }
        schedule
    }

    fn process(&mut self) -> Process {
        let numbers = Arc::new(Mutex::new(Numbers(self.numbers.below(u64::MAX) + 1)));
        let is_up = Arc::new(AtomicBool::new(true));
        let [begun, stored] = [(); 2].map(|()| Arc::new(Mutex::new(Instant::now())));
        let link = Link { store: self.store.clone(), numbers, losses: self.losses, is_up, begun, stored };
        let clock = Ahead { clock: Arc::clone(&self.clock), by: self.numbers.below(self.skew + 1) };
        let storage = Cas::new(link.clone()).clock(clock).timeout(SECOND);
        let cost = |head: &Head<'_>| head.uri().path()[1..].parse::<u32>().unwrap();
        let layer = InFlightLayer::new(self.slots, Global::new()).cost(cost).storage(storage, OnError::Refuse);
        let layer = if self.numbers.below(2) == 0 { layer } else { layer.wait(20 * SECOND, 8) };
        Process { layer, link, requests: JoinSet::new(), held: Vec::new(), up_at: Instant::now() }
    }

    async fn step(&mut self) {
        let at = usize::try_from(self.numbers.below(self.processes.len() as u64)).unwrap();
        match self.numbers.below(13) {
            0..=4 => {
                let cost = 1 + u32::try_from(self.numbers.below(2)).unwrap();
                self.processes[at].request(cost.min(self.slots));
            }
            5..=8 => {
                let held = self.processes[at].held.len() as u64;
                if held > 0 {
                    drop(self.processes[at].held.swap_remove(usize::try_from(self.numbers.below(held)).unwrap()));
                }
            }
            9 => self.processes[at].requests.abort_all(),
            10 => self.crash_or_cut(at),
            11 if self.numbers.below(4) == 0 => {
                let new = self.process();
                let ended = mem::replace(&mut self.processes[at], new);
                // The result is an error if messages are lost.
                let closing = tokio::spawn(timeout(20 * SECOND, ended.layer.close()));
                while !closing.is_finished() {
                    self.pass(SECOND).await;
                }
                ended.crash();
            }
            _ => {
                for _ in 0..self.numbers.one_of(&[1, 4, 12, 25]) {
                    self.pass(SECOND).await;
                }
            }
        }
        let passed = Duration::from_millis(self.numbers.below(100));
        self.pass(passed).await;
    }

    fn crash_or_cut(&mut self, at: usize) {
        // A partition of 9 seconds delays a renewal to 20 seconds after the one before.
        let seconds = match self.numbers.below(4) {
            0 => {
                let new = self.process();
                return mem::replace(&mut self.processes[at], new).crash();
            }
            1 => 45,
            _ => self.numbers.below(9),
        };
        self.processes[at].up_at = Instant::now() + SECOND * u32::try_from(seconds).unwrap();
    }

    /// Time passes. Then checks the slots in use.
    async fn pass(&mut self, time: Duration) {
        for Process { link, up_at, .. } in &self.processes {
            link.is_up.store(Instant::now() >= *up_at, Ordering::SeqCst);
        }
        sleep(time).await;
        let (now, margin) = (Instant::now(), LATE + Duration::from_micros(self.skew));
        let (mut in_use, mut all_admitted) = (0, 0);
        for Process { layer, link, requests, held, .. } in &mut self.processes {
            let mut admitted = 0;
            while let Some(answer) = requests.try_join_next() {
                held.extend(answer.ok().filter(|answer| answer.status() == 200).inspect(|_| admitted += 1));
            }
            let (begun, stored) = (*link.begun.lock().unwrap(), *link.stored.lock().unwrap());
            let is_renewing = layer.in_use() == 0 || now - begun <= RENEWAL;
            assert!(is_renewing, "a process does not renew its slots in schedule {}", self.seed);
            let has_ended = self.checked.saturating_duration_since(stored) > TIME_TO_LIVE;
            assert!(!has_ended || admitted == 0, "a claim admits after its end in schedule {}", self.seed);
            if layer.in_use() > 0 && now - stored + margin > TIME_TO_LIVE {
                (self.was_late, self.back_by) = (true, now + LATE);
            }
            in_use += layer.in_use();
            all_admitted += admitted;
        }
        // A process that has not reached the store since then admits requests by its claim from
        // before, until that claim ends.
        let is_from_before = |process: &Process| {
            let stored = *process.link.stored.lock().unwrap();
            stored <= self.back_by && now - stored <= TIME_TO_LIVE
        };
        let slots = u64::from(self.slots);
        let may_exceed = now <= self.back_by || self.processes.iter().any(is_from_before);
        self.was_late &= in_use > slots || may_exceed;
        // When all processes know of the slots of the late one, no request is admitted until enough of
        // them have ended.
        let may_admit = may_exceed || self.may_exceed || all_admitted == 0;
        let is_kept = in_use <= slots || self.was_late && may_admit;
        assert!(is_kept, "law 16: {in_use} of {slots} slots are in use in schedule {}", self.seed);
        (self.may_exceed, self.checked) = (may_exceed, now);
        self.reached.admitted += all_admitted;
        self.reached.full += u64::from(!self.was_late && in_use == slots);
        self.reached.late += u64::from(self.was_late && in_use > slots);
    }

    /// All requests end. After the time to live, a new process can take all slots.
    async fn end(mut self) -> Reached {
        self.losses = 0;
        let mut new = self.process();
        for process in &mut self.processes {
            process.link.is_up.store(true, Ordering::SeqCst);
            process.requests.abort_all();
            process.held.clear();
        }
        sleep(TIME_TO_LIVE + LATE + Duration::from_micros(self.skew)).await;
        let in_use: u64 = self.processes.iter().map(|process| process.layer.in_use()).sum();
        assert_eq!(in_use, 0, "schedule {}", self.seed);
        new.request(self.slots);
        let all = new.requests.join_next().await.unwrap().unwrap();
        assert_eq!(all.status(), 200, "all slots are free after the time to live in schedule {}", self.seed);
        self.reached
    }
}

impl Process {
    fn request(&mut self, cost: u32) {
        // The permit in the extensions of the response holds the slots until the response is dropped.
        let service = self.layer.layer(service_fn(|request: Request<()>| {
            let mut response = Response::new(String::new());
            response.extensions_mut().insert(request.extensions().get::<Permit>().cloned());
            ready(Ok::<_, Infallible>(response))
        }));
        let request = Request::get(format!("/{cost}")).body(()).unwrap();
        self.requests.spawn(async move { ask(&service, request).await });
    }

    /// Ends the process. None of its messages arrives from now on.
    fn crash(self) {
        self.link.is_up.store(false, Ordering::SeqCst);
    }
}

/// Returns the number in an environment variable.
fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |number| number.parse().expect("the variable is a number"))
}

/// `SCHEDULES` sets the number of schedules, and `FIRST_SCHEDULE` the seed of the first one.
#[test]
fn random_schedules_of_processes_never_use_more_slots_than_there_are() {
    let (first, count) = (number("FIRST_SCHEDULE", 0), number("SCHEDULES", 200));
    let mut reached = Reached::default();
    for seed in first..first + count {
        // A runtime for each schedule ends its tasks.
        let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let Reached { admitted, full, late } = runtime.block_on(async {
            let mut schedule = Schedule::new(seed);
            for _ in 0..STEPS {
                schedule.step().await;
            }
            schedule.end().await
        });
        reached.admitted += admitted;
        reached.full += full;
        reached.late += late;
    }
    let Reached { admitted, full, late } = reached;
    let reaches_all = admitted > count * 5 && full > count && late > count / 20;
    assert!(reaches_all || count < 200, "{admitted}, {full}, {late}");
    println!("{count} schedules: {admitted} requests, all slots in use {full} times, more after a pause {late} times");
}
