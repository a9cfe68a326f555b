//! A client that asks a server on one connection, and what it has seen.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

/// For as long all clients use one key.
const KEY_LIVES: Duration = Duration::from_millis(1_500);

/// Between two requests of a client.
const PACE: Duration = Duration::from_millis(20);

/// The deadline of the servers, and what a busy machine may add. Who waits for a server that hangs
/// takes longer.
const DEADLINE: Duration = Duration::from_millis(100);
const LATE: Duration = Duration::from_millis(900);

/// An answer that takes longer never comes.
const NEVER: Duration = Duration::from_secs(10);

/// One request in so many is somebody's who is never seen again.
const STRANGERS: u64 = 4;

#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) requests: u64,
    /// By the number of the key.
    admitted: BTreeMap<u128, u32>,
    strangers: u64,
    pub(crate) by_fallback: u64,
    pub(crate) refused: u64,
    pub(crate) unavailable: u64,
    /// Without an answer, or with another one.
    pub(crate) lost: u64,
    pub(crate) late: u64,
    pub(crate) slowest: Duration,
}

impl Seen {
    pub(crate) fn add(&mut self, other: Self) {
        for (key, times) in other.admitted {
            *self.admitted.entry(key).or_default() += times;
        }
        self.requests += other.requests;
        self.strangers += other.strangers;
        self.by_fallback += other.by_fallback;
        self.refused += other.refused;
        self.unavailable += other.unavailable;
        self.lost += other.lost;
        self.late += other.late;
        self.slowest = self.slowest.max(other.slowest);
    }

    pub(crate) fn admitted(&self) -> u64 {
        self.admitted.values().copied().map(u64::from).sum::<u64>() + self.strangers
    }

    /// How often the key was admitted that was admitted most often.
    pub(crate) fn most(&self) -> u32 {
        self.admitted.values().copied().max().unwrap_or(0)
    }
}

pub(crate) struct Client {
    address: String,
    connection: Option<BufReader<TcpStream>>,
    /// The limit that a fallback tells.
    share: String,
    begun: Instant,
    number: usize,
    pub(crate) seen: Seen,
}

struct Answer {
    status: u16,
    limit: Option<String>,
}

impl Client {
    pub(crate) fn new(address: &str, share: u32, begun: Instant, number: usize) -> Self {
        let (address, share) = (address.to_owned(), share.to_string());
        Self { address, connection: None, share, begun, number, seen: Seen::default() }
    }

    pub(crate) fn ask(&mut self) {
        thread::sleep(PACE);
        let hot = self.begun.elapsed().as_millis() / KEY_LIVES.as_millis();
        let is_stranger = self.seen.requests.is_multiple_of(STRANGERS);
        let stranger = || format!("stranger-{}-{}", self.number, self.seen.requests);
        let key = if is_stranger { stranger() } else { hot.to_string() };
        let started = Instant::now();
        let answer = self.answer(&key);
        let took = started.elapsed();
        let seen = &mut self.seen;
        seen.requests += 1;
        seen.slowest = seen.slowest.max(took);
        seen.late += u64::from(took > DEADLINE + LATE);
        match answer {
            Ok(Answer { status: 200, limit }) => {
                seen.by_fallback += u64::from(limit.is_some_and(|limit| limit == self.share));
                if is_stranger {
                    seen.strangers += 1;
                } else {
                    *seen.admitted.entry(hot).or_default() += 1;
                }
            }
            Ok(Answer { status: 429, .. }) => seen.refused += 1,
            Ok(Answer { status: 503, .. }) => seen.unavailable += 1,
            other => {
                eprintln!("{}: {:?}", self.address, other.map(|answer| answer.status));
                seen.lost += 1;
                self.connection = None;
            }
        }
    }

    fn answer(&mut self, key: &str) -> io::Result<Answer> {
        let connection = match &mut self.connection {
            Some(connection) => connection,
            none => {
                let stream = TcpStream::connect(&self.address)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(NEVER))?;
                none.insert(BufReader::new(stream))
            }
        };
        write!(connection.get_mut(), "GET / HTTP/1.1\r\nhost: localhost\r\nx-key: {key}\r\n\r\n")?;
        let (mut status, mut limit, mut length) = (0, None, 0);
        loop {
            let mut line = String::new();
            if connection.read_line(&mut line)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let line = line.trim_end().to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            if let Some(rest) = line.strip_prefix("http/1.1 ") {
                status = rest.get(..3).and_then(|code| code.parse().ok()).unwrap_or(0);
            } else if let Some(value) = line.strip_prefix("x-ratelimit-limit: ") {
                limit = Some(value.to_owned());
            } else if let Some(value) = line.strip_prefix("content-length: ") {
                length = value.parse().map_err(|_| io::ErrorKind::InvalidData)?;
            }
        }
        connection.read_exact(&mut vec![0; length])?;
        Ok(Answer { status, limit })
    }
}
