//! Compares decisions on a Redis server with plain scripts: calls per second, and server time per
//! call. With arguments, only measures the rows whose name contains one of them.

mod server;

use std::future::Future;
use std::pin::Pin;
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{Script, cmd};
use server::Server;
use tower_ratelimit::storage::{ManualClock, RedisStorage, StorageRequest};
use tower_ratelimit::{Key, Op, Policy, Storage};

/// The numbers of calls in flight.
const IN_FLIGHT: [usize; 4] = [1, 16, 64, 256];
/// The number of rounds. The best one counts, because other load on the machine can only slow a
/// round.
const ROUNDS: usize = 3;
const SPAN: Duration = Duration::from_millis(200);
/// A limit that is never exhausted.
const PLENTY: u32 = 4_000_000;

type Call = Pin<Box<dyn Future<Output = ()>>>;

struct Row {
    name: String,
    command: &'static str,
    call: Box<dyn Fn() -> Call>,
    rates: [f64; IN_FLIGHT.len()],
    /// The server time per call in microseconds, as the statistics of the server count it: with one
    /// call in flight, and with 64.
    micros: [f64; 2],
    /// The processor time per call in microseconds, of this process and of the server.
    processor: [f64; 2],
}

impl Row {
    fn new(name: &str, command: &'static str, call: impl Fn() -> Call + 'static) -> Self {
        Self {
            name: name.to_owned(),
            command,
            call: Box::new(call),
            rates: [0.0; IN_FLIGHT.len()],
            micros: [f64::INFINITY; 2],
            processor: [f64::INFINITY; 2],
        }
    }

    async fn measure(&mut self, server: &Server, connection: &mut MultiplexedConnection) {
        (self.call)().await; // loads the script
        for (rate, in_flight) in self.rates.iter_mut().zip(IN_FLIGHT) {
            server::reset_statistics(connection).await;
            let before = server.processor_times();
            let (calls, span) = calls(&self.call, in_flight).await;
            *rate = rate.max(calls / span.as_secs_f64());
            let [alone, combined] = &mut self.micros;
            if in_flight == 1 {
                *alone = alone.min(server::micros_of(self.command, connection).await / calls);
            }
            if in_flight == 64 {
                let after = server.processor_times();
                for ((least, after), before) in self.processor.iter_mut().zip(after).zip(before) {
                    *least = least.min((after - before) / calls);
                }
                *combined = combined.min(server::micros_of(self.command, connection).await / calls);
            }
        }
    }
}

/// Calls from one thread, so that two cores are enough. Returns the number of calls and their time.
async fn calls(call: &dyn Fn() -> Call, in_flight: usize) -> (f64, Duration) {
    let start = Instant::now();
    let mut calls = 0;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..in_flight {
        tasks.spawn_local(call());
    }
    while tasks.join_next().await.is_some() {
        calls += 1;
        if start.elapsed() < SPAN {
            tasks.spawn_local(call());
        }
    }
    (f64::from(calls), start.elapsed())
}

fn plain(name: &str, connection: &MultiplexedConnection, text: &'static str, arguments: [u64; 2]) -> Row {
    let (connection, hash) = (connection.clone(), Script::new(text).get_hash().to_owned());
    let key = format!("plain {name}");
    Row::new(name, "evalsha", move || {
        let (mut connection, hash, key) = (connection.clone(), hash.clone(), key.clone());
        Box::pin(async move {
            let mut call = cmd("EVALSHA");
            call.arg(hash).arg(1).arg(key).arg(&arguments[..]);
            call.query_async::<redis::Value>(&mut connection).await.expect("the script runs");
        })
    })
}

fn ours(name: &str, storage: &RedisStorage, policy: &str, admitted: bool) -> Row {
    let policy: Policy = policy.parse().expect("the policy is valid");
    let (policy, storage, key) = (policy.with_name(name), storage.clone(), Key::from("203.0.113.7"));
    Row::new(&format!("ours: {name}"), "evalsha", move || {
        let decision = storage.decide(StorageRequest::new(&policy, &key, Op::Hit, 1));
        Box::pin(async move {
            assert_eq!(decision.await.expect("the server decides").is_admitted(), admitted);
        })
    })
}

/// Returns a row with one limit for each of several keys.
fn several_keys(name: &str, storage: &RedisStorage, limits: &str) -> Row {
    let policy = |(position, limit): (usize, &str)| {
        let policy: Policy = limit.parse().expect("the policy is valid");
        (policy.with_name(format!("{name} {position}")), Key::from(format!("203.0.113.{position}")))
    };
    let (members, storage): (Vec<_>, _) = (limits.split("; ").enumerate().map(policy).collect(), storage.clone());
    Row::new(&format!("ours: {name}"), "evalsha", move || {
        let requests: Vec<_> =
            members.iter().map(|(policy, key)| StorageRequest::new(policy, key, Op::Hit, 1)).collect();
        let decisions = storage.decide_all(&requests);
        Box::pin(async move {
            assert!(decisions.await.expect("the server decides").iter().all(|decision| decision.is_admitted()));
        })
    })
}

/// Returns a row that sends the same script with the same arguments as `row`, without the storage.
async fn sent_by_hand(name: &str, row: &Row, connection: &MultiplexedConnection) -> Row {
    let mut observer = connection.clone();
    let words = server::script_call((row.call)(), &mut observer).await;
    let connection = connection.clone();
    Row::new(&format!("the same script by hand: {name}"), "evalsha", move || {
        let (mut connection, words) = (connection.clone(), words.clone());
        Box::pin(async move {
            let mut call = redis::Cmd::new();
            call.arg(words).query_async::<redis::Value>(&mut connection).await.map(drop).expect("the script runs");
        })
    })
}

/// Returns a row with a moving window of `amount` entries. A manual clock advances by a second per
/// hit, so each hit adds an entry and removes one. The limit is twice as large, because concurrent
/// hits may be reordered.
async fn sliding(name: &str, amount: u32, storage: &RedisStorage) -> Row {
    let clock = ManualClock::default();
    let storage = storage.clone().clock(clock.clone());
    let row = ours(name, &storage, &format!("moving-window {} per {amount} seconds", 2 * amount), true);
    let call = move || {
        clock.advance(Duration::from_secs(1));
        (row.call)()
    };
    for _ in 0..amount {
        call().await;
    }
    Row::new(&row.name, "evalsha", call)
}

async fn fill(storage: &RedisStorage, policy: &str, name: &str, hits: u32) {
    let policy = policy.parse::<Policy>().expect("the policy is valid").with_name(name);
    for _ in 0..hits {
        let key = Key::from("203.0.113.7");
        _ = storage.decide(StorageRequest::new(&policy, &key, Op::Hit, 1)).await.expect("the server decides");
    }
}

async fn run() {
    let server = Server::start();
    let mut connection = server.connect().await;
    let storage = RedisStorage::new(&format!("{}?timeout=5s", server.url())).expect("the URL is valid");
    let mut rows = vec![Row::new("`INCR`", "incr", {
        let connection = connection.clone();
        move || {
            let mut connection = connection.clone();
            Box::pin(async move {
                cmd("INCR").arg("count").query_async::<u64>(&mut connection).await.expect("the server counts");
            })
        }
    })];
    let scripts = [
        ("a plain fixed window", include_str!("fixed_window.lua"), [PLENTY.into(), 3_600_000]),
        ("a plain GCRA", include_str!("gcra.lua"), [1, 3_600_000_000]),
        ("a plain sliding counter", include_str!("sliding_counter.lua"), [PLENTY.into(), 3_600_000_000]),
    ];
    for (name, text, arguments) in scripts {
        cmd("SCRIPT").arg("LOAD").arg(text).exec_async(&mut connection).await.expect("the script is valid");
        rows.push(plain(name, &connection, text, arguments));
    }
    let many = format!("fixed-window {PLENTY}/hour; token-bucket {PLENTY}/hour; {PLENTY}/day");
    let policies = [
        ("fixed window", &*format!("fixed-window {PLENTY}/hour"), true),
        ("lockout", &*format!("lockout {PLENTY}/hour for 1 hour"), true),
        ("token bucket", &format!("token-bucket {PLENTY}/hour"), true),
        ("sliding window counter", &format!("{PLENTY}/hour"), true),
        ("moving window that grows", &format!("moving-window {PLENTY}/hour"), true),
        ("three small limits", &many, true),
        ("fixed window, refusing", "fixed-window 10/day", false),
        ("token bucket, refusing", "token-bucket 10/day", false),
        ("sliding window counter, refusing", "10/day", false),
        ("moving window of 10, refusing", "moving-window 10/day", false),
        ("moving window of 10000, refusing", "moving-window 10000/day", false),
    ];
    let compared = ["fixed window", "sliding window counter", "three small limits", "token bucket, refusing"];
    for (name, policy, admitted) in policies {
        if !admitted {
            fill(&storage, policy, name, 10_000).await;
        }
        let row = ours(name, &storage, policy, admitted);
        let same_script =
            if compared.contains(&name) { Some(sent_by_hand(name, &row, &connection).await) } else { None };
        rows.push(row);
        rows.extend(same_script);
    }
    rows.push(several_keys("three small limits, each of its own key", &storage, &many));
    for amount in [10, 10_000] {
        rows.push(sliding(&format!("moving window with {amount} entries, own clock"), amount, &storage).await);
    }
    let words: Vec<String> = std::env::args().skip(1).collect();
    rows.retain(|row| words.is_empty() || words.iter().any(|word| row.name.contains(word)));
    for round in 0..ROUNDS {
        eprintln!("round {}", round + 1);
        for row in &mut rows {
            row.measure(&server, &mut connection).await;
        }
    }
    let in_flight = IN_FLIGHT.map(|n| n.to_string()).join(" | ");
    println!(
        "| decisions per second, in flight: | {in_flight} | server us, one | server us, 64 | server CPU us | client CPU us |"
    );
    println!("|---|{}---|---|---|---|", "---|".repeat(IN_FLIGHT.len()));
    for row in &rows {
        let (rates, [client, server]) = (row.rates.map(|rate| format!("{rate:.0}")), row.processor);
        let [alone, combined] = row.micros;
        println!("| {} | {} | {alone:.2} | {combined:.2} | {server:.1} | {client:.1} |", row.name, rates.join(" | "));
    }
    if !words.is_empty() {
        return;
    }
    let bytes = server::bytes_of("*10000*refusing*:1.*", &mut connection).await;
    server::run_peer(&server.url());
    println!("\nA full moving window of 10,000 takes {bytes} bytes; as a list 193,000.");
}

fn main() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("there is a runtime");
    tokio::task::LocalSet::new().block_on(&runtime, run());
}
