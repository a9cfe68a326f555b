//! Tests of error replies, with a fake server.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use redis::{Value, cmd};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;

use super::super::error::is_script_missing;
use super::super::url::RedisUrl;
use super::Link;

/// Starts a server that replies to `PING`, and to other commands with the given replies. Returns a
/// link to it.
async fn link_to(replies: &'static [(&str, &str)]) -> (Link, Arc<AtomicU32>) {
    let connections = Arc::new(AtomicU32::new(0));
    let accepted = Arc::clone(&connections);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = RedisUrl::parse(&format!("redis://{}", listener.local_addr().unwrap())).unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            accepted.fetch_add(1, Ordering::SeqCst);
            tokio::spawn(serve(stream, replies));
        }
    });
    (Link::new(target.servers, &target.access), connections)
}

async fn serve(stream: TcpStream, replies: &[(&str, &str)]) -> io::Result<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let command = read_command(&mut stream).await?;
        let reply = match &*command[0] {
            "PING" => "+PONG\r\n",
            name => {
                replies.iter().find(|(known, _)| *known == name).map_or("-ERR unknown command\r\n", |(_, reply)| reply)
            }
        };
        stream.write_all(reply.as_bytes()).await?;
    }
}

/// Reads a command: the line `*N`, and for each of its N words the line `$length` and the word.
async fn read_command(stream: &mut BufReader<TcpStream>) -> io::Result<Vec<String>> {
    let mut line = async || {
        let mut line = String::new();
        match stream.read_line(&mut line).await? {
            0 => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
            _ => Ok(line.trim_end().to_owned()),
        }
    };
    let count: usize = line().await?[1..].parse().unwrap();
    let mut words = Vec::with_capacity(count);
    for _ in 0..count {
        line().await?;
        words.push(line().await?);
    }
    Ok(words)
}

#[tokio::test]
async fn error_reply_in_an_array_is_an_error() {
    let (link, connections) = link_to(&[
        ("EVALSHA", "-NOSCRIPT No matching script.\r\n"),
        ("EVAL", "*2\r\n:1\r\n-OH no\r\n"),
        ("GET", "$2\r\nit\r\n"),
    ])
    .await;
    let run = async |name| link.run(&cmd(name), Instant::now() + Duration::from_secs(5)).await;
    let error = run("EVALSHA").await.unwrap_err();
    assert!(is_script_missing(&error) && !error.may_have_counted(), "{error:?}");
    assert!(error.source().is_some());
    let error = run("EVAL").await.unwrap_err();
    assert!(format!("{error:#}").ends_with(" refused the command: OH no"), "{error:?}");
    assert!(!error.may_have_counted());
    assert_eq!(run("GET").await.unwrap(), Value::BulkString(b"it".to_vec()), "an error reply is a reply");
    assert_eq!(connections.load(Ordering::SeqCst), 1, "the connection stays");
}

/// Guards against this defect: after a failover, a server before version 7 is not left, because the
/// error of the script quotes that of its command.
#[tokio::test]
async fn error_of_a_replica_ends_the_connection_also_if_a_script_quotes_it() {
    let quoted = "-ERR Error running script (call to f_a94a8fe5ccb19ba61c4c0873d391e987982fbbd3): @user_script:8: \
                  @user_script: 8: -READONLY You can't write against a read only replica. \r\n";
    let plain = "-READONLY You can't write against a read only replica. script: f_a94a, on @user_script:8.\r\n";
    for reply in [quoted, plain] {
        let replies = Vec::leak(vec![("EVALSHA", reply), ("GET", "$2\r\nit\r\n")]);
        let (link, connections) = link_to(replies).await;
        let run = async |name| link.run(&cmd(name), Instant::now() + Duration::from_secs(5)).await;
        let error = run("EVALSHA").await.unwrap_err();
        assert!(!error.may_have_counted() && format!("{error:#}").contains("READONLY"), "{error:?}");
        while run("GET").await.is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(connections.load(Ordering::SeqCst), 2, "{reply}");
    }
}

/// Replies to the commands with which a cluster connection begins, as a node with all slots at `address`.
/// Calls `on_call` for each other command, and returns when that returns `None`.
#[cfg(feature = "redis-cluster-async")]
async fn serve_as_node(stream: TcpStream, on_call: impl Fn() -> Option<&'static str>) -> io::Result<()> {
    let address = stream.local_addr()?;
    let mut stream = BufReader::new(stream);
    loop {
        let command = read_command(&mut stream).await?;
        let (ip, port) = (address.ip(), address.port());
        let slots = format!("*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n{ip}\r\n:{port}\r\n");
        let reply = match &*command[0] {
            "PING" => "+PONG\r\n",
            "CLUSTER" => &slots,
            "SET" => match on_call() {
                Some(reply) => reply,
                None => return Ok(()),
            },
            _ => "-ERR unknown command\r\n",
        };
        stream.write_all(reply.as_bytes()).await?;
    }
}

/// A cluster connection sends a command again. The error of the last attempt does not show that the first
/// one was not executed.
#[cfg(feature = "redis-cluster-async")]
#[tokio::test]
async fn error_of_a_later_attempt_of_a_cluster_connection_may_have_counted() {
    for later in [
        None,
        Some("-LOADING Redis is loading the dataset in memory\r\n"),
        Some("-NOREPLICAS Not enough good replicas to write.\r\n"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("redis://{}", listener.local_addr().unwrap());
        let calls = Arc::new(AtomicU32::new(0));
        let counter = Arc::clone(&calls);
        let node = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            loop {
                tokio::select! {
                    Ok((stream, _)) = listener.accept() => {
                        let counter = Arc::clone(&counter);
                        // The first call is executed, and its reply is lost.
                        let on_call = move || if counter.fetch_add(1, Ordering::SeqCst) == 0 { None } else { later };
                        connections.spawn(serve_as_node(stream, on_call));
                    }
                    Some(ended) = connections.join_next() => {
                        // From then on, the node refuses connections.
                        if later.is_none() && matches!(ended, Ok(Ok(()))) {
                            return;
                        }
                    }
                }
            }
        });
        let client = redis::cluster::ClusterClient::builder([url]).retries(2).max_retry_wait(10).min_retry_wait(1);
        let connection = client.build().unwrap().get_async_connection().await.unwrap();
        let call = cmd("SET").arg("key").arg("value").to_owned();
        let error =
            Link::on_cluster(connection).run(&call, Instant::now() + Duration::from_secs(60)).await.unwrap_err();
        assert!(error.may_have_counted(), "{error:?}");
        assert!(calls.load(Ordering::SeqCst) > u32::from(later.is_some()), "{error:?}");
        node.abort();
    }
}

/// Its timeout can be shorter than that of the storage.
#[cfg(feature = "redis-connection-manager")]
#[tokio::test]
async fn timeout_of_a_connection_manager_is_a_timeout() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = redis::Client::open(format!("redis://{}", listener.local_addr().unwrap())).unwrap();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut stream = BufReader::new(stream);
        while let Ok(command) = read_command(&mut stream).await {
            // The server replies to what connecting needs, and to nothing else.
            if command[0] == "CLIENT" {
                stream.write_all(b"+OK\r\n").await.unwrap();
            }
        }
    });
    let config = redis::aio::ConnectionManagerConfig::new().set_response_timeout(Some(Duration::from_millis(20)));
    let manager = redis::aio::ConnectionManager::new_with_config(client, config).await.unwrap();
    let error = Link::on_manager(manager).run(&cmd("GET"), Instant::now() + Duration::from_secs(60)).await.unwrap_err();
    assert!(error.is_timeout() && error.may_have_counted(), "{error:?}");
}
