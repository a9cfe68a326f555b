//! Pairs of example servers share one Redis, which is killed, terminated, suspended and restarted
//! at random.
//!
//! The test asserts that no response is late or missing, that no key is admitted more often than
//! documented for the mode, and that the memory of the servers does not grow.
//!
//! `scripts/soak 5m` runs the test for five minutes. It has no test harness, because it prints a
//! table.

mod chaos;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use chaos::client::{Client, Responses};
use chaos::faults::{Faults, KINDS};
use chaos::memory::{Memory, resident};
use common::example_process::Server;
use common::random::Numbers;

/// The default duration.
const DEFAULT_LENGTH: &str = "6s";

/// The limit of each key. Its period is longer than the time for which a key is used.
const LIMIT: u32 = 40;
const PERIOD: &str = "20 seconds";

const REPLICAS: u32 = 2;
const CLIENTS: usize = 3;

/// The documented bound of a key. A fallback may admit the limit once more.
const ONCE: Option<u32> = Some(LIMIT);
const TWICE: Option<u32> = Some(2 * LIMIT);

/// A configuration of the servers for outages.
struct Mode {
    name: &'static str,
    strategy: &'static str,
    flags: &'static [&'static str],
    /// The bound for a key on both servers together, if there is one.
    most: Option<u32>,
    has_fallback: bool,
}

const MODES: [Mode; 4] = [
    Mode {
        name: "refuse",
        strategy: "elastic-window",
        flags: &["--on-error", "refuse"],
        most: ONCE,
        has_fallback: false,
    },
    Mode {
        name: "admit",
        strategy: "sliding-window-counter",
        flags: &["--on-error", "admit"],
        most: None,
        has_fallback: false,
    },
    Mode {
        name: "fallback",
        strategy: "moving-window",
        flags: &["--on-error", "refuse", "--fallback", "memory", "--replicas", "2"],
        most: TWICE,
        has_fallback: true,
    },
    // The deadline is half as long, because a hit may wait for two requests to the storage: the
    // previous one and its own.
    Mode {
        name: "..cache, leases",
        strategy: "fixed-window",
        flags: &[
            "--on-error",
            "refuse",
            "--fallback",
            "memory",
            "--replicas",
            "2",
            "--deny-cache",
            "--lease",
            "10",
            "--timeout",
            "50ms",
        ],
        most: TWICE,
        has_fallback: true,
    },
];

/// Two servers in the same mode, and the responses of their clients.
struct Pair {
    mode: &'static Mode,
    servers: Vec<Server>,
    responses: Responses,
    memory: Memory,
}

impl Pair {
    fn start(mode: &'static Mode, redis: &str) -> Self {
        let policy = format!("\"{}\": {} {LIMIT}/{PERIOD}", mode.name, mode.strategy);
        let flags = ["--storage", redis, "--key", "header:x-key", "--policy", &policy];
        let flags: Vec<&str> = flags.into_iter().chain(mode.flags.iter().copied()).collect();
        let servers = (0..REPLICAS).map(|_| Server::start_with(&flags, std::process::Stdio::null())).collect();
        Self { mode, servers, responses: Responses::default(), memory: Memory::default() }
    }

    fn resident(&self) -> u64 {
        self.servers.iter().map(|server| resident(server.child.id())).sum()
    }
}

fn main() {
    let length = length();
    let seed = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    println!("{length:?}, seed {seed}");
    // With the append-only file, a killed server loses no acknowledged write.
    let redis = common::servers::Server::start(&["--appendonly", "yes", "--appendfsync", "no"]);
    let mut pairs = MODES.each_ref().map(|mode| Pair::start(mode, &redis.url()));
    let (begun, over) = (Instant::now(), Arc::new(AtomicBool::new(false)));
    let clients = pairs.iter().map(|pair| {
        let addresses = pair.servers.iter().flat_map(|server| [server.address(); CLIENTS]);
        let clients = addresses.enumerate().map(|(number, address)| {
            let (mut client, over) = (Client::new(address, LIMIT / REPLICAS, begun, number), Arc::clone(&over));
            thread::spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    client.send();
                }
                client.responses
            })
        });
        clients.collect::<Vec<_>>()
    });
    let clients: Vec<_> = clients.collect();

    let mut faults = Faults::new(redis, Numbers(seed | 1));
    while begun.elapsed() < length || faults.happened.contains(&0) {
        faults.next();
        for pair in &mut pairs {
            pair.memory.note(begun.elapsed(), pair.resident());
        }
    }
    over.store(true, Ordering::Relaxed);
    for (pair, clients) in pairs.iter_mut().zip(clients) {
        for client in clients {
            pair.responses.add(client.join().expect("a client does not panic"));
        }
    }
    let happened = KINDS.iter().zip(faults.happened).map(|(kind, times)| format!("{kind:?} {times}"));
    println!("{}", happened.collect::<Vec<_>>().join(", "));
    table(&pairs);
    pairs.iter().for_each(check);
    println!("all results are within the documented bounds");
}

/// Parses the duration, for example `--for 5m`.
fn length() -> Duration {
    let text = std::env::args().skip_while(|argument| argument != "--for").nth(1);
    let text = text.as_deref().unwrap_or(DEFAULT_LENGTH);
    let (number, unit) = text.split_at(text.len().saturating_sub(1));
    let unit = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3_600,
        _ => 0,
    };
    match number.parse() {
        Ok(number @ 1..) if unit > 0 => Duration::from_secs(number * unit),
        _ => panic!("cannot read {text:?}: write a duration, for example 90s or 5m"),
    }
}

fn table(pairs: &[Pair]) {
    println!(
        "{:<16} {:>9} {:>9} {:>9} {:>9} {:>7} {:>5} {:>9} {:>12} {:>16}",
        "mode", "requests", "admitted", "fallback", "refused", "503", "lost", "slowest", "of one key", "memory, KiB"
    );
    for Pair { mode, responses, memory, .. } in pairs {
        let most = mode.most.map_or("any".to_owned(), |most| most.to_string());
        println!(
            "{:<16} {:>9} {:>9} {:>9} {:>9} {:>7} {:>5} {:>6} ms {:>12} {:>16}",
            mode.name,
            responses.requests,
            responses.admitted(),
            responses.by_fallback,
            responses.refused,
            responses.unavailable,
            responses.lost,
            responses.slowest.as_millis(),
            format!("{} of {most}", responses.most()),
            format!("{} -> {}", memory.early(), memory.late()),
        );
    }
}

fn check(pair: &Pair) {
    let Pair { mode, responses, memory, .. } = pair;
    let name = mode.name;
    assert_eq!(responses.lost, 0, "{name}: requests without a response");
    assert_eq!(responses.late, 0, "{name}: late responses; the slowest took {:?}", responses.slowest);
    assert!(responses.most() <= mode.most.unwrap_or(u32::MAX), "{name}: {} of {:?}", responses.most(), mode.most);
    assert!(responses.most() >= LIMIT, "{name}: the limit was not reached: {}", responses.most());
    assert_eq!(responses.by_fallback > 0, mode.has_fallback, "{name}: {} by a fallback", responses.by_fallback);
    assert_eq!(responses.unavailable > 0, name == "refuse", "{name}: {} times 503", responses.unavailable);
    assert!(memory.is_flat(), "{name}: {memory:?}");
}
