//! Eight processes with separate connections hit one key. Together they are admitted exactly up to
//! the limit, on every shared storage. When they settle hits with random costs, the final count is
//! exactly the sum of the costs. A lockout stays locked when the server is restarted. With leases,
//! they are never admitted more often, also if some of them are killed or suspended, and a process
//! that closes its leases loses no unit. Of several keys, each one has spent exactly the units of its
//! admitted hits, and refused hits have spent nothing of any key.
//!
//! The test runs without the test harness, because each of the eight processes runs this program.

use std::env;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::Duration;

use common::foreign;
use common::random::Numbers;
use common::servers::{Cluster, Etcd, Memcached, Postgres, Server};
use common::time::EVENTUALLY;
use tokio::task::JoinSet;
use tower_ratelimit::storage::{AnyStorage, Leases, StorageRequest};
use tower_ratelimit::{Decision, Key, Op, Policy, RateLimiter, Storage};

/// The environment variables that make this process one of the eight: the URL and the policy.
const URL: &str = "TOWER_RATELIMIT_PROCESS_URL";
const POLICY: &str = "TOWER_RATELIMIT_PROCESS_POLICY";

const PROCESSES: usize = 8;
const TASKS: usize = 4;
const LIMIT: u32 = 500;

/// The value of [`POLICY`] for processes that settle hits.
const SETTLE: &str = "settle";
/// The number of hits that all processes settle together.
const SETTLED: usize = 10_000;
/// The number of tasks per process that settle hits.
const SETTLERS: usize = 5;
/// The limit of the settled hits, which is never reached.
const PLENTY: u32 = 1_000_000;
/// The keys of the settled hits.
const KEYS: u64 = 8;

/// The value of [`POLICY`] for a lockout, whose lock lasts longer than the test.
const LOCKOUT: &str = "lockout";

/// The prefix of [`POLICY`] for processes with leases.
const LEASED: &str = "leased ";
/// The number of units of a slice.
const SLICE: u32 = 16;
/// The number of processes that are killed or suspended while they hold leases.
const INTERRUPTED: usize = 2;
/// The time for which they are suspended at least. Their leases end after a second.
const SUSPENDED: Duration = Duration::from_secs(2);

/// The value of [`POLICY`] for hits of users, which spend from their tenant and from all users, too.
const MEMBERS: &str = "members";
/// The number of users, of which each second one has the same tenant.
const USERS: usize = 4;
/// The number of refused hits that must not change a count.
const REFUSED: usize = 10_000;

/// The value of [`POLICY`] for a custom strategy, which Redis runs by compare-and-swap.
const FOREIGN: &str = "foreign";

/// An interruption of some processes with leases, after their first hits.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    Killed,
    /// Suspended (SIGSTOP), and resumed when the others have ended.
    Suspended,
}

fn main() {
    if let (Ok(url), Ok(policy)) = (env::var(URL), env::var(POLICY)) {
        return one_of_many(&url, &policy);
    }
    let (mut server, cluster) = (Server::start(&["--appendonly", "yes"]), Cluster::start());
    let (memcached, another) = (Memcached::start(&[]), Memcached::start(&[]));
    let (mut etcd, etcds) = (Etcd::start(1), Etcd::calm());
    let mut postgres = Postgres::start(&[]);
    let file = std::env::temp_dir().join(format!("tower-ratelimit-processes-{}.db", std::process::id()));
    let two = format!("{},127.0.0.1:{}", memcached.url(), another.port());
    for (place, url) in [
        ("one server", server.url()),
        ("a cluster", cluster.url()),
        ("memcached", memcached.url()),
        ("two memcacheds", format!("{two}?prefix=two")),
        ("etcd", etcd.url()),
        ("three members of etcd", etcds.url()),
        ("PostgreSQL", postgres.url()),
        ("SQLite", format!("sqlite:{}", file.display())),
    ] {
        for strategy in ["fixed-window", "token-bucket", "moving-window", LOCKOUT, FOREIGN] {
            let many: Vec<Process> = (0..PROCESSES).map(|_| Process::start(&url, strategy)).collect();
            let admitted: Vec<u32> = together(many);
            println!("{strategy} on {place}: {admitted:?} admitted");
            assert_eq!(admitted.iter().sum::<u32>(), LIMIT, "{strategy} on {place}");
        }
    }
    let sqlite = format!("sqlite:{}", file.display());
    let restarted: [(&str, String, &mut dyn FnMut()); 4] = [
        ("one server", server.url(), &mut || server.restart()),
        ("etcd", etcd.url(), &mut || etcd.members[0].restart()),
        ("PostgreSQL", postgres.url(), &mut || postgres.restart()),
        ("SQLite", sqlite, &mut || ()),
    ];
    for (place, url, restart) in restarted {
        restart();
        let many: Vec<Process> = (0..PROCESSES).map(|_| Process::start(&url, LOCKOUT)).collect();
        let admitted: Vec<u32> = together(many);
        println!("lockout on {place}, restarted: {admitted:?} admitted");
        assert_eq!(admitted.iter().sum::<u32>(), 0, "{place} has forgotten the lock");
    }
    let third = Memcached::start(&[]);
    let three = format!("{two},127.0.0.1:{}?prefix=settle", third.port());
    for (place, url) in [("one server", server.url()), ("three memcacheds", three)] {
        let many: Vec<Process> = (0..PROCESSES).map(|_| Process::start(&url, SETTLE)).collect();
        let spent: Vec<u32> = together(many);
        let counted = units_counted(&url);
        println!("{SETTLED} settled hits on {place}: {spent:?} spent, {counted} counted");
        assert_eq!(spent.iter().sum::<u32>(), counted, "settled hits on {place}");
    }
    for (place, url) in [("one server", server.url()), ("PostgreSQL", postgres.url())] {
        for strategy in ["fixed-window", "moving-window"] {
            for fault in [Fault::None, Fault::Killed, Fault::Suspended] {
                lease(place, &format!("{url}{}prefix=leased-{fault:?}", separator(&url)), strategy, fault);
            }
        }
    }
    for (place, url) in [
        ("one server", server.url()),
        ("etcd", etcd.url()),
        ("PostgreSQL", postgres.url()),
        ("SQLite", format!("sqlite:{}", file.display())),
    ] {
        let many: Vec<Process> = (0..PROCESSES).map(|_| Process::start(&url, MEMBERS)).collect();
        let (printed, mut admitted) = (printed_together(many), [0; USERS]);
        println!("several keys on {place}: {printed:?} admitted of each user");
        for hits in printed {
            for (admitted, hits) in admitted.iter_mut().zip(hits.split(' ')) {
                *admitted += hits.parse::<u32>().unwrap();
            }
        }
        assert_eq!(admitted.iter().sum::<u32>(), LIMIT, "several keys on {place}");
        assert_members_have_spent(&url, admitted);
    }
    for end in ["", "-wal", "-shm", "-reserve"] {
        let _ = std::fs::remove_file(format!("{}{end}", file.display()));
    }
}

/// Hits in eight processes with leases.
fn lease(place: &str, url: &str, strategy: &str, fault: Fault) {
    let policy = format!("{LEASED}{strategy}");
    let mut others: Vec<Process> = (0..PROCESSES).map(|_| Process::start(url, &policy)).collect();
    begin(&mut others);
    let interrupted = if fault == Fault::None { Vec::new() } else { others.split_off(PROCESSES - INTERRUPTED) };
    let (mut spent, mut suspended) = (0, Vec::new());
    for mut process in interrupted {
        spent += process.reads_admitted().take(3).count();
        if fault == Fault::Killed {
            process.child.kill().unwrap();
            spent += process.reads_admitted().count();
        } else {
            process.signal("STOP");
            suspended.push(process);
        }
    }
    let admitted: Vec<usize> = others.into_iter().map(Process::admitted).collect();
    if fault == Fault::Suspended {
        thread::sleep(SUSPENDED);
    }
    for process in &suspended {
        process.signal("CONT");
    }
    spent += admitted.iter().sum::<usize>() + suspended.into_iter().map(Process::admitted).sum::<usize>();
    let (spent, counted) = (u32::try_from(spent).unwrap(), LIMIT - remaining(url, &policy));
    println!("leased {strategy} on {place}, {fault:?}: {admitted:?}, {spent} spent, {counted} counted");
    assert!(spent <= counted, "{spent} spent, {counted} counted");
    // A killed process loses its lease, and the hits that it has not printed.
    let lost = (SLICE + u32::try_from(TASKS).unwrap()) * u32::try_from(INTERRUPTED).unwrap();
    let lost = if fault == Fault::Killed { lost } else { 0 };
    assert!(counted <= spent + lost, "{spent} spent, {counted} counted");
}

#[tokio::main(flavor = "current_thread")]
async fn remaining(url: &str, policy: &str) -> u32 {
    connected(url, policy).await.peek(&Key::global()).await.unwrap().remaining()
}

/// Returns the units that are counted for all keys of the settled hits.
#[tokio::main(flavor = "current_thread")]
async fn units_counted(url: &str) -> u32 {
    let (limiter, mut counted) = (connected(url, SETTLE).await, 0);
    for key in 0..KEYS {
        counted += PLENTY - limiter.peek(&key.into()).await.unwrap().remaining();
    }
    counted
}

/// The policies of users, tenants and all, of which the last one is the tightest.
fn members() -> [Policy; 3] {
    let limits = [("user", 2 * LIMIT / 5), ("tenant", 7 * LIMIT / 10), ("all", LIMIT)];
    limits.map(|(name, limit)| format!("fixed-window {limit}/day").parse::<Policy>().unwrap().with_name(name))
}

/// The keys of a user, its tenant and all users.
fn keys_of(user: usize) -> [Key; 3] {
    [Key::from(user as u64), Key::from(user as u64 % 2), Key::global()]
}

/// Hits once for a user, its tenant and all users.
async fn is_admitted(storage: &AnyStorage, policies: &[Policy; 3], user: usize) -> bool {
    let keys = keys_of(user);
    let members = [0, 1, 2].map(|at| StorageRequest::new(&policies[at], &keys[at], Op::Hit, 1));
    loop {
        let decisions = storage.decide_all(&members).await.unwrap();
        if !decisions.iter().any(Decision::is_contended) {
            return decisions.iter().all(Decision::is_admitted);
        }
    }
}

/// Asserts that the users have spent these units, and the tenants and all users the sums of them, also
/// after refused hits.
#[tokio::main(flavor = "current_thread")]
async fn assert_members_have_spent(url: &str, [first, second, third, fourth]: [u32; USERS]) {
    let (limiter, policies) = (connected(url, MEMBERS).await, members());
    let storage = limiter.storage();
    // Of a user, its tenant and all users.
    let spent = async |user: usize| {
        let (keys, mut spent) = (keys_of(user), [0; 3]);
        for ((policy, key), spent) in policies.iter().zip(&keys).zip(&mut spent) {
            let peek = storage.decide(StorageRequest::new(policy, key, Op::Peek, 0)).await.unwrap();
            *spent = peek.capacity() - peek.remaining();
        }
        spent
    };
    let tenants = [first + third, second + fourth];
    for refused in [0, REFUSED] {
        for number in 0..refused {
            assert!(!is_admitted(storage, &policies, number % USERS).await);
        }
        for (user, admitted) in [first, second, third, fourth].into_iter().enumerate() {
            let expected = [admitted, tenants[user % 2], LIMIT];
            assert_eq!(spent(user).await, expected, "user {user} after {refused} refused hits");
        }
    }
}

/// One of the eight processes.
struct Process {
    child: Child,
    stdout: BufReader<ChildStdout>,
}

impl Process {
    fn start(url: &str, policy: &str) -> Self {
        let mut command = Command::new(env::current_exe().unwrap());
        command.env(URL, url).env(POLICY, policy).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self { child, stdout }
    }

    /// Waits until the process has ended. Returns the number of its admitted hits that were not read.
    fn admitted(mut self) -> usize {
        let admitted = self.reads_admitted().count();
        assert!(self.child.wait().unwrap().success());
        admitted
    }

    fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args([&format!("-{name}"), &id]).status().unwrap().success());
    }

    /// Reads a line for each admitted hit, until the process ends.
    fn reads_admitted(&mut self) -> impl Iterator<Item = String> {
        (&mut self.stdout).lines().map(Result::unwrap)
    }
}

/// Starts all processes at the same time, after they have connected.
fn begin(many: &mut [Process]) {
    for process in &mut *many {
        let mut line = String::new();
        process.stdout.read_line(&mut line).unwrap();
        assert_eq!(line, "connected\n");
    }
    for process in many {
        process.child.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
    }
}

/// Starts all processes at the same time. Returns the number that each of them prints.
fn together(many: Vec<Process>) -> Vec<u32> {
    printed_together(many).iter().map(|printed| printed.parse().unwrap()).collect()
}

/// Starts all processes at the same time. Returns the line that each of them prints.
fn printed_together(mut many: Vec<Process>) -> Vec<String> {
    begin(&mut many);
    let ended = many.into_iter().map(|mut process| {
        let mut printed = String::new();
        process.stdout.read_to_string(&mut printed).unwrap();
        assert!(process.child.wait().unwrap().success());
        printed.trim().to_owned()
    });
    ended.collect()
}

/// Returns a limiter whose storage is connected. On a busy machine, connecting takes several attempts, and
/// a server that was restarted may still load its data.
async fn connected(url: &str, policy: &str) -> RateLimiter {
    let limiter = limiter(url, policy);
    limiter.storage().ready(EVENTUALLY).await.unwrap();
    limiter
}

fn limiter(url: &str, policy: &str) -> RateLimiter {
    let policy = match policy {
        FOREIGN => foreign(LIMIT),
        LOCKOUT => format!("lockout {LIMIT}/day for 1 day").parse().unwrap(),
        // Its hits use only the storage.
        MEMBERS => members()[0].clone(),
        SETTLE => format!("fixed-window {PLENTY}/365 days").parse().unwrap(),
        strategy => format!("{} {LIMIT}/day", strategy.trim_start_matches(LEASED)).parse().unwrap(),
    };
    RateLimiter::with_storage(policy, storage(url))
}

fn storage(url: &str) -> AnyStorage {
    format!("{url}{}timeout=10s", separator(url)).parse().unwrap()
}

fn separator(url: &str) -> char {
    if url.contains('?') { '&' } else { '?' }
}

/// Runs as one of the eight processes: hits until it is refused, or settles its part of the hits,
/// in several tasks on one connection.
#[tokio::main(flavor = "current_thread")]
async fn one_of_many(url: &str, policy: &str) {
    let limiter = connected(url, policy).await;
    println!("connected");
    let mut line = String::new();
    io::stdin().read_line(&mut line).unwrap();
    assert_eq!(line, "go\n");
    if policy.starts_with(LEASED) {
        return hit_with_leases(&limiter).await;
    }
    if policy == MEMBERS {
        return hit_members(limiter.storage()).await;
    }
    let mut tasks = JoinSet::new();
    for task in 0..if policy == SETTLE { SETTLERS } else { TASKS } {
        let limiter = limiter.clone();
        if policy == SETTLE {
            tasks.spawn(settle_hits(limiter, Numbers(u64::from(std::process::id()) << 8 | task as u64)));
            continue;
        }
        tasks.spawn(async move {
            let mut admitted = 0;
            loop {
                let decision = limiter.hit(&Key::global()).await.unwrap();
                if decision.is_refused() && !decision.is_contended() {
                    return admitted;
                }
                admitted += u32::from(decision.is_admitted());
            }
        });
    }
    println!("{}", tasks.join_all().await.into_iter().sum::<u32>());
}

/// Hits for each user until a hit is refused, and prints the number of admitted hits of each.
async fn hit_members(storage: &AnyStorage) {
    let policies = members();
    let hit = async |user| {
        let mut admitted = 0;
        while is_admitted(storage, &policies, user).await {
            admitted += 1;
        }
        admitted
    };
    let (a, b, c, d): (u32, u32, u32, u32) = tokio::join!(hit(0), hit(1), hit(2), hit(3));
    println!("{a} {b} {c} {d}");
}

/// Hits with leases until the storage refuses, and prints a line for each admitted hit.
async fn hit_with_leases(limiter: &RateLimiter) {
    let leases = Leases::new(limiter.storage().clone(), SLICE);
    let mut tasks = JoinSet::new();
    for _ in 0..TASKS {
        let limiter = RateLimiter::with_storage(limiter.policy(), leases.clone());
        tasks.spawn(async move {
            while limiter.hit(&Key::global()).await.unwrap().is_admitted() {
                println!("admitted");
            }
        });
    }
    tasks.join_all().await;
    leases.close().await.unwrap();
}

/// Settles the hits of one task. Returns the sum of their actual costs.
async fn settle_hits(limiter: RateLimiter, mut numbers: Numbers) -> u32 {
    let mut spent = 0;
    for _ in 0..SETTLED / PROCESSES / SETTLERS {
        let key = Key::from(numbers.below(KEYS));
        let hit = loop {
            let decision = limiter.hit_with_cost(&key, 10).await.unwrap();
            if !decision.is_contended() {
                break decision;
            }
        };
        assert!(hit.is_admitted());
        let actual = u32::try_from(numbers.below(31)).unwrap();
        while let Err(error) = limiter.storage().settle(&limiter.policy(), &key, &hit, actual).await {
            // Nothing was changed.
            assert!(error.to_string().contains("changed the key before every swap"), "{error}");
        }
        spent += actual;
    }
    spent
}
