//! Tests of error replies, with a fake server.

use std::error::Error;
use std::io;
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
async fn link_to(replies: &'static [(&str, &str)]) -> Link {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = RedisUrl::parse(&format!("redis://{}", listener.local_addr().unwrap())).unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream, replies));
        }
    });
    Link::new(target.servers, &target.access)
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
    let link = link_to(&[
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
    assert_eq!(run("GET").await.unwrap(), Value::BulkString(b"it".to_vec()), "an error reply keeps the connection");
}
