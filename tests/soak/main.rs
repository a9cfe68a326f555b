//! Pairs of servers on one Redis, asked by real clients, while that is killed, stopped, paused and
//! restarted at random: nobody waits beyond the deadline, nobody is left without an answer, no key
//! is admitted more often than the documentation of its mode says, and the memory of the servers is
//! flat.
//!
//! `scripts/soak 5m` does it for five minutes. Without a harness, as there is a table to print.

mod chaos;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use chaos::client::{Client, Seen};
use chaos::faults::{Faults, KINDS};
use chaos::memory::{Memory, resident};
use common::example_process::Server;
use common::random::Numbers;

/// Unless it is said.
const SHORT: &str = "6s";

/// What each key may have in a period, which is longer than any key is asked for.
const LIMIT: u32 = 40;
const PERIOD: &str = "20 seconds";

const REPLICAS: u32 = 2;
const CLIENTS: usize = 3;

/// The documented total of a key: with a fallback at most the limit once more.
const ONCE: Option<u32> = Some(LIMIT);
const TWICE: Option<u32> = Some(2 * LIMIT);

/// How servers meet an outage.
struct Mode {
    name: &'static str,
    strategy: &'static str,
    flags: &'static [&'static str],
    /// How often a key may be admitted by both servers together, if that is bounded.
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
    // A hit may wait for the answer that it came too late for, and for its own.
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
            "--deadline",
            "50ms",
        ],
        most: TWICE,
        has_fallback: true,
    },
];

/// Two servers in the same mode, and what their clients have seen.
struct Pair {
    mode: &'static Mode,
    servers: Vec<Server>,
    seen: Seen,
    memory: Memory,
}

impl Pair {
    fn start(mode: &'static Mode, redis: &str) -> Self {
        let policy = format!("\"{}\": {} {LIMIT}/{PERIOD}", mode.name, mode.strategy);
        let flags = ["--storage", redis, "--key", "header:x-key", "--policy", &policy];
        let flags: Vec<&str> = flags.into_iter().chain(mode.flags.iter().copied()).collect();
        let servers = (0..REPLICAS).map(|_| Server::start_with(&flags, std::process::Stdio::null())).collect();
        Self { mode, servers, seen: Seen::default(), memory: Memory::default() }
    }

    fn resident(&self) -> u64 {
        self.servers.iter().map(|server| resident(server.child.id())).sum()
    }
}

fn main() {
    let length = length();
    let seed = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    println!("{length:?}, seed {seed}");
    // What has been answered is in the file: who is killed loses nothing that was told.
    let redis = common::servers::Server::start(&["--appendonly", "yes", "--appendfsync", "no"]);
    let mut pairs = MODES.each_ref().map(|mode| Pair::start(mode, &redis.url()));
    let (begun, over) = (Instant::now(), Arc::new(AtomicBool::new(false)));
    let clients = pairs.iter().map(|pair| {
        let addresses = pair.servers.iter().flat_map(|server| [server.address(); CLIENTS]);
        let clients = addresses.enumerate().map(|(number, address)| {
            let (mut client, over) = (Client::new(address, LIMIT / REPLICAS, begun, number), Arc::clone(&over));
            thread::spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    client.ask();
                }
                client.seen
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
            pair.seen.add(client.join().expect("a client does not panic"));
        }
    }
    let happened = KINDS.iter().zip(faults.happened).map(|(kind, times)| format!("{kind:?} {times}"));
    println!("{}", happened.collect::<Vec<_>>().join(", "));
    table(&pairs);
    pairs.iter().for_each(judge);
    println!("all of it within what is documented");
}

/// How long, as `--for 5m` says.
fn length() -> Duration {
    let said = std::env::args().skip_while(|argument| argument != "--for").nth(1);
    let said = said.as_deref().unwrap_or(SHORT);
    let (number, unit) = said.split_at(said.len().saturating_sub(1));
    let unit = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3_600,
        _ => 0,
    };
    match number.parse() {
        Ok(number @ 1..) if unit > 0 => Duration::from_secs(number * unit),
        _ => panic!("cannot read {said:?}: write for how long, for example 90s or 5m"),
    }
}

fn table(pairs: &[Pair]) {
    println!(
        "{:<16} {:>9} {:>9} {:>9} {:>9} {:>7} {:>5} {:>9} {:>12} {:>16}",
        "mode", "requests", "admitted", "fallback", "refused", "503", "lost", "slowest", "of one key", "memory, KiB"
    );
    for Pair { mode, seen, memory, .. } in pairs {
        let most = mode.most.map_or("any".to_owned(), |most| most.to_string());
        println!(
            "{:<16} {:>9} {:>9} {:>9} {:>9} {:>7} {:>5} {:>6} ms {:>12} {:>16}",
            mode.name,
            seen.requests,
            seen.admitted(),
            seen.by_fallback,
            seen.refused,
            seen.unavailable,
            seen.lost,
            seen.slowest.as_millis(),
            format!("{} of {most}", seen.most()),
            format!("{} -> {}", memory.early(), memory.late()),
        );
    }
}

fn judge(pair: &Pair) {
    let Pair { mode, seen, memory, .. } = pair;
    let name = mode.name;
    assert_eq!(seen.lost, 0, "{name}: each request has one answer");
    assert_eq!(seen.late, 0, "{name}: nobody waits beyond the deadline; the slowest took {:?}", seen.slowest);
    assert!(seen.most() <= mode.most.unwrap_or(u32::MAX), "{name}: {} of {:?}", seen.most(), mode.most);
    assert!(seen.most() >= LIMIT, "{name}: the limit was reached, or nothing was tried: {}", seen.most());
    assert_eq!(seen.by_fallback > 0, mode.has_fallback, "{name}: {} by a fallback", seen.by_fallback);
    assert_eq!(seen.unavailable > 0, name == "refuse", "{name}: {} times 503", seen.unavailable);
    assert!(memory.is_flat(), "{name}: {memory:?}");
}
