//! Reads the fields in which proxies report their peers, from the right.
//!
//! In `Forwarded`, a quote that is met from the right closes a string, and the next one without a
//! backslash before it opens the string. A parser from the left finds the same in any well-formed
//! field.

use std::borrow::Cow;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use http::HeaderName;
use http::header::FORWARDED;

/// The names of the header fields in which proxies write the address of the client.
pub(super) const FORWARDING_NAMES: [&str; 4] = ["forwarded", "x-forwarded-for", "x-real-ip", "cf-connecting-ip"];

/// The header fields in which proxies write the address of the client.
pub(crate) const FORWARDING: [HeaderName; 4] = [
    FORWARDED,
    HeaderName::from_static(FORWARDING_NAMES[1]),
    HeaderName::from_static(FORWARDING_NAMES[2]),
    HeaderName::from_static(FORWARDING_NAMES[3]),
];

/// The syntax of a forwarding field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Grammar {
    /// Addresses separated by commas: `X-Forwarded-For` and similar fields.
    List,
    /// Elements with parameters: `Forwarded`, RFC 7239.
    Forwarded,
}

/// Iterates over the entries of one field line from the right. An entry that is not an address is
/// `None`.
///
/// The left part of the line may come from the client. The right part comes from the proxies, and
/// its result must not depend on the left part. So the line is parsed lazily from the right. For
/// example, an unclosed quote of the client cannot hide the entry of a proxy.
#[derive(Debug)]
pub(super) struct ForwardedEntries<'a> {
    /// The unread left part of the line. `None` after the leftmost entry.
    rest: Option<&'a [u8]>,
    grammar: Grammar,
}

impl<'a> ForwardedEntries<'a> {
    pub(super) fn of(line: &'a [u8], grammar: Grammar) -> Self {
        Self { rest: Some(line), grammar }
    }
}

impl Iterator for ForwardedEntries<'_> {
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

/// Returns the address of an element such as `for=192.0.2.60;proto=http`. The element must have
/// exactly one `for`, and only valid parameters.
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

/// Splits at the last delimiter outside of quotes. Returns the part before the delimiter, if there
/// is one, and the part after it. Returns `None` if a quoted string has no opening quote.
///
/// The scan goes from the right. The first quote that it finds closes a string. The next quote that
/// has no backslash before it opens this string, because an opening quote follows `=`, and quotes
/// inside a string are escaped. So for well-formed input, the result equals the result of a scan
/// from the left.
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

/// Splits `name=value` or `name="value"` and unescapes the value. A value without quotes may
/// contain characters that RFC 7239 requires to be quoted, such as a colon, because proxies send
/// them and they are unambiguous.
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

/// Unescapes a quoted string after its opening quote. Returns `None` if the closing quote is not
/// the last byte.
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

/// The syntax of the port after an address.
#[derive(Clone, Copy)]
enum Ports {
    Numbers,
    /// Numbers, or an obfuscated port: `_` and a name.
    NumbersAndNames,
}

/// Parses `1.2.3.4`, `1.2.3.4:80`, `2001:db8::1`, `[2001:db8::1]` or `[2001:db8::1]:80`. Returns an
/// IPv4-mapped address as IPv4.
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

/// Removes spaces and tabs from both ends.
fn trimmed(mut text: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', inside @ ..] | [inside @ .., b' ' | b'\t'] = text {
        text = inside;
    }
    text
}

/// Removes surrounding double quotes.
fn unquoted(text: &[u8]) -> &[u8] {
    match text {
        [b'"', inside @ .., b'"'] => inside,
        other => other,
    }
}

/// Returns `true` if the byte is allowed in a token, such as the name of a parameter.
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}
