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
