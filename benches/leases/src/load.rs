//! Measures leases of each strategy on one hot key, beside another crate's local cache.

use std::hint::black_box;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::cmd;
use tower_ratelimit::storage::{Leases, StorageRequest};
use tower_ratelimit::{Key, MemoryStorage, Op, Storage};
use trypema::hybrid::HybridRateLimiterProvider;
use trypema::redis::RedisKey;
use trypema::{RateLimit, RateLimiterBuilder};

use crate::fleets::Promise;
use crate::process::{HALF, PEER, PROCESSES, TIME, policy};
use crate::server::{self, Server};

/// A limit that is never reached.
const PLENTY: u32 = 2_000_000_000;

/// The number of local hits that are timed.
const HITS: u32 = 1_000_000;

const LIMITERS: [&str; 8] = [
    "fixed-window",
    "fixed-window-aligned",
    "calendar",
    "moving-window",
    "sliding-window-counter",
    "sliding-window-counter-aligned",
    "token-bucket",
    PEER,
];

#[tokio::main(flavor = "current_thread")]
pub(crate) async fn print() {
    println!("8 processes with 8 tasks each hit one key on one Redis for {TIME:?}.");
    println!("plenty: a limit that is never reached. half: {HALF} units in 2 s, about half of the hits.\n");
    println!(
        "| limiter | ns per local hit | plenty: hits/s | calls per 100 hits | half: most in 1.9 s | promised for 2 s | beyond the promise |"
    );
    println!("|---|---|---|---|---|---|---|");
    for limiter in LIMITERS {
        let server = Server::start();
        let mut connection = server.connect().await;
        let local = if limiter == PEER { peer_nanos(&server).await } else { nanos(limiter).await };
        server::reset_statistics(&mut connection).await;
        let (hits, _) = load(&server, limiter, PLENTY);
        let calls = scripts(&mut connection).await;
        let (_, times) = load(&server, limiter, HALF);
        let most = most_together(times);
        // The peer's window moves, too. A lease of these limits lasts 0.1 s.
        let strategy = if limiter == PEER { "moving-window" } else { limiter };
        let promised = Promise::of(&policy(strategy, HALF).limits()[0]).units(1_999_999);
        let over = most.saturating_sub(promised) as f64 * 100.0 / promised as f64;
        let per_second = hits as f64 / TIME.as_secs_f64();
        let trips = calls as f64 * 100.0 / hits as f64;
        println!("| {limiter} | {local:.0} | {per_second:.0} | {trips:.3} | {most} | {promised} | {over:.1} % |");
    }
}

/// Returns the nanoseconds of a hit that a lease admits.
async fn nanos(strategy: &str) -> f64 {
    let leases = Leases::new(MemoryStorage::new(), u32::MAX).ttl(Duration::from_secs(60));
    let (policy, key) =
        (format!("{strategy} 4000000000/{}", if strategy == "calendar" { "day" } else { "hour" }), Key::global());
    let policy = policy.parse().expect("the policy is valid");
    let request = StorageRequest::new(&policy, &key, Op::Hit, 1);
    while leases.local_decisions() == 0 {
        drop(leases.decide(request).await);
    }
    let begin = Instant::now();
    let local = (0..HITS).filter(|_| leases.try_admit(black_box(request), None)).count();
    assert!(local > HITS as usize / 2, "only {local} hits were local");
    begin.elapsed().as_nanos() as f64 / f64::from(HITS)
}

/// Returns the nanoseconds of a hit that the other crate admits locally.
async fn peer_nanos(server: &Server) -> f64 {
    let client = redis::Client::open(server.url()).expect("the URL is valid");
    let connection = trypema::redis::ConnectionManager::new(client).await.expect("the server works");
    let provider = HybridRateLimiterProvider::builder(connection).build().expect("the configuration is valid");
    let (key, rate) =
        (RedisKey::try_from("local".to_owned()).expect("the key is valid"), RateLimit::per_second_or_panic(1e9));
    let _ = provider.absolute().inc(&key, &rate, 1).await.expect("the server works");
    let begin = Instant::now();
    let hit = || provider.absolute().try_inc(black_box(key.as_key_ref()), 1).expect("the state is valid");
    let local = (0..HITS).filter(|_| hit().is_some()).count();
    assert!(local > HITS as usize / 2, "only {local} hits were local");
    begin.elapsed().as_nanos() as f64 / f64::from(HITS)
}

/// Runs eight processes. Returns the number of admitted hits, and their times in microseconds.
fn load(server: &Server, limiter: &str, limit: u32) -> (u64, Vec<u64>) {
    let mut processes: Vec<(Child, BufReader<ChildStdout>)> = (0..PROCESSES)
        .map(|_| {
            let program = std::env::current_exe().expect("this program has a path");
            let mut command = Command::new(program);
            command.args(["process", &server.url(), limiter, &limit.to_string()]);
            let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("this program starts");
            let output = BufReader::new(child.stdout.take().expect("it is piped"));
            (child, output)
        })
        .collect();
    for (_, output) in &mut processes {
        output.read_line(&mut String::new()).expect("the process connects");
    }
    for (child, _) in &mut processes {
        child.stdin.as_mut().expect("it is piped").write_all(b"go\n").expect("the process reads");
    }
    let (mut hits, mut times) = (0, Vec::new());
    for (mut child, mut output) in processes {
        let mut text = String::new();
        output.read_to_string(&mut text).expect("the process writes text");
        let mut numbers = text.lines().map(|line| line.parse::<u64>().expect("it is a number"));
        hits += numbers.next().expect("the process prints its hits");
        times.extend(numbers);
        assert!(child.wait().expect("the process ends").success());
    }
    (hits, times)
}

/// Returns the most hits in any 1.9 seconds.
fn most_together(mut times: Vec<u64>) -> u64 {
    times.sort_unstable();
    let (mut first, mut most) = (0, 0);
    for (last, at) in times.iter().enumerate() {
        while times[first] + 1_900_000 <= *at {
            first += 1;
        }
        most = most.max(last - first + 1);
    }
    most as u64
}

/// Returns the number of scripts that the server has run.
async fn scripts(connection: &mut MultiplexedConnection) -> u64 {
    let text: String =
        cmd("INFO").arg("commandstats").query_async(connection).await.expect("the server has statistics");
    let calls = |line: &str| line.split_once("calls=")?.1.split(',').next()?.parse::<u64>().ok();
    let lines = text.lines().filter(|line| line.starts_with("cmdstat_eval"));
    lines.filter_map(calls).sum()
}
