//! A connection with pipelining: many requests may be in flight, and the replies arrive in the
//! order of the requests.
//!
//! Replies are matched in order, even if the caller has left.
//!
//! `async-memcached` 0.9 has the commands, the CAS ids and Unix sockets too, and it closes the
//! connection of a cancelled call. But a connection serves one call at a time, and errors do not say
//! if a call was sent. Decisions per second on 1,000 keys, with one process and one server:
//!
//! | hits in flight | this client | a pool of 64 connections | one connection |
//! |---|---|---|---|
//! | 1 | 9,600 | 8,000 | 8,200 |
//! | 64 | 97,700 | 40,500 | 9,200 |
//!
//! A restarted server counts its CAS ids from 1 again. So an id is valid only on the connection
//! that returned it.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Poll;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::sync::{mpsc, oneshot};
use tokio::task::yield_now;

use super::meta::{self, Reply};
use crate::storage::net::{Driver, Usable};

/// The largest number of requests per write.
const MAX_BATCH: usize = 64;

/// A connection, and the background task that reads and writes for all callers.
#[derive(Debug)]
pub(super) struct MemcachedConnection {
    /// The number of this connection. It is unique in this process.
    pub(super) number: u64,
    requests: mpsc::UnboundedSender<Pending>,
    driver: Driver,
    /// The reason why the connection ended.
    end: Arc<OnceLock<String>>,
}

/// The error of a request without a reply.
#[derive(Debug)]
pub(super) enum NoReply {
    /// The request was not sent.
    NotSent,
    /// The connection ended after the request was sent, or may have been sent.
    Lost(String),
}

/// A request that waits for its reply.
struct Pending {
    request: Vec<u8>,
    reply: oneshot::Sender<Reply>,
}

impl MemcachedConnection {
    /// Spawns the background task on the current runtime.
    pub(super) fn new(stream: impl AsyncRead + AsyncWrite + Send + 'static) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let (requests, pending) = mpsc::unbounded_channel();
        let end = Arc::new(OnceLock::new());
        let set_end = Arc::clone(&end);
        let driver = Driver::spawn(async move {
            let Err(error) = drive(stream, pending).await;
            let _ = set_end.set(error.to_string());
        });
        Self { number: NUMBER.fetch_add(1, Ordering::Relaxed), requests, driver, end }
    }

    /// Sends a request, and returns its reply. If the future is dropped, a request that has not
    /// been written yet is not sent, and the reply to one that was written is discarded.
    pub(super) async fn send(&self, request: Vec<u8>) -> Result<Reply, NoReply> {
        let (sender, reply) = oneshot::channel();
        self.requests.send(Pending { request, reply: sender }).map_err(|_| NoReply::NotSent)?;
        let lost =
            || self.end.get().cloned().unwrap_or_else(|| "the runtime of the connection was shut down".to_owned());
        reply.await.map_err(|_| NoReply::Lost(lost()))
    }
}

impl Usable for MemcachedConnection {
    fn is_usable(&self) -> bool {
        !self.driver.is_finished()
    }
}

impl NoReply {
    /// Returns the reason for an error message.
    pub(super) fn why(self) -> String {
        match self {
            Self::NotSent => "connection closed".to_owned(),
            Self::Lost(why) => why,
        }
    }
}

/// Writes requests and reads replies until either fails. Then the pending requests are dropped, and
/// their callers get an error.
async fn drive(
    stream: impl AsyncRead + AsyncWrite,
    pending: mpsc::UnboundedReceiver<Pending>,
) -> io::Result<Infallible> {
    let (from, to) = tokio::io::split(stream);
    let (queue, waiting) = mpsc::unbounded_channel();
    let mut reading = pin!(read(from, waiting));
    let mut writing = pin!(write(to, pending, queue));
    poll_fn(|cx| match reading.as_mut().poll(cx) {
        Poll::Ready(end) => Poll::Ready(end),
        Poll::Pending => writing.as_mut().poll(cx),
    })
    .await
}

async fn write(
    mut to: impl AsyncWrite + Unpin,
    mut requests: mpsc::UnboundedReceiver<Pending>,
    queue: mpsc::UnboundedSender<Pending>,
) -> io::Result<Infallible> {
    let mut batch = Vec::with_capacity(MAX_BATCH);
    while requests.recv_many(&mut batch, MAX_BATCH).await > 0 {
        // Other tasks that are ready may send requests, too. They share the write.
        yield_now().await;
        while batch.len() < MAX_BATCH
            && let Ok(pending) = requests.try_recv()
        {
            batch.push(pending);
        }
        let mut bytes = Vec::new();
        for pending in batch.drain(..) {
            // The caller no longer waits, so the request is not sent.
            if pending.reply.is_closed() {
                continue;
            }
            bytes.extend(&pending.request);
            queue.send(pending).map_err(|_| io::Error::other("the reader has ended"))?;
        }
        to.write_all(&bytes).await?;
        // TLS may keep the end of the bytes until then.
        to.flush().await?;
    }
    Err(io::Error::other("the connection is no longer in use"))
}

/// Reads replies, and matches them with requests in order. Ends after a reply that does not fit its
/// request, because later replies may be assigned to the wrong requests.
async fn read(from: impl AsyncRead + Unpin, mut queue: mpsc::UnboundedReceiver<Pending>) -> io::Result<Infallible> {
    let mut from = BufReader::new(from);
    loop {
        let reply = meta::read(&mut from).await?;
        let Ok(pending) = queue.try_recv() else { return Err(io::Error::other("reply without a request")) };
        let is_mismatch = !reply.answers(&pending.request);
        let _ = pending.reply.send(reply);
        if is_mismatch {
            return Err(io::Error::other("a reply did not match its request"));
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    /// Guards against this defect: replies were off by one, so each caller got the reply to another
    /// caller's request.
    #[tokio::test]
    async fn connection_ends_after_a_reply_that_does_not_match_its_request() {
        let (here, mut there) = tokio::io::duplex(1_024);
        let connection = MemcachedConnection::new(here);
        let requests = ["a", "b", "c"].map(meta::get);
        let server = async {
            there.read_exact(&mut vec![0; requests.concat().len()]).await.unwrap();
            there.write_all(b"EN\r\nHD\r\nVA 1 c1\r\nx\r\n").await.unwrap();
        };
        let [first, second, third] = requests.each_ref().map(|request| connection.send(request.clone()));
        let (first, second, third, ()) = tokio::join!(first, second, third, server);
        assert_eq!(first.unwrap(), Reply::NotFound);
        assert_eq!(second.unwrap(), Reply::Done { cas: None }, "the caller gets the mismatched reply, and rejects it");
        assert!(matches!(third, Err(NoReply::Lost(why)) if why.contains("did not match")));
    }
    /// A TLS stream keeps written bytes while its socket is full, until it is flushed.
    #[tokio::test]
    async fn requests_are_flushed() {
        let (here, mut there) = tokio::io::duplex(1_024);
        let connection = MemcachedConnection::new(tokio::io::BufWriter::new(here));
        let server = async {
            there.read_exact(&mut [0; 4]).await.unwrap();
            there.write_all(b"MN\r\n").await.unwrap();
        };
        let (reply, ()) = tokio::join!(connection.send(meta::NOOP.to_vec()), server);
        assert_eq!(reply.unwrap(), Reply::Noop);
    }
}
