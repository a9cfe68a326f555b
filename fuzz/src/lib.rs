//! What must hold whatever is sent. See `scripts/fuzz`.
//!
//! An input is lines: the first is the client's own text, the others are the lines of the field to the right of it, or none.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use http::{HeaderName, HeaderValue, Request};
use tower_ratelimit::ClientIp;
use tower_ratelimit::extract::Head;

const PEER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));

/// One way to read a field.
#[derive(Debug)]
pub struct Reader {
    name: HeaderName,
    forwarded: bool,
    by: Vec<ClientIp>,
}

impl Reader {
    /// Reads `X-Forwarded-For`.
    pub fn x_forwarded_for() -> Self {
        Self { name: HeaderName::from_static("x-forwarded-for"), forwarded: false, by: behind() }
    }

    /// Reads `Forwarded`.
    pub fn forwarded() -> Self {
        let by = behind().into_iter().map(ClientIp::forwarded).collect();
        Self { name: http::header::FORWARDED, forwarded: true, by }
    }

    /// Asserts what must hold of an input.
    ///
    /// # Panics
    ///
    /// When it does not.
    pub fn check(&self, input: &[u8]) {
        let mut lines = input.split(|byte| *byte == b'\n').map(sendable);
        let client = lines.next().unwrap_or_default();
        let right: Vec<Vec<u8>> = lines.collect();
        for by in &self.by {
            let all: Vec<&[u8]> = std::iter::once(&client).chain(&right).map(|line| &**line).collect();
            let answer = self.address(by, &all);
            assert!(answer == PEER || stands_in(&all, answer), "{answer} is nowhere");
            let scrubbed: Option<Vec<Vec<u8>>> = all.iter().map(|line| scrubbed(line)).collect();
            if let Some(scrubbed) = scrubbed.filter(|_| self.forwarded) {
                let scrubbed: Vec<&[u8]> = scrubbed.iter().map(|line| &**line).collect();
                assert_eq!(self.address(by, &scrubbed), answer, "what is in quotes was read");
            }
            if let Some((first, others)) = right.split_first() {
                self.check_the_left(by, &client, first, others);
            }
        }
    }

    /// If the walk stops at something in `first` or to the right of it, what stands on the left changes nothing.
    fn check_the_left(&self, by: &ClientIp, client: &[u8], first: &[u8], others: &[Vec<u8>]) {
        let with = |left: &[u8], comma: &[u8]| {
            let joined = [left, comma, first].concat();
            let lines: Vec<&[u8]> = std::iter::once(&*joined).chain(others.iter().map(|line| &**line)).collect();
            self.address(by, &lines)
        };
        let probes: [&[u8]; 2] = if self.forwarded {
            [b"for=203.0.113.77", b"for=198.51.100.77"]
        } else {
            [b"203.0.113.77", b"198.51.100.77"]
        };
        let [answer, other] = probes.map(|probe| with(probe, b","));
        // A quote that nobody opened may be closed by anybody: no proxy writes one.
        if answer != other || self.forwarded && scrubbed(first).is_none() {
            return;
        }
        for comma in [&b","[..], b", ", b" ,\t"] {
            assert_eq!(with(client, comma), answer, "joined by {:?}", comma.escape_ascii().to_string());
        }
        let lines: Vec<&[u8]> = [client, first].into_iter().chain(others.iter().map(|line| &**line)).collect();
        assert_eq!(self.address(by, &lines), answer, "as a line of its own");
    }

    fn address(&self, by: &ClientIp, lines: &[&[u8]]) -> IpAddr {
        let mut request = Request::new(());
        request.extensions_mut().insert(SocketAddr::new(PEER, 443));
        for line in lines {
            let value = HeaderValue::from_bytes(line).expect("only what can be sent was kept");
            request.headers_mut().append(self.name.clone(), value);
        }
        by.address(&Head::of(&request)).expect("there is a peer")
    }
}

fn behind() -> Vec<ClientIp> {
    let networks = ClientIp::behind(["10.0.0.0/8", "fd00::/8"]).expect("these are networks");
    (1..=3).map(ClientIp::behind_hops).chain([networks]).collect()
}

/// Without what no field can hold.
fn sendable(line: &[u8]) -> Vec<u8> {
    line.iter().copied().filter(|byte| HeaderValue::from_bytes(&[*byte]).is_ok()).collect()
}

/// Whether an address is in the text somewhere, backslashes aside.
fn stands_in(lines: &[&[u8]], address: IpAddr) -> bool {
    let text: Vec<u8> = lines.join(&b","[..]).into_iter().filter(|byte| *byte != b'\\').collect();
    let words = text.split(|byte| !byte.is_ascii_hexdigit() && !b".:".contains(byte));
    words.filter_map(|word| std::str::from_utf8(word).ok()).any(|word| {
        let without_port = word.split(':').next().unwrap_or_default();
        [word, without_port]
            .iter()
            .any(|text| text.parse::<IpAddr>().is_ok_and(|found| found.to_canonical() == address))
    })
}

/// The line without what is in quotes, except after `for=`; read from the left. `None` unless each quoted string is a whole
/// value, and is closed.
fn scrubbed(line: &[u8]) -> Option<Vec<u8>> {
    let mut kept = Vec::new();
    let mut bytes = line.iter().copied().peekable();
    while let Some(byte) = bytes.next() {
        kept.push(byte);
        if byte != b'"' {
            continue;
        }
        let name = kept.strip_suffix(b"=\"")?;
        let is_for = name.len() >= 3 && name[name.len() - 3..].eq_ignore_ascii_case(b"for");
        loop {
            let inside = bytes.next()?;
            let escaped = if inside == b'\\' { Some(bytes.next()?) } else { None };
            if inside == b'"' {
                break;
            }
            if is_for {
                kept.push(inside);
                kept.extend(escaped);
            }
        }
        kept.push(b'"');
        if !matches!(bytes.peek(), None | Some(b',' | b';' | b' ' | b'\t')) {
            return None;
        }
    }
    Some(kept)
}
