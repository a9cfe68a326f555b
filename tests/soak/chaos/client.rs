//! A client that sends requests on one connection, and the counts of its responses.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

/// The time for which all clients use one key.
const KEY_LIFETIME: Duration = Duration::from_millis(1_500);

/// The pause between two requests of a client.
const PAUSE: Duration = Duration::from_millis(20);

/// The deadline of the servers.
const DEADLINE: Duration = Duration::from_millis(100);
/// The tolerance for responses after the deadline, on a busy machine with a hanging server.
const TOLERANCE: Duration = Duration::from_millis(900);

/// The read timeout of a response.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// One request in this many has a key that is used only once.
const ONE_TIME_EVERY: u64 = 4;

/// The counts of the responses.
#[derive(Debug, Default)]
pub(crate) struct Responses {
    pub(crate) requests: u64,
    /// The admitted requests of each key.
    admitted: BTreeMap<u128, u32>,
    /// The admitted requests of keys that were used once.
    admitted_once: u64,
    pub(crate) by_fallback: u64,
    pub(crate) refused: u64,
    pub(crate) unavailable: u64,
    /// Requests without a response, or with another status.
    pub(crate) lost: u64,
    pub(crate) late: u64,
    pub(crate) slowest: Duration,
}

impl Responses {
    pub(crate) fn add(&mut self, other: Self) {
        for (key, times) in other.admitted {
            *self.admitted.entry(key).or_default() += times;
        }
        self.requests += other.requests;
        self.admitted_once += other.admitted_once;
        self.by_fallback += other.by_fallback;
        self.refused += other.refused;
        self.unavailable += other.unavailable;
        self.lost += other.lost;
        self.late += other.late;
        self.slowest = self.slowest.max(other.slowest);
    }

    pub(crate) fn admitted(&self) -> u64 {
        self.admitted.values().copied().map(u64::from).sum::<u64>() + self.admitted_once
    }

    /// Returns the number of admitted requests of the key with the most.
    pub(crate) fn most(&self) -> u32 {
        self.admitted.values().copied().max().unwrap_or(0)
    }
}

pub(crate) struct Client {
    address: String,
    connection: Option<BufReader<TcpStream>>,
    /// The limit in the responses of a fallback.
    divided_limit: String,
    begun: Instant,
    number: usize,
    pub(crate) responses: Responses,
}

struct Answer {
    status: u16,
    limit: Option<String>,
}

impl Client {
    pub(crate) fn new(address: &str, divided_limit: u32, begun: Instant, number: usize) -> Self {
        let (address, divided_limit) = (address.to_owned(), divided_limit.to_string());
        Self { address, connection: None, divided_limit, begun, number, responses: Responses::default() }
    }

    pub(crate) fn send(&mut self) {
        thread::sleep(PAUSE);
        let hot = self.begun.elapsed().as_millis() / KEY_LIFETIME.as_millis();
        let is_one_time = self.responses.requests.is_multiple_of(ONE_TIME_EVERY);
        let one_time_key = || format!("once-{}-{}", self.number, self.responses.requests);
        let key = if is_one_time { one_time_key() } else { hot.to_string() };
        let started = Instant::now();
        let answer = self.response(&key);
        let took = started.elapsed();
        let responses = &mut self.responses;
        responses.requests += 1;
        responses.slowest = responses.slowest.max(took);
        responses.late += u64::from(took > DEADLINE + TOLERANCE);
        match answer {
            Ok(Answer { status: 200, limit }) => {
                responses.by_fallback += u64::from(limit.is_some_and(|limit| limit == self.divided_limit));
                if is_one_time {
                    responses.admitted_once += 1;
                } else {
                    *responses.admitted.entry(hot).or_default() += 1;
                }
            }
            Ok(Answer { status: 429, .. }) => responses.refused += 1,
            Ok(Answer { status: 503, .. }) => responses.unavailable += 1,
            other => {
                eprintln!("{}: {:?}", self.address, other.map(|answer| answer.status));
                responses.lost += 1;
                self.connection = None;
            }
        }
    }

    fn response(&mut self, key: &str) -> io::Result<Answer> {
        let connection = match &mut self.connection {
            Some(connection) => connection,
            none => {
                let stream = TcpStream::connect(&self.address)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(READ_TIMEOUT))?;
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
