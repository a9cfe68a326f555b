//! A small client for the Redis protocol, which does not depend on the crate under test.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// A reply of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// A text, a number, or an error, which begins with `-`.
    Text(String),
    Nil,
    List(Vec<Reply>),
}

impl Reply {
    pub fn list(&self) -> &[Reply] {
        match self {
            Self::List(items) => items,
            _ => &[],
        }
    }
}

/// Writes the items of lists with a space after each.
impl fmt::Display for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => f.write_str(text),
            Self::Nil => f.write_str("nil"),
            Self::List(items) => items.iter().try_for_each(|item| write!(f, "{item} ")),
        }
    }
}

pub(crate) fn ask(port: u16, password: Option<&str>, command: &[&str]) -> io::Result<Reply> {
    let stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut stream = BufReader::new(stream);
    if let Some(password) = password {
        send(stream.get_mut(), &["AUTH", password])?;
        receive(&mut stream)?;
    }
    send(stream.get_mut(), command)?;
    receive(&mut stream)
}

fn send(stream: &mut TcpStream, command: &[&str]) -> io::Result<()> {
    let parts: Vec<String> = command.iter().map(|part| format!("${}\r\n{part}\r\n", part.len())).collect();
    let text = format!("*{}\r\n{}", command.len(), parts.concat());
    stream.write_all(text.as_bytes())
}

fn receive(stream: &mut BufReader<TcpStream>) -> io::Result<Reply> {
    let mut line = String::new();
    if stream.read_line(&mut line)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let line = line.trim_end();
    let length = || line[1..].parse::<i64>().map_err(io::Error::other);
    match line.as_bytes().first() {
        Some(b'$') => {
            let Ok(length) = usize::try_from(length()?) else { return Ok(Reply::Nil) };
            let mut bytes = vec![0; length + 2];
            stream.read_exact(&mut bytes)?;
            bytes.truncate(length);
            String::from_utf8(bytes).map(Reply::Text).map_err(io::Error::other)
        }
        Some(b'*') => (0..length()?).map(|_| receive(stream)).collect::<io::Result<_>>().map(Reply::List),
        Some(b'+' | b':') => Ok(Reply::Text(line[1..].to_owned())),
        Some(b'-') => Ok(Reply::Text(line.to_owned())),
        _ => Err(io::Error::other(format!("no reply: {line:?}"))),
    }
}
