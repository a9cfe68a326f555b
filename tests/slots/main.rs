//! Eight processes share the slots of a key, on Redis, PostgreSQL and etcd. They never use more than there
//! are. The slots of processes that are killed or stopped are free again after the time to live.
//!
//! The test runs without the test harness, because each of the eight processes runs this program. A process
//! reports each request to the parent: `+` when it has its slot, and `-` before it gives the slot back. It
//! waits for the answer, so the parent never counts more slots than are in use.

use std::collections::HashMap;
use std::env;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use common::ask;
use common::random::Numbers;
use common::servers::{Etcd, Postgres, Server};
use common::time::{EVENTUALLY, wait_until};
use http::{Request, Response};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tower::{Layer, service_fn};
use tower_ratelimit::storage::AnyStorage;
use tower_ratelimit::{Global, InFlightLayer, OnError, Permit, Storage};

/// The environment variables that make this process one of the eight: the URL of the storage, and the
/// address of the parent.
const URL: &str = "TOWER_RATELIMIT_SLOTS_URL";
const PARENT: &str = "TOWER_RATELIMIT_SLOTS_PARENT";

const PROCESSES: usize = 8;
const TASKS: u64 = 4;
const SLOTS: u32 = 5;
const TIME_TO_LIVE: Duration = Duration::from_secs(12);

/// One of the eight processes. Dropping it kills it, as `kill -9` does.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The slots in use, as the processes have reported them.
#[derive(Default)]
struct Counts(Mutex<Counted>);

#[derive(Default)]
struct Counted {
    processes: HashMap<u32, Reports>,
    most: u32,
    /// The number of requests that had a slot.
    admitted: u32,
}

/// The slots of a process. They do not count while it is stopped, because they go to others.
#[derive(Default)]
struct Reports {
    in_use: u32,
    is_stopped: bool,
    /// The number of stops so far. A request that began before a stop does not count after it.
    stops: u32,
}

fn main() {
    if let (Ok(url), Ok(parent)) = (env::var(URL), env::var(PARENT)) {
        return one_of_many(&url, &parent);
    }
    let (redis, postgres, etcd) = (Server::start(&[]), Postgres::start(&[]), Etcd::start(1));
    thread::scope(|scope| {
        for (place, url) in [("Redis", redis.url()), ("PostgreSQL", postgres.url()), ("etcd", etcd.url())] {
            scope.spawn(move || check(place, &url));
        }
    });
}

fn check(place: &str, url: &str) {
    let counts = Arc::new(Counts::default());
    let parent = listen(&counts);
    let mut processes: Vec<Process> = (0..PROCESSES).map(|_| start(url, &parent)).collect();
    eventually_uses_all(&counts, 500, &format!("eight processes on {place}"));
    println!("{place}: eight processes use at most {SLOTS} slots at once");

    // Three processes are killed, at a moment at which all slots are in use.
    wait_until("all slots are in use", || counts.in_use() == SLOTS);
    processes.drain(..3).for_each(drop);
    // Two are stopped for longer than the time to live.
    for process in &processes[..2] {
        counts.stop(process);
    }
    thread::sleep(TIME_TO_LIVE + Duration::from_secs(1));
    counts.most();
    eventually_uses_all(&counts, 300, &format!("after a crash on {place}"));

    // The stopped processes go on. Their requests still run, and count again.
    for process in &processes[..2] {
        counts.go_on(process);
    }
    eventually_uses_all(&counts, 300, &format!("after a pause on {place}"));
    println!("{place}: the same after three have crashed, and two have paused");
}

impl Counts {
    fn lock(&self) -> MutexGuard<'_, Counted> {
        self.0.lock().unwrap()
    }

    fn in_use(&self) -> u32 {
        self.lock().in_use()
    }

    /// Returns the most slots that were in use since the last call.
    fn most(&self) -> u32 {
        std::mem::take(&mut self.lock().most)
    }

    fn stop(&self, process: &Process) {
        let mut counted = self.lock();
        let reports = counted.processes.entry(process.0.id()).or_default();
        *reports = Reports { in_use: 0, is_stopped: true, stops: reports.stops + 1 };
        drop(counted);
        signal(process, "STOP");
    }

    fn go_on(&self, process: &Process) {
        let mut counted = self.lock();
        let reports = counted.processes.entry(process.0.id()).or_default();
        // The process went on for a moment after the signal to stop. Its reports of that time are old.
        *reports = Reports { in_use: 0, is_stopped: false, stops: reports.stops + 1 };
        drop(counted);
        signal(process, "CONT");
    }

    /// Counts the requests of a task of a process, until the process ends.
    fn count(&self, mut stream: TcpStream) {
        let mut id = [0; 4];
        if stream.read_exact(&mut id).is_err() {
            return;
        }
        let id = u32::from_be_bytes(id);
        // The number of stops when the request of the task began, if it counts.
        let mut own = None;
        let (mut report, mut stops) = ([0], 0);
        while stream.read_exact(&mut report).is_ok() {
            let mut counted = self.lock();
            // A request that got its slot before a stop, and is reported after it, does not count.
            let is_old = stops != counted.stops(id);
            stops = counted.stops(id);
            if report == *b"+" {
                own = (!is_old).then(|| counted.begin(id)).flatten();
            } else {
                counted.end(id, own.take());
            }
            drop(counted);
            if stream.write_all(&report).is_err() {
                break;
            }
        }
        self.lock().end(id, own);
    }
}

impl Counted {
    fn in_use(&self) -> u32 {
        self.processes.values().map(|reports| reports.in_use).sum()
    }

    fn stops(&self, id: u32) -> u32 {
        self.processes.get(&id).map_or(0, |reports| reports.stops)
    }

    fn begin(&mut self, id: u32) -> Option<u32> {
        let reports = self.processes.entry(id).or_default();
        if reports.is_stopped {
            return None;
        }
        reports.in_use += 1;
        let stops = reports.stops;
        self.admitted += 1;
        self.most = self.most.max(self.in_use());
        Some(stops)
    }

    fn end(&mut self, id: u32, stops: Option<u32>) {
        let reports = self.processes.entry(id).or_default();
        if stops == Some(reports.stops) {
            reports.in_use -= 1;
        }
    }
}

fn listen(counts: &Arc<Counts>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, counts) = (listener.local_addr().unwrap(), Arc::clone(counts));
    thread::spawn(move || {
        for stream in listener.incoming() {
            let counts = Arc::clone(&counts);
            thread::spawn(move || counts.count(stream.unwrap()));
        }
    });
    address.to_string()
}

fn start(url: &str, parent: &str) -> Process {
    Process(Command::new(env::current_exe().unwrap()).env(URL, url).env(PARENT, parent).spawn().unwrap())
}

fn signal(process: &Process, signal: &str) {
    let id = process.0.id().to_string();
    assert!(Command::new("kill").args([&format!("-{signal}"), &id]).status().unwrap().success());
}

/// Waits for this number of admitted requests, and until all slots have been in use at once. Asserts that
/// no more were.
fn eventually_uses_all(counts: &Counts, requests: u32, what: &str) {
    let (goal, mut most) = (counts.lock().admitted + requests, 0);
    wait_until(what, || {
        most = most.max(counts.most());
        most >= SLOTS && counts.lock().admitted >= goal
    });
    assert_eq!(most, SLOTS, "{what}");
}

/// Runs as one of the eight processes: each task holds a slot again and again, for a few milliseconds.
#[tokio::main(flavor = "current_thread")]
async fn one_of_many(url: &str, parent: &str) {
    let storage: AnyStorage = format!("{url}?timeout=10s").parse().unwrap();
    storage.ready(EVENTUALLY).await.unwrap();
    let layer = InFlightLayer::new(SLOTS, Global::new()).time_to_live(TIME_TO_LIVE).storage(storage, OnError::Refuse);
    // The permit in the extensions of the response holds the slot until the response is dropped.
    let service = layer.layer(service_fn(async |request: Request<()>| {
        let mut response = Response::new(String::new());
        if let Some(permit) = request.extensions().get::<Permit>() {
            response.extensions_mut().insert(permit.clone());
        }
        Ok::<_, std::convert::Infallible>(response)
    }));
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let (service, mut numbers) = (service.clone(), Numbers((u64::from(std::process::id()) << 8) + task + 1));
        let mut parent = tokio::net::TcpStream::connect(parent).await.unwrap();
        tasks.spawn(async move {
            parent.write_all(&std::process::id().to_be_bytes()).await.unwrap();
            loop {
                let response = ask(&service, Request::new(())).await;
                if response.status() == 200 {
                    report(&mut parent, b'+').await;
                    sleep(Duration::from_millis(numbers.below(20))).await;
                    report(&mut parent, b'-').await;
                }
                // Refused requests come again so rarely that the processor has time for others.
                let pause = if response.status() == 200 { 5 } else { 40 };
                drop(response);
                sleep(Duration::from_millis(numbers.below(pause))).await;
            }
        });
    }
    tasks.join_all().await;
}

/// Reports an event to the parent, and waits for its answer. Ends the process when the parent has ended.
async fn report(parent: &mut tokio::net::TcpStream, event: u8) {
    let mut answer = [0];
    let sent = parent.write_all(&[event]).await.is_ok() && parent.read_exact(&mut answer).await.is_ok();
    if !sent {
        std::process::exit(0);
    }
}
