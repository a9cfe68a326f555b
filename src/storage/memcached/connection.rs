//! One connection, on which many ask at once and are answered in the order in which they asked.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::task::Poll;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;

use super::meta::{self, Reply};

/// So many requests are written in one go.
const AT_ONCE: usize = 64;

/// A connection, and the task that writes and reads for all who use it. It ends with its last user: a stopped server would
/// keep it for ever.
#[derive(Debug)]
pub(super) struct Connection {
    requests: mpsc::UnboundedSender<Asked>,
    driver: AbortHandle,
    /// Why it ended.
    end: Arc<OnceLock<String>>,
}

/// Why a request has no reply.
#[derive(Debug)]
pub(super) enum Unanswered {
    NotSent,
    /// It was, or may have been: then the connection ended.
    Lost(String),
}

struct Asked {
    request: Vec<u8>,
    answer: oneshot::Sender<Reply>,
}

impl Connection {
    pub(super) fn over(stream: impl AsyncRead + AsyncWrite + Send + 'static) -> Self {
        let (requests, asked) = mpsc::unbounded_channel();
        let end = Arc::new(OnceLock::new());
        let set_end = Arc::clone(&end);
        let driver = tokio::spawn(async move {
            let Err(error) = drive(stream, asked).await;
            let _ = set_end.set(error.to_string());
        });
        Self { requests, driver: driver.abort_handle(), end }
    }

    /// The reply to `request`. Whoever goes away without waiting for it leaves nothing behind: the reply is dropped when it comes,
    /// and if the request was not sent yet, it is not.
    pub(super) async fn ask(&self, request: Vec<u8>) -> Result<Reply, Unanswered> {
        let (answer, reply) = oneshot::channel();
        self.requests.send(Asked { request, answer }).map_err(|_| Unanswered::NotSent)?;
        let lost = || self.end.get().cloned().unwrap_or_else(|| "its runtime has ended".to_owned());
        reply.await.map_err(|_| Unanswered::Lost(lost()))
    }

    /// Whether the other side has closed it, or the runtime on which it was opened has ended.
    pub(super) fn is_closed(&self) -> bool {
        self.driver.is_finished()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// Writes and reads until either ends; then all who wait are told, as nobody holds on to their answers any longer.
async fn drive(stream: impl AsyncRead + AsyncWrite, asked: mpsc::UnboundedReceiver<Asked>) -> io::Result<Infallible> {
    let (from, to) = tokio::io::split(stream);
    let (queue, waiting) = mpsc::unbounded_channel();
    let mut reading = pin!(read(from, waiting));
    let mut writing = pin!(write(to, asked, queue));
    poll_fn(|cx| match reading.as_mut().poll(cx) {
        Poll::Ready(end) => Poll::Ready(end),
        Poll::Pending => writing.as_mut().poll(cx),
    })
    .await
}

async fn write(
    mut to: impl AsyncWrite + Unpin,
    mut asked: mpsc::UnboundedReceiver<Asked>,
    queue: mpsc::UnboundedSender<Asked>,
) -> io::Result<Infallible> {
    let mut batch = Vec::with_capacity(AT_ONCE);
    while asked.recv_many(&mut batch, AT_ONCE).await > 0 {
        let mut bytes = Vec::new();
        for asked in batch.drain(..) {
            // Who has gone by now is not asked for.
            if asked.answer.is_closed() {
                continue;
            }
            bytes.extend(&asked.request);
            queue.send(asked).map_err(|_| io::Error::other("nobody reads"))?;
        }
        to.write_all(&bytes).await?;
    }
    Err(io::Error::other("nobody uses it any more"))
}

/// The first reply is the answer to the first who asked, whether or not anybody waits for it any longer. If it cannot be, none of
/// those that follow are what they seem, and nobody is told them.
async fn read(from: impl AsyncRead + Unpin, mut queue: mpsc::UnboundedReceiver<Asked>) -> io::Result<Infallible> {
    let mut from = BufReader::new(from);
    loop {
        let reply = meta::read(&mut from).await?;
        let Ok(asked) = queue.try_recv() else { return Err(io::Error::other("it says what nobody asked for")) };
        let is_last = !reply.answers(&asked.request);
        let _ = asked.answer.send(reply);
        if is_last {
            return Err(io::Error::other("it answered something that was not asked"));
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    /// Field defect: replies off by one, each of which is somebody else's answer.
    #[tokio::test]
    async fn after_a_reply_to_something_else_nobody_is_told_anything() {
        let (here, mut there) = tokio::io::duplex(1_024);
        let connection = Connection::over(here);
        let requests = ["a", "b", "c"].map(meta::get);
        let server = async {
            there.read_exact(&mut vec![0; requests.concat().len()]).await.unwrap();
            there.write_all(b"EN\r\nHD\r\nVA 1 c1\r\nx\r\n").await.unwrap();
        };
        let [first, second, third] = requests.each_ref().map(|request| connection.ask(request.clone()));
        let (first, second, third, ()) = tokio::join!(first, second, third, server);
        assert_eq!(first.unwrap(), Reply::Nothing);
        assert_eq!(second.unwrap(), Reply::Done, "whoever it was said to tells it from an answer");
        assert!(matches!(third, Err(Unanswered::Lost(why)) if why.contains("not asked")));
    }
}
