use std::borrow::Cow;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use http::HeaderName;
use http::header::FORWARDED;

/// The names of the fields in which proxies write the address of the client.
pub(super) const FORWARDING_NAMES: [&str; 4] = ["forwarded", "x-forwarded-for", "x-real-ip", "cf-connecting-ip"];

/// The fields in which proxies write the address of the client.
pub(crate) const FORWARDING: [HeaderName; 4] = [
    FORWARDED,
    HeaderName::from_static(FORWARDING_NAMES[1]),
    HeaderName::from_static(FORWARDING_NAMES[2]),
    HeaderName::from_static(FORWARDING_NAMES[3]),
];

/// How a field that proxies write is to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Grammar {
    /// Addresses separated by commas: `X-Forwarded-For` and its like.
    List,
    /// Elements of parameters: `Forwarded`, RFC 7239.
    Forwarded,
}

/// The entries of one field line from the right. One that is no address is `None`.
///
/// What stands on the left may be the client's, and what stands on the right is the proxies'. So nothing on the left is
/// looked at before it is asked for, and how the right is read does not depend on it: a quote that the client opens and
/// never closes cannot swallow what a proxy adds.
#[derive(Debug)]
pub(super) struct Entries<'a> {
    /// What is left of the entries that were read; `None` after the first one of the line.
    rest: Option<&'a [u8]>,
    grammar: Grammar,
}

impl<'a> Entries<'a> {
    pub(super) fn of(line: &'a [u8], grammar: Grammar) -> Self {
        Self { rest: Some(line), grammar }
    }
}

impl Iterator for Entries<'_> {
    type Item = Option<IpAddr>;

    fn next(&mut self) -> Option<Self::Item> {
        let line = self.rest.take()?;
        Some(match self.grammar {
            Grammar::List => {
                let (rest, entry) = match line.iter().rposition(|byte| *byte == b',') {
                    Some(comma) => (Some(&line[..comma]), &line[comma + 1..]),
                    None => (None, line),
                };
                self.rest = rest;
                address(unquoted(trimmed(entry)), Ports::Numbers)
            }
            Grammar::Forwarded => match split_last(line, b',') {
                Some((rest, element)) => {
                    self.rest = rest;
                    forwarded_for(element)
                }
                None => None,
            },
        })
    }
}

/// The address of an element, `for=192.0.2.60;proto=http`. It must have exactly one `for`, and nothing that is no parameter.
fn forwarded_for(element: &[u8]) -> Option<IpAddr> {
    let mut found = None;
    let mut rest = Some(element);
    while let Some(text) = rest {
        let (before, parameter) = split_last(text, b';')?;
        rest = before;
        let parameter = trimmed(parameter);
        if parameter.is_empty() {
            continue;
        }
        let (name, value) = name_and_value(parameter)?;
        if name.eq_ignore_ascii_case(b"for") && found.replace(value).is_some() {
            return None;
        }
    }
    address(&found?, Ports::NumbersAndNames)
}

/// Splits at the last delimiter that does not stand in quotes: what is before it, if there is one, and what is after it.
/// `None` when a quote stands where none can be.
///
/// Read from the right, the quote that is met first closes a string, and the next one without a backslash before it opens it:
/// before the opening quote stands `=`, and all quotes inside are escaped. So this is what a reader from the left finds, of
/// whatever is well-formed.
fn split_last(text: &[u8], delimiter: u8) -> Option<(Option<&[u8]>, &[u8])> {
    let mut at = text.len();
    while let Some(before) = at.checked_sub(1) {
        at = before;
        if text[at] == delimiter {
            return Some((Some(&text[..at]), &text[at + 1..]));
        }
        if text[at] == b'"' {
            at = opening_quote(&text[..at])?;
        }
    }
    Some((None, text))
}

fn opening_quote(text: &[u8]) -> Option<usize> {
    (0..text.len()).rev().find(|at| text[*at] == b'"' && !text[..*at].ends_with(b"\\"))
}

/// The parts of `name=value` or `name="value"`, unescaped. A value without quotes may hold what RFC 7239 would have in
/// quotes, such as a colon: proxies write that, and it cannot be taken for anything else.
fn name_and_value(parameter: &[u8]) -> Option<(&[u8], Cow<'_, [u8]>)> {
    let equals = parameter.iter().position(|byte| *byte == b'=')?;
    let (name, value) = (&parameter[..equals], &parameter[equals + 1..]);
    if name.is_empty() || !name.iter().copied().all(is_token) {
        return None;
    }
    let value = match value {
        [b'"', inside @ ..] => unescaped(inside)?,
        plain if plain.contains(&b'"') => return None,
        plain => Cow::Borrowed(plain),
    };
    Some((name, value))
}

/// What stands in a quoted string whose opening quote has been read; `None` unless the closing quote is the last byte.
fn unescaped(text: &[u8]) -> Option<Cow<'_, [u8]>> {
    let (closing, inside) = text.split_last()?;
    if *closing != b'"' {
        return None;
    }
    if !inside.iter().any(|byte| matches!(byte, b'"' | b'\\')) {
        return Some(Cow::Borrowed(inside));
    }
    let mut plain = Vec::with_capacity(inside.len());
    let mut bytes = inside.iter();
    while let Some(byte) = bytes.next() {
        plain.push(match byte {
            b'"' => return None,
            b'\\' => *bytes.next()?,
            other => *other,
        });
    }
    Some(Cow::Owned(plain))
}

/// What may follow an address after a colon.
#[derive(Clone, Copy)]
enum Ports {
    Numbers,
    /// Also `_` and a name, which hides the number.
    NumbersAndNames,
}

/// The address of `1.2.3.4`, `1.2.3.4:80`, `2001:db8::1`, `[2001:db8::1]` or `[2001:db8::1]:80`; an IPv4-mapped one as IPv4.
fn address(text: &[u8], ports: Ports) -> Option<IpAddr> {
    let text = str::from_utf8(text).ok()?;
    let (address, port): (IpAddr, &str) = if let Some(bracketed) = text.strip_prefix('[') {
        let (v6, port) = bracketed.split_once(']')?;
        (v6.parse::<Ipv6Addr>().ok()?.into(), port)
    } else if let Ok(address) = text.parse() {
        (address, "")
    } else {
        let (v4, port) = text.split_at(text.find(':')?);
        (v4.parse::<Ipv4Addr>().ok()?.into(), port)
    };
    let port_is_fine = port.is_empty() || port.strip_prefix(':').is_some_and(|port| is_port(port, ports));
    port_is_fine.then(|| address.to_canonical())
}

fn is_port(text: &str, ports: Ports) -> bool {
    match (ports, text.strip_prefix('_')) {
        (Ports::NumbersAndNames, Some(name)) => {
            !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
        }
        _ => text.bytes().all(|byte| byte.is_ascii_digit()) && text.len() <= 5 && text.parse::<u16>().is_ok(),
    }
}

/// Without the spaces and tabs around it.
fn trimmed(mut text: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', inside @ ..] | [inside @ .., b' ' | b'\t'] = text {
        text = inside;
    }
    text
}

/// Without the double quotes around it.
fn unquoted(text: &[u8]) -> &[u8] {
    match text {
        [b'"', inside @ .., b'"'] => inside,
        other => other,
    }
}

/// Whether a byte may stand in a token, such as the name of a parameter.
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}
