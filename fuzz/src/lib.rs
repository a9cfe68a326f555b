//! Properties of [`ClientIp`] that must hold for all inputs. Run by `scripts/fuzz`.
//!
//! The first line of an input is the field of the client. The other lines, if any, are the fields
//! that proxies append on the right.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use http::{HeaderName, HeaderValue, Request};
use tower_ratelimit::ClientIp;
use tower_ratelimit::extract::Head;

const PEER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));

/// Checks one kind of header field.
#[derive(Debug)]
pub struct Reader {
    name: HeaderName,
    forwarded: bool,
    extractors: Vec<ClientIp>,
}

impl Reader {
    /// Creates a checker of `X-Forwarded-For`.
    pub fn x_forwarded_for() -> Self {
        Self { name: HeaderName::from_static("x-forwarded-for"), forwarded: false, extractors: extractors() }
    }

    /// Creates a checker of `Forwarded`.
    pub fn forwarded() -> Self {
        let extractors = extractors().into_iter().map(ClientIp::forwarded).collect();
        Self { name: http::header::FORWARDED, forwarded: true, extractors }
    }

    /// Checks all properties for an input.
    ///
    /// # Panics
    ///
    /// Panics if a property does not hold.
    pub fn check(&self, input: &[u8]) {
        let mut lines = input.split(|byte| *byte == b'\n').map(valid_bytes);
        let client = lines.next().unwrap_or_default();
        let right: Vec<Vec<u8>> = lines.collect();
        for extractor in &self.extractors {
            let all: Vec<&[u8]> = std::iter::once(&client).chain(&right).map(|line| &**line).collect();
            let address = self.address(extractor, &all);
            assert!(address == PEER || contains(&all, address), "{address} is not in the input");
            let unquoted: Option<Vec<Vec<u8>>> = all.iter().map(|line| without_quoted(line)).collect();
            if let Some(unquoted) = unquoted.filter(|_| self.forwarded) {
                let unquoted: Vec<&[u8]> = unquoted.iter().map(|line| &**line).collect();
                assert_eq!(self.address(extractor, &unquoted), address, "quoted text was parsed");
            }
            if let Some((first, others)) = right.split_first() {
                self.check_left_text(extractor, &client, first, others);
            }
        }
    }

    /// Checks that text on the left is ignored if the address comes from `first` or from the right
    /// of it.
    fn check_left_text(&self, extractor: &ClientIp, client: &[u8], first: &[u8], others: &[Vec<u8>]) {
        let with = |left: &[u8], comma: &[u8]| {
            let joined = [left, comma, first].concat();
            let lines: Vec<&[u8]> = std::iter::once(&*joined).chain(others.iter().map(|line| &**line)).collect();
            self.address(extractor, &lines)
        };
        let probes: [&[u8]; 2] = if self.forwarded {
            [b"for=203.0.113.77", b"for=198.51.100.77"]
        } else {
            [b"203.0.113.77", b"198.51.100.77"]
        };
        let [address, other] = probes.map(|probe| with(probe, b","));
        // Text on the left can change the meaning of an unbalanced quote. No proxy writes one.
        if address != other || self.forwarded && without_quoted(first).is_none() {
            return;
        }
        for comma in [&b","[..], b", ", b" ,\t"] {
            assert_eq!(with(client, comma), address, "joined by {:?}", comma.escape_ascii().to_string());
        }
        let lines: Vec<&[u8]> = [client, first].into_iter().chain(others.iter().map(|line| &**line)).collect();
        assert_eq!(self.address(extractor, &lines), address, "in separate lines");
    }

    fn address(&self, extractor: &ClientIp, lines: &[&[u8]]) -> IpAddr {
        let mut request = Request::new(());
        request.extensions_mut().insert(SocketAddr::new(PEER, 443));
        for line in lines {
            let value = HeaderValue::from_bytes(line).expect("invalid bytes were removed");
            request.headers_mut().append(self.name.clone(), value);
        }
        extractor.address(&Head::from_request(&request)).expect("the request has a peer")
    }
}

fn extractors() -> Vec<ClientIp> {
    let networks = ClientIp::behind(["10.0.0.0/8", "fd00::/8"]).expect("the networks are valid");
    (1..=3).map(ClientIp::behind_hops).chain([networks]).collect()
}

/// Removes the bytes that are invalid in a header field.
fn valid_bytes(line: &[u8]) -> Vec<u8> {
    line.iter().copied().filter(|byte| HeaderValue::from_bytes(&[*byte]).is_ok()).collect()
}

/// Returns `true` if the text contains the address. Ignores backslashes.
fn contains(lines: &[&[u8]], address: IpAddr) -> bool {
    let text: Vec<u8> = lines.join(&b","[..]).into_iter().filter(|byte| *byte != b'\\').collect();
    let words = text.split(|byte| !byte.is_ascii_hexdigit() && !b".:".contains(byte));
    words.filter_map(|word| std::str::from_utf8(word).ok()).any(|word| {
        let without_port = word.split(':').next().unwrap_or_default();
        [word, without_port]
            .iter()
            .any(|text| text.parse::<IpAddr>().is_ok_and(|found| found.to_canonical() == address))
    })
}

/// Removes the text in quotes from a line, except after `for=`. Returns `None` if a quoted string
/// is not closed, or is only a part of a value.
fn without_quoted(line: &[u8]) -> Option<Vec<u8>> {
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
