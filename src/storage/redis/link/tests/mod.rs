//! What cannot be seen from outside: whether a command was sent twice, how long each one took.

#[cfg(feature = "redis-cluster")]
mod cluster;
#[cfg(feature = "redis-sentinel")]
mod sentinel;

use std::time::Duration;

use redis::{Cmd, Value, cmd};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::super::error::RedisStorageError;
use super::super::url::Target;
use super::Link;
use crate::storage::servers::{Mode, Proxy, Server};

const DEADLINE: Duration = Duration::from_millis(100);

/// What a busy machine may add.
const LITTLE: Duration = Duration::from_millis(60);

fn link(url: &str) -> Link {
    let target = Target::parse(url).unwrap();
    Link::new(target.place, &target.access)
}

fn count(key: &str) -> Cmd {
    let mut command = cmd("INCR");
    command.arg(key);
    command
}

/// The reply, which has to be there in time, whatever it is.
async fn run(link: &Link, command: &Cmd) -> Result<Value, RedisStorageError> {
    let started = Instant::now();
    let reply = link.run(command, started + DEADLINE).await;
    let took = started.elapsed();
    assert!(took < DEADLINE + LITTLE, "{took:?}: {reply:?}");
    reply
}

fn spawned(link: &Link, command: &Cmd) -> impl Future<Output = Result<Value, RedisStorageError>> + use<> {
    let (link, command) = (link.clone(), command.clone());
    async move { run(&link, &command).await }
}

/// Until the link works; how long that was.
async fn recovers(link: &Link, command: &Cmd) -> Duration {
    let started = Instant::now();
    while let Err(error) = run(link, command).await {
        assert!(started.elapsed() < Duration::from_secs(10), "{error}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    started.elapsed()
}

#[tokio::test]
async fn a_command_is_never_sent_twice() {
    let server = Server::start(&[]);
    let proxy = Proxy::start(server.port());
    let link = link(&proxy.url());
    recovers(&link, &cmd("PING")).await;
    for (mode, executed) in
        [(Mode::SwallowReplies, 1), (Mode::CutAtReply, 1), (Mode::Garbage, 1), (Mode::SwallowRequests, 0)]
    {
        let key = format!("{mode:?}");
        proxy.set(mode);
        let error = run(&link, &count(&key)).await.unwrap_err();
        assert!(error.may_have_counted(), "{mode:?}: {error}");
        proxy.set(Mode::Pass);
        recovers(&link, &cmd("PING")).await;
        let count = server.ask(&["GET", &key]).to_string();
        assert_eq!(count, if executed == 1 { "1" } else { "nil" }, "{mode:?}");
    }
}

#[tokio::test]
async fn every_call_is_counted_once_while_connections_are_cut() {
    let server = Server::start(&[]);
    let proxy = Proxy::start(server.port());
    let link = link(&proxy.url());
    let (mut counted, mut unknown) = (0, 0);
    for round in 0..200 {
        match run(&link, &count("hits")).await {
            Ok(_) => counted += 1,
            Err(error) if error.may_have_counted() => unknown += 1,
            Err(_) => {}
        }
        if round % 10 == 0 {
            proxy.cut();
        }
    }
    let total: usize = server.ask(&["GET", "hits"]).to_string().parse().unwrap();
    assert!(counted > 100 && (counted..=counted + unknown).contains(&total), "{counted} + {unknown}: {total}");
}

/// Field defect: requests that hang when the server stops answering.
#[tokio::test]
async fn a_server_that_hangs_delays_nobody_and_is_back_at_once() {
    let server = Server::start(&[]);
    let (known, new) = (link(&server.url()), link(&server.url()));
    recovers(&known, &cmd("PING")).await;
    server.stop();
    let (a, b) = (count("a"), count("b"));
    for _ in 0..5 {
        let (one, other) = tokio::join!(run(&known, &a), run(&new, &b));
        assert!(one.unwrap_err().is_timeout() && other.is_err());
    }
    server.go_on();
    for link in [&known, &new] {
        let took = recovers(link, &cmd("PING")).await;
        assert!(took < Duration::from_secs(1), "{took:?}");
    }
}

/// Field defect: a connection whose server is gone without a word is used for ever.
#[tokio::test]
async fn a_connection_that_is_silent_three_times_is_replaced() {
    let server = Server::start(&[]);
    let proxy = Proxy::start(server.port());
    let link = link(&proxy.url());
    recovers(&link, &cmd("PING")).await;
    server.stop();
    let ping = cmd("PING");
    let mut many: JoinSet<_> = (0..20).map(|_| spawned(&link, &ping)).collect();
    while let Some(one) = many.join_next().await {
        assert!(one.unwrap().is_err());
    }
    server.go_on();
    assert!(run(&link, &ping).await.is_ok());
    assert_eq!(proxy.connections(), 1, "many at once are one silence, and one is not the end of a connection");
    server.stop();
    for _ in 0..3 {
        assert!(run(&link, &ping).await.is_err());
    }
    server.go_on();
    recovers(&link, &ping).await;
    assert_eq!(proxy.connections(), 2);
}

#[tokio::test]
async fn a_dropped_call_disturbs_nobody() {
    let server = Server::start(&[]);
    let proxy = Proxy::start(server.port());
    let link = link(&proxy.url());
    // While connecting, and while waiting for the reply.
    for _ in 0..2 {
        proxy.set(Mode::Delay(Duration::from_millis(20)));
        let dropped = tokio::time::timeout(Duration::from_millis(5), run(&link, cmd("ECHO").arg("mine"))).await;
        assert!(dropped.is_err());
        let reply = link.run(cmd("ECHO").arg("yours"), Instant::now() + Duration::from_secs(5)).await.unwrap();
        assert_eq!(reply, Value::BulkString(b"yours".to_vec()));
    }
    assert_eq!(proxy.connections(), 1);
}

/// Field defect: one lock around each call.
#[tokio::test]
async fn calls_do_not_wait_for_each_other() {
    let server = Server::start(&[]);
    let proxy = Proxy::start(server.port());
    let link = link(&proxy.url());
    recovers(&link, &cmd("PING")).await;
    proxy.set(Mode::Delay(Duration::from_millis(30)));
    let mut many: JoinSet<_> = (0..50).map(|_| spawned(&link, &count("k"))).collect();
    while let Some(one) = many.join_next().await {
        one.unwrap().unwrap();
    }
    assert_eq!(proxy.connections(), 1);
}

#[tokio::test]
async fn while_nobody_listens_calls_fail_at_once_and_connects_are_few() {
    let mut server = Server::start(&[]);
    let link = link(&server.url());
    server.kill();
    let (started, mut calls) = (Instant::now(), 0);
    while started.elapsed() < Duration::from_millis(300) {
        let error = run(&link, &count("k")).await.unwrap_err();
        assert!(!error.may_have_counted() && !error.is_timeout(), "{error}");
        calls += 1;
    }
    assert!(calls > 100, "{calls}");
    server.restart();
    let took = recovers(&link, &count("k")).await;
    assert!(took < Duration::from_secs(1), "{took:?}");
}

#[test]
fn a_link_outlives_its_runtime() {
    let server = Server::start(&[]);
    let link = link(&server.url());
    for _ in 0..3 {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(run(&link, &count("k"))).unwrap();
    }
    assert_eq!(server.ask(&["GET", "k"]).to_string(), "3");
}

/// A task that is spawned on a runtime that is ending is dropped on the spot, with whatever it would lock.
#[test]
fn a_runtime_that_ends_while_connecting_ends() {
    let nobody = link("redis://127.0.0.1:1");
    for _ in 0..50 {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        for _ in 0..4 {
            let link = nobody.clone();
            runtime.spawn(async move {
                loop {
                    let _ = link.run(&cmd("PING"), Instant::now() + DEADLINE).await;
                    tokio::task::yield_now().await;
                }
            });
        }
        std::thread::yield_now();
        let started = Instant::now();
        runtime.shutdown_timeout(Duration::from_secs(5));
        assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    }
}

#[tokio::test]
async fn errors_of_the_server_are_told_apart() {
    let server = Server::start(&[]);
    let link = link(&server.url());
    let error = run(&link, cmd("EVALSHA").arg("0".repeat(40)).arg(0)).await.unwrap_err();
    assert!(error.is_no_script() && !error.may_have_counted(), "{error}");
    assert!(std::error::Error::source(&error).is_some());
    let error = run(&link, cmd("EVAL").arg("return {1, redis.error_reply('OH no')}").arg(0)).await.unwrap_err();
    assert!(error.to_string().ends_with(" refused: OH no"), "{error}");
}
