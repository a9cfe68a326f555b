//! The requests and replies of memcached's meta commands, and of `stats`. Each request has one
//! reply.

use std::io;

use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt};

/// A request without effect, to check the connection.
pub(super) const NOOP: &[u8] = b"mn\r\n";

/// A request for the server's statistics, which contain its time.
pub(super) const STATS: &[u8] = b"stats\r\n";

/// The largest number of statistics in a reply. Servers report a few hundred.
const MAX_STATS: usize = 10_000;

/// The largest length of a line from a memcached server, in bytes.
const MAX_LINE: u64 = 2_048;

/// The CAS value of an item. A server never repeats one until it restarts.
pub(super) type CasId = u64;

/// A reply of a server.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// `VA`: an item.
    Value { cas: CasId, text: Vec<u8> },
    /// `HD`: the request was executed. Contains the new CAS value of an item that was stored.
    Done { cas: Option<CasId> },
    /// `EN`, `NF`: there is no item.
    NotFound,
    /// `EX`: the item has another CAS value.
    Exists,
    /// `NS`: not stored, because there is an item already.
    NotStored,
    /// `MN`: the reply to [`NOOP`].
    Noop,
    /// `STAT` lines and `END`: the reply to [`STATS`]. `time` is the server's time in seconds since
    /// 1970, if the statistics contain it.
    Stats { time: Option<u64> },
    /// `SERVER_ERROR`: the server failed to execute the request.
    Refused(String),
    /// `ERROR`, `CLIENT_ERROR`: the server could not parse the request. Later replies may belong to
    /// parts of it.
    Misunderstood(String),
}

impl Reply {
    /// Returns the first word of the reply, or the message of an error.
    pub(super) fn word(&self) -> &str {
        match self {
            Self::Value { .. } => "VA",
            Self::Done { .. } => "HD",
            Self::NotFound => "EN",
            Self::Exists => "EX",
            Self::NotStored => "NS",
            Self::Noop => "MN",
            Self::Stats { .. } => "STAT",
            Self::Refused(why) | Self::Misunderstood(why) => why,
        }
    }

    /// Returns `true` if this can be a reply to the request.
    pub(super) fn answers(&self, request: &[u8]) -> bool {
        match (self, request.get(..2)) {
            (Self::Refused(_), _) => true,
            // Some proxies answer `stats` with an error. That is a complete reply, because the
            // request is a single line. A request of several lines could get an error for each
            // line.
            (Self::Misunderstood(_) | Self::Stats { .. }, verb) => verb == Some(b"st"),
            (_, Some(b"st")) => false,
            (Self::Value { .. }, verb) => verb == Some(b"mg"),
            (Self::Noop, verb) => verb == Some(b"mn"),
            (Self::NotFound, verb) => verb != Some(b"mn"),
            (Self::Done { .. } | Self::Exists, verb) => matches!(verb, Some(b"ms" | b"md")),
            (Self::NotStored, verb) => verb == Some(b"ms"),
        }
    }
}

/// Returns a request for the text and the CAS value of an item.
pub(super) fn get(key: &str) -> Vec<u8> {
    format!("mg {key} c v\r\n").into_bytes()
}

/// Returns a request to store an item if its CAS value is `cas`. With `None`, stores it if there is
/// no item. The reply contains the new CAS value.
pub(super) fn set(key: &str, text: &str, cas: Option<CasId>, expiry: i32) -> Vec<u8> {
    let size = text.len();
    let condition = cas.map_or("ME".to_owned(), |cas| format!("C{cas}"));
    format!("ms {key} {size} c {condition} T{expiry}\r\n{text}\r\n").into_bytes()
}

/// Returns a request to delete an item if its CAS value is `cas`.
pub(super) fn delete(key: &str, cas: CasId) -> Vec<u8> {
    format!("md {key} C{cas}\r\n").into_bytes()
}

/// Reads the next reply.
pub(super) async fn read(from: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Reply> {
    let line = read_line(from).await?;
    let text = text_of(&line)?;
    let (word, rest) = text.split_once(' ').unwrap_or((text, ""));
    Ok(match word {
        "VA" => {
            let (size, flags) = rest.split_once(' ').ok_or_else(invalid_reply)?;
            let size: u32 = size.parse().map_err(|_| invalid_reply())?;
            let cas = cas_of(flags).ok_or_else(invalid_reply)?;
            if cas == 0 {
                return Err(io::Error::other("the server has no CAS values; start it without -C (--disable-cas)"));
            }
            Reply::Value { cas, text: read_block(from, size).await? }
        }
        "HD" => Reply::Done { cas: cas_of(rest).filter(|cas| *cas > 0) },
        "EN" | "NF" => Reply::NotFound,
        "EX" => Reply::Exists,
        "NS" => Reply::NotStored,
        "MN" => Reply::Noop,
        "STAT" | "END" => Reply::Stats { time: read_stats(from, text).await? },
        "SERVER_ERROR" => Reply::Refused(rest.to_owned()),
        "ERROR" | "CLIENT_ERROR" => Reply::Misunderstood(text.to_owned()),
        _ => return Err(invalid_reply()),
    })
}

/// Returns the CAS value in the flags of a reply.
fn cas_of(flags: &str) -> Option<CasId> {
    flags.split(' ').find_map(|flag| flag.strip_prefix('c')?.parse().ok())
}

/// Reads a line, including its end.
pub(super) async fn read_line(from: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    (&mut *from).take(MAX_LINE).read_until(b'\n', &mut line).await?;
    if line.is_empty() {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "connection closed"));
    }
    Ok(line)
}

/// Returns the text of a line, without its end.
pub(super) fn text_of(line: &[u8]) -> io::Result<&str> {
    line.strip_suffix(b"\r\n").and_then(|line| str::from_utf8(line).ok()).ok_or_else(invalid_reply)
}

/// Reads the statistics after the line `first`. Returns the server's time.
async fn read_stats(from: &mut (impl AsyncBufRead + Unpin), first: &str) -> io::Result<Option<u64>> {
    let (mut time, mut line) = (None, format!("{first}\r\n").into_bytes());
    for _ in 0..MAX_STATS {
        let text = text_of(&line)?;
        if text == "END" {
            return Ok(time);
        }
        let stat = text.strip_prefix("STAT ").ok_or_else(invalid_reply)?;
        if let Some(seconds) = stat.strip_prefix("time ") {
            time = seconds.parse().ok();
        }
        line = read_line(from).await?;
    }
    Err(invalid_reply())
}

async fn read_block(from: &mut (impl AsyncBufRead + Unpin), size: u32) -> io::Result<Vec<u8>> {
    // Not preallocated: the size comes from the server, and may be wrong.
    let mut block = Vec::new();
    (&mut *from).take(u64::from(size) + 2).read_to_end(&mut block).await?;
    if block.len() != size as usize + 2 || !block.ends_with(b"\r\n") {
        return Err(invalid_reply());
    }
    block.truncate(size as usize);
    Ok(block)
}

pub(super) fn invalid_reply() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "invalid reply, not from a memcached server")
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read_all(mut bytes: &[u8]) -> Vec<Result<Reply, String>> {
        let mut replies = Vec::new();
        loop {
            let reply = read(&mut bytes).await.map_err(|error| error.to_string());
            let is_last = reply.is_err();
            replies.push(reply);
            if is_last {
                return replies;
            }
        }
    }

    #[tokio::test]
    async fn replies_are_parsed_one_by_one() {
        let bytes = b"VA 5 c17\r\na\r\nbc\r\nVA 0 t30 c18446744073709551615 W\r\n\r\nHD\r\nHD c3\r\nEN\r\nNF\r\nEX\r\nNS\r\nMN\r\n\
            SERVER_ERROR out of memory\r\n";
        let replies: Vec<Reply> = read_all(bytes).await.into_iter().filter_map(Result::ok).collect();
        let value = |cas, text: &[u8]| Reply::Value { cas, text: text.to_vec() };
        let expected = [
            value(17, b"a\r\nbc"),
            value(u64::MAX, b""),
            Reply::Done { cas: None },
            Reply::Done { cas: Some(3) },
            Reply::NotFound,
            Reply::NotFound,
            Reply::Exists,
            Reply::NotStored,
            Reply::Noop,
            Reply::Refused("out of memory".to_owned()),
        ];
        assert_eq!(replies, expected);
    }

    #[tokio::test]
    async fn time_is_read_from_stats() {
        let bytes =
            b"STAT pid 1\r\nSTAT time 1800000000\r\nSTAT version 1.6.18\r\nEND\r\nSTAT pid 1\r\nEND\r\nEND\r\nMN\r\n";
        let replies: Vec<Reply> = read_all(bytes).await.into_iter().filter_map(Result::ok).collect();
        let stats = |time| Reply::Stats { time };
        assert_eq!(replies, [stats(Some(1_800_000_000)), stats(None), stats(None), Reply::Noop]);
        assert!(replies.iter().all(|reply| reply.answers(STATS) == (*reply != Reply::Noop)));
        assert!(!stats(None).answers(b"mg k\r\n") && !Reply::NotFound.answers(STATS));
        assert!(Reply::Misunderstood(String::new()).answers(STATS));
    }

    #[tokio::test]
    async fn invalid_replies_are_errors() {
        let long = [b'a'; 5_000];
        for bytes in [
            &b"HTTP/1.1 400 Bad Request\r\n"[..],
            b"HD",
            b"HD\n",
            b"STAT time 1\r\nHD\r\n",
            b"VA\r\n",
            b"VA 3\r\nabc\r\n",
            b"VA 3 c\r\nabc\r\n",
            b"VA 3 c1\r\nabcd\r\n",
            b"VA 3 c1\r\nab",
            b"VA -3 c1\r\nabc\r\n",
            b"VA 99999999999 c1\r\nabc\r\n",
            b"VA 4294967295 c1\r\nabc\r\n",
            b"\xff\r\n",
            b"\r\n",
            &long,
        ] {
            assert_eq!(
                read_all(bytes).await,
                [Err("invalid reply, not from a memcached server".to_owned())],
                "{bytes:?}"
            );
        }
        assert_eq!(read_all(b"").await, [Err("connection closed".to_owned())]);
    }
}
