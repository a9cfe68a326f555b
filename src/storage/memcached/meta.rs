//! The meta commands of memcached, as bytes. Each request is answered by one reply.

use std::io;

use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt};

/// Asks whether anybody is there.
pub(super) const NOOP: &[u8] = b"mn\r\n";

/// Asks for counters, of which the server's time is one.
pub(super) const STATS: &[u8] = b"stats\r\n";

/// A server has some hundred counters.
const MOST_STATS: usize = 10_000;

/// A line is never longer, unless it is none of memcached's.
const LONGEST_LINE: u64 = 2_048;

/// The name of one writing under a key, which differs from all others on this server since it was started.
pub(super) type Cas = u64;

/// What a server says.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// `VA`
    Value { cas: Cas, text: Vec<u8> },
    /// `HD`: it is done.
    Done,
    /// `EN`, `NF`: nothing is there.
    Nothing,
    /// `EX`: something else is there.
    Another,
    /// `NS`: something is there already.
    Present,
    /// `MN`, to [`NOOP`].
    Here,
    /// `STAT`s and `END`, to [`STATS`]: the server's time in seconds since 1970, if it is among them.
    Stats { time: Option<u64> },
    /// `SERVER_ERROR`: it cannot.
    Refused(String),
    /// `ERROR`, `CLIENT_ERROR`: it takes the request for something else. Whatever follows may be about a part of it.
    Misunderstood(String),
}

impl Reply {
    /// The word that it begins with.
    pub(super) fn word(&self) -> &str {
        match self {
            Self::Value { .. } => "VA",
            Self::Done => "HD",
            Self::Nothing => "EN",
            Self::Another => "EX",
            Self::Present => "NS",
            Self::Here => "MN",
            Self::Stats { .. } => "STAT",
            Self::Refused(why) | Self::Misunderstood(why) => why,
        }
    }

    /// Whether it is ever said to such a request.
    pub(super) fn answers(&self, request: &[u8]) -> bool {
        match (self, request.get(..2)) {
            (Self::Refused(_), _) => true,
            // A proxy may not know `stats`. It is one line, so nothing of it is left to misunderstand.
            (Self::Misunderstood(_) | Self::Stats { .. }, verb) => verb == Some(b"st"),
            (_, Some(b"st")) => false,
            (Self::Value { .. }, verb) => verb == Some(b"mg"),
            (Self::Here, verb) => verb == Some(b"mn"),
            (Self::Nothing, verb) => verb != Some(b"mn"),
            (Self::Done | Self::Another, verb) => matches!(verb, Some(b"ms" | b"md")),
            (Self::Present, verb) => verb == Some(b"ms"),
        }
    }
}

/// What is there, and the name of that writing.
pub(super) fn get(key: &str) -> Vec<u8> {
    format!("mg {key} c v\r\n").into_bytes()
}

/// Puts `text` there if nothing is, or what was written as `over`.
pub(super) fn set(key: &str, text: &str, over: Option<Cas>, expiry: i32) -> Vec<u8> {
    let size = text.len();
    let over = over.map_or("ME".to_owned(), |cas| format!("C{cas}"));
    format!("ms {key} {size} {over} T{expiry}\r\n{text}\r\n").into_bytes()
}

/// Removes what was written as `cas`.
pub(super) fn delete(key: &str, cas: Cas) -> Vec<u8> {
    format!("md {key} C{cas}\r\n").into_bytes()
}

/// The next reply.
pub(super) async fn read(from: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Reply> {
    let line = read_line(from).await?;
    let text = text_of(&line)?;
    let (word, rest) = text.split_once(' ').unwrap_or((text, ""));
    Ok(match word {
        "VA" => {
            let (size, flags) = rest.split_once(' ').ok_or_else(no_reply)?;
            let size: u32 = size.parse().map_err(|_| no_reply())?;
            let cas = flags.split(' ').find_map(|flag| flag.strip_prefix('c')?.parse().ok()).ok_or_else(no_reply)?;
            if cas == 0 {
                return Err(io::Error::other("it names no writings: start it without -C (--disable-cas)"));
            }
            Reply::Value { cas, text: read_block(from, size).await? }
        }
        "HD" => Reply::Done,
        "EN" | "NF" => Reply::Nothing,
        "EX" => Reply::Another,
        "NS" => Reply::Present,
        "MN" => Reply::Here,
        "STAT" | "END" => Reply::Stats { time: read_stats(from, text).await? },
        "SERVER_ERROR" => Reply::Refused(rest.to_owned()),
        "ERROR" | "CLIENT_ERROR" => Reply::Misunderstood(text.to_owned()),
        _ => return Err(no_reply()),
    })
}

async fn read_line(from: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    (&mut *from).take(LONGEST_LINE).read_until(b'\n', &mut line).await?;
    if line.is_empty() {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it was closed"));
    }
    Ok(line)
}

fn text_of(line: &[u8]) -> io::Result<&str> {
    line.strip_suffix(b"\r\n").and_then(|line| str::from_utf8(line).ok()).ok_or_else(no_reply)
}

/// The rest of the counters, of which `first` has been read.
async fn read_stats(from: &mut (impl AsyncBufRead + Unpin), first: &str) -> io::Result<Option<u64>> {
    let (mut time, mut line) = (None, format!("{first}\r\n").into_bytes());
    for _ in 0..MOST_STATS {
        let text = text_of(&line)?;
        if text == "END" {
            return Ok(time);
        }
        let stat = text.strip_prefix("STAT ").ok_or_else(no_reply)?;
        if let Some(seconds) = stat.strip_prefix("time ") {
            time = seconds.parse().ok();
        }
        line = read_line(from).await?;
    }
    Err(no_reply())
}

async fn read_block(from: &mut (impl AsyncBufRead + Unpin), size: u32) -> io::Result<Vec<u8>> {
    // Not reserved at once: the number may be anything.
    let mut block = Vec::new();
    (&mut *from).take(u64::from(size) + 2).read_to_end(&mut block).await?;
    if block.len() != size as usize + 2 || !block.ends_with(b"\r\n") {
        return Err(no_reply());
    }
    block.truncate(size as usize);
    Ok(block)
}

fn no_reply() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "what came back is no reply of memcached's")
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn all(mut bytes: &[u8]) -> Vec<Result<Reply, String>> {
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
    async fn replies_are_read_one_by_one() {
        let bytes = b"VA 5 c17\r\na\r\nbc\r\nVA 0 t30 c18446744073709551615 W\r\n\r\nHD\r\nHD c3\r\nEN\r\nNF\r\nEX\r\nNS\r\nMN\r\n\
            SERVER_ERROR out of memory\r\n";
        let replies: Vec<Reply> = all(bytes).await.into_iter().filter_map(Result::ok).collect();
        let value = |cas, text: &[u8]| Reply::Value { cas, text: text.to_vec() };
        let expected = [
            value(17, b"a\r\nbc"),
            value(u64::MAX, b""),
            Reply::Done,
            Reply::Done,
            Reply::Nothing,
            Reply::Nothing,
            Reply::Another,
            Reply::Present,
            Reply::Here,
            Reply::Refused("out of memory".to_owned()),
        ];
        assert_eq!(replies, expected);
    }

    #[tokio::test]
    async fn time_is_read_from_stats() {
        let bytes =
            b"STAT pid 1\r\nSTAT time 1800000000\r\nSTAT version 1.6.18\r\nEND\r\nSTAT pid 1\r\nEND\r\nEND\r\nMN\r\n";
        let replies: Vec<Reply> = all(bytes).await.into_iter().filter_map(Result::ok).collect();
        let stats = |time| Reply::Stats { time };
        assert_eq!(replies, [stats(Some(1_800_000_000)), stats(None), stats(None), Reply::Here]);
        assert!(replies.iter().all(|reply| reply.answers(STATS) == (*reply != Reply::Here)));
        assert!(!stats(None).answers(b"mg k\r\n") && !Reply::Nothing.answers(STATS));
        assert!(Reply::Misunderstood(String::new()).answers(STATS));
    }

    #[tokio::test]
    async fn whatever_else_comes_back_is_no_reply() {
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
            assert_eq!(all(bytes).await, [Err("what came back is no reply of memcached's".to_owned())], "{bytes:?}");
        }
        assert_eq!(all(b"").await, [Err("it was closed".to_owned())]);
    }
}
