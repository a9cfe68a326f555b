//! Lists of Structured Fields ([RFC 9651](https://www.rfc-editor.org/rfc/rfc9651)), as in the fields of
//! `ietf.rs`.
//!
//! A crate for Structured Fields would add a dependency to every build for a check of one hundred
//! lines. The tests compare the parser with such a crate, and with the cases of the HTTP working
//! group.

/// The padding of byte sequences at their end, `=` or `==`. Writers must add it. Readers should not fail
/// without it (RFC 9651, section 4.2.7).
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Padding {
    Required,
    #[cfg(feature = "client")]
    Optional,
}

/// Returns `true` if the line is a non-empty list of strings with optional parameters, as in
/// `"a";r=1, "b"`. Calls `parameter` with the position of the member, the name and the value of
/// each parameter that it has read. The value is empty if the parameter has none.
///
/// If one member is invalid, a client ignores the whole field, including the valid members.
pub(crate) fn is_list_of_strings<'a>(
    line: &'a [u8],
    padding: Padding,
    mut parameter: impl FnMut(usize, &'a [u8], &'a [u8]),
) -> bool {
    let mut reader = Reader { rest: line, padding };
    reader.take_while(|byte| byte == b' ');
    for member in 0.. {
        let read = |name, value| parameter(member, name, value);
        if reader.string().and_then(|()| reader.parameters(read)).is_none() {
            return false;
        }
        reader.skip_white_space();
        if reader.rest.is_empty() {
            return true;
        }
        if !reader.skip(b',') {
            return false;
        }
        reader.skip_white_space();
    }
    unreachable!("a line ends")
}

/// The unread text. The methods that parse an item return `None` if the text does not match.
struct Reader<'a> {
    rest: &'a [u8],
    padding: Padding,
}

impl<'a> Reader<'a> {
    fn skip(&mut self, byte: u8) -> bool {
        let found = self.rest.first() == Some(&byte);
        if found {
            self.rest = &self.rest[1..];
        }
        found
    }

    fn skip_white_space(&mut self) {
        while self.skip(b' ') || self.skip(b'\t') {}
    }

    fn next(&mut self) -> Option<u8> {
        let (&byte, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(byte)
    }

    fn take_while(&mut self, allowed: impl Fn(u8) -> bool) -> &'a [u8] {
        let end = self.rest.iter().position(|&byte| !allowed(byte)).unwrap_or(self.rest.len());
        let (taken, rest) = self.rest.split_at(end);
        self.rest = rest;
        taken
    }

    fn parameters(&mut self, mut parameter: impl FnMut(&'a [u8], &'a [u8])) -> Option<()> {
        while self.skip(b';') {
            self.take_while(|byte| byte == b' ');
            let name = self.read(Self::key)?;
            let value = if self.skip(b'=') { self.read(Self::bare_item)? } else { b"" };
            parameter(name, value);
        }
        Some(())
    }

    /// Returns the text that `item` has parsed.
    fn read(&mut self, item: impl FnOnce(&mut Self) -> Option<()>) -> Option<&'a [u8]> {
        let before = self.rest;
        item(self)?;
        Some(&before[..before.len() - self.rest.len()])
    }

    fn key(&mut self) -> Option<()> {
        let first = self.next()?;
        self.take_while(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_-.*".contains(&byte));
        (first.is_ascii_lowercase() || first == b'*').then_some(())
    }

    fn bare_item(&mut self) -> Option<()> {
        match self.rest.first()? {
            b'"' => self.string(),
            b'-' | b'0'..=b'9' => self.number().map(drop),
            b'@' => {
                self.next();
                self.number().filter(|is_integer| *is_integer).map(drop)
            }
            b'?' => {
                self.next();
                matches!(self.next()?, b'0' | b'1').then_some(())
            }
            b':' => self.bytes(),
            b'%' => self.display_string(),
            first if first.is_ascii_alphabetic() || *first == b'*' => {
                self.take_while(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~:/".contains(&byte));
                Some(())
            }
            _ => None,
        }
    }

    fn string(&mut self) -> Option<()> {
        (self.next()? == b'"').then_some(())?;
        loop {
            match self.next()? {
                b'"' => return Some(()),
                b'\\' => matches!(self.next()?, b'"' | b'\\').then_some(())?,
                b' '..=b'~' => {}
                _ => return None,
            }
        }
    }

    /// Returns `true` for an integer and `false` for a decimal.
    fn number(&mut self) -> Option<bool> {
        self.skip(b'-');
        let digits = |reader: &mut Self| reader.take_while(|byte| byte.is_ascii_digit()).len();
        let whole = digits(self);
        if !self.skip(b'.') {
            return (1..=15).contains(&whole).then_some(true);
        }
        let places = digits(self);
        ((1..=12).contains(&whole) && (1..=3).contains(&places)).then_some(false)
    }

    /// Parses a byte sequence: base64 between colons.
    fn bytes(&mut self) -> Option<()> {
        self.next();
        let text = self.take_while(|byte| byte.is_ascii_alphanumeric() || b"+/=".contains(&byte));
        let padding = text.iter().rev().take_while(|&&byte| byte == b'=').count();
        let data = &text[..text.len() - padding];
        let missing = data.len().wrapping_neg() % 4;
        let is_whole = missing <= 2 && padding <= missing && !data.contains(&b'=');
        let is_padded = padding == missing || self.padding != Padding::Required;
        (self.skip(b':') && is_whole && is_padded).then_some(())
    }

    /// Parses a display string: UTF-8 in quotes after a percent sign, with lowercase
    /// percent-encoding.
    fn display_string(&mut self) -> Option<()> {
        self.next();
        self.skip(b'"').then_some(())?;
        let mut text = Vec::new();
        loop {
            match self.next()? {
                b'"' => return std::str::from_utf8(&text).ok().map(drop),
                b'%' => {
                    let digit = |byte: u8| if byte.is_ascii_uppercase() { None } else { char::from(byte).to_digit(16) };
                    let (high, low) = (digit(self.next()?)?, digit(self.next()?)?);
                    text.push(u8::try_from(high * 16 + low).ok()?);
                }
                byte @ b' '..=b'~' => text.push(byte),
                _ => return None,
            }
        }
    }
}
