//! Keys: the identity of a client.

mod parse;

use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};

/// The bytes of a text that its key encodes in readable form.
const NOT_IN_TEXTS: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~')
    .remove(b':')
    .remove(b'/')
    .remove(b'@')
    .remove(b'+');

/// The maximum number of bytes of a key that needs no allocation, including the byte of its kind.
/// Enough for an address, a UUID, most names and most API keys.
const INLINE: usize = 46;

/// The identity of a client: an address, a name, an API key, or several of them
/// [joined](Self::join).
///
/// Keys of different kinds (text, address, number, joined key) are never equal. The text
/// `"1.2.3.4"` and the address `1.2.3.4` are different keys, and a joined key differs from the
/// concatenation of its parts. A key with up to 45 bytes of content needs no allocation.
///
/// A number is a `u64`. For a signed one, such as an id from a database, write
/// `Key::from(id.cast_unsigned())`. For a UUID, write `Key::from(id.as_bytes().as_slice())`.
///
/// ```
/// use std::net::{IpAddr, Ipv4Addr};
/// use tower_ratelimit::Key;
///
/// let alice = Key::from("alice");
/// let home = Key::from(IpAddr::V4(Ipv4Addr::LOCALHOST));
/// let user: i64 = 42;
/// assert_eq!(Key::from(user.cast_unsigned()), Key::from(42));
/// assert_ne!(Key::join([&alice, &home]), Key::join([&home, &alice]));
/// assert_ne!(Key::join([&Key::from("a"), &Key::from("bc")]), Key::join([&Key::from("ab"), &Key::from("c")]));
/// ```
#[derive(Clone)]
pub struct Key(Repr);

#[derive(Clone)]
enum Repr {
    Inline { len: u8, bytes: [u8; INLINE] },
    Heap(Vec<u8>),
}

/// The kind of a key, which is its first byte.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Kind {
    Everybody = b'*',
    Text = b't',
    Number = b'n',
    Ipv4 = b'4',
    Ipv6 = b'6',
    Joined = b'&',
    Within = b'@',
}

impl Key {
    /// Returns the key that all clients share, for a limit of the whole service. The extractor
    /// [`Global`](crate::Global) returns it for each request.
    pub fn global() -> Self {
        Self::short(Kind::Everybody, 0, 0)
    }

    /// Returns `true` for the key that all clients share.
    pub(crate) fn is_global(&self) -> bool {
        self.as_bytes() == [Kind::Everybody as u8]
    }

    /// Joins several keys into one. The order matters. Each part is written with its length, so
    /// different sequences of parts never result in the same key. A joined key of one part differs
    /// from that part. Joined keys can be joined again.
    pub fn join<'a>(parts: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut joined = Self::tagged(Kind::Joined, &[]);
        parts.into_iter().for_each(|part| joined.push_part(part));
        joined
    }

    /// Returns this key within an outer one, such as the user `alice` of the tenant `acme`. The
    /// result differs from both keys, and from `alice` within other tenants. For a limit of the
    /// tenant itself, use `acme` within `acme`.
    ///
    /// All keys within the same outer key are in one hash slot of a Redis Cluster, so a script can
    /// decide on several of them [together](crate::RateLimitLayer::within). Other storages treat
    /// such a key like a [joined](Self::join) one.
    ///
    /// ```
    /// use tower_ratelimit::Key;
    ///
    /// let (alice, acme) = (Key::from("alice"), Key::from("acme"));
    /// assert_eq!(alice.within(&acme).to_string(), "@:(t:acme,t:alice)");
    /// ```
    #[must_use]
    pub fn within(&self, outer: &Self) -> Self {
        let mut key = Self::tagged(Kind::Within, &[]);
        key.push_part(outer);
        key.push_part(self);
        key
    }

    /// Returns the outer key and the key within it, if this key was created by
    /// [`within`](Self::within).
    #[cfg(feature = "redis")]
    pub(crate) fn split_within(&self) -> Option<[Self; 2]> {
        let parts = self.as_bytes().strip_prefix(&[Kind::Within as u8])?;
        let (outer, rest) = split_part(parts)?;
        let (own, _) = split_part(rest)?;
        Some([outer, own].map(|bytes| {
            let mut key = Self(Repr::Inline { len: 0, bytes: [0; INLINE] });
            key.push(bytes);
            key
        }))
    }

    /// Appends a part with its length.
    fn push_part(&mut self, part: &Self) {
        let bytes = part.as_bytes();
        if let Ok(len @ ..=254) = u8::try_from(bytes.len()) {
            self.push(&[len]);
        } else {
            self.push(&[255]);
            self.push(&(bytes.len() as u64).to_le_bytes());
        }
        self.push(bytes);
    }

    /// Returns the bytes of the key: a byte for its kind, then its content. Two keys are equal if
    /// their bytes are equal. For a readable form, use [`Display`](Self#impl-Display-for-Key).
    #[inline]
    pub fn as_bytes(&self) -> &[u8] {
        match &self.0 {
            Repr::Inline { len, bytes } => &bytes[..usize::from(*len)],
            Repr::Heap(bytes) => bytes,
        }
    }

    /// Returns a key of up to 15 bytes as two words, for hashing without a loop. Different keys
    /// have different words. Returns `None` for a longer key.
    #[inline]
    pub(crate) fn as_words(&self) -> Option<[u64; 2]> {
        match &self.0 {
            // The bytes after the content are zero, and the last one is free for the length.
            Repr::Inline { len: len @ ..=15, bytes } => {
                let (words, _) = bytes.as_chunks::<8>();
                Some([u64::from_le_bytes(words[0]), u64::from_le_bytes(words[1]) | u64::from(*len) << 56])
            }
            _ => None,
        }
    }

    /// Creates a key of up to 15 bytes of content, which are the lowest of `content`. The kind and the
    /// content are stored at once, because [`as_words`](Self::as_words) would stall on a load of bytes
    /// that were just stored one by one.
    #[inline]
    fn short(kind: Kind, content: u128, content_len: u8) -> Self {
        let mut bytes = [0; INLINE];
        let (words, _) = bytes.as_chunks_mut::<16>();
        words[0] = (content << 8 | kind as u128).to_le_bytes();
        Self(Repr::Inline { len: content_len + 1, bytes })
    }

    fn tagged(kind: Kind, content: &[u8]) -> Self {
        let mut bytes = [0; INLINE];
        bytes[0] = kind as u8;
        let mut key = Self(Repr::Inline { len: 1, bytes });
        key.push(content);
        key
    }

    fn push(&mut self, more: &[u8]) {
        match &mut self.0 {
            Repr::Heap(bytes) => bytes.extend_from_slice(more),
            Repr::Inline { len, bytes } => {
                let start = usize::from(*len);
                let end = start + more.len();
                if let Some(room) = bytes.get_mut(start..end) {
                    room.copy_from_slice(more);
                    #[allow(clippy::cast_possible_truncation)] // at most INLINE
                    let longer = end as u8;
                    *len = longer;
                } else {
                    self.0 = Repr::Heap([&bytes[..start], more].concat());
                }
            }
        }
    }
}

/// Creates the same key as from a text with these bytes.
impl From<&[u8]> for Key {
    fn from(bytes: &[u8]) -> Self {
        Self::tagged(Kind::Text, bytes)
    }
}

impl From<&str> for Key {
    fn from(text: &str) -> Self {
        Self::from(text.as_bytes())
    }
}

impl From<String> for Key {
    fn from(text: String) -> Self {
        Self::from(text.as_bytes())
    }
}

impl From<&String> for Key {
    fn from(text: &String) -> Self {
        Self::from(text.as_bytes())
    }
}

impl From<u64> for Key {
    #[inline]
    fn from(number: u64) -> Self {
        Self::short(Kind::Number, number.into(), 8)
    }
}

/// Uses all bits of the address. In contrast, the extractors [`PeerIp`](crate::PeerIp) and
/// [`ClientIp`](crate::ClientIp) use the network of an IPv6 address, and convert IPv4-mapped
/// addresses to IPv4.
impl From<IpAddr> for Key {
    #[inline]
    fn from(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(v4) => v4.into(),
            IpAddr::V6(v6) => v6.into(),
        }
    }
}

impl From<Ipv4Addr> for Key {
    #[inline]
    fn from(address: Ipv4Addr) -> Self {
        Self::short(Kind::Ipv4, u32::from_le_bytes(address.octets()).into(), 4)
    }
}

impl From<Ipv6Addr> for Key {
    #[inline]
    fn from(address: Ipv6Addr) -> Self {
        Self::tagged(Kind::Ipv6, &address.octets())
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.as_bytes() == other.as_bytes()
    }
}

impl Eq for Key {}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_bytes().hash(state);
    }
}

/// Writes the key in readable form, for logs and for the names of keys on servers. Different keys
/// have different texts.
///
/// | key | text |
/// |---|---|
/// | text | `t:alice`; bytes other than ASCII letters, digits and `-._~:/@+` are percent-encoded |
/// | IPv4 address | `4:1.2.3.4` |
/// | IPv6 address | `6:2001:db8::` |
/// | number | `n:42` |
/// | joined key | `&:(t:alice,4:1.2.3.4)` |
/// | key within another one | `@:(t:acme,t:alice)` |
/// | [`Key::global`] | `*` |
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        display(self.as_bytes(), f)
    }
}

fn display(key: &[u8], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let (kind, content) = key.split_first().map_or((b'*', key), |(kind, content)| (*kind, content));
    if kind == b'*' {
        return f.write_str("*");
    }
    write!(f, "{}:", char::from(kind))?;
    match (kind, content.len()) {
        (b'4', 4) => write!(f, "{}", Ipv4Addr::from(<[u8; 4]>::try_from(content).unwrap_or_default())),
        (b'6', 16) => write!(f, "{}", Ipv6Addr::from(<[u8; 16]>::try_from(content).unwrap_or_default())),
        (b'n', 8) => write!(f, "{}", u64::from_le_bytes(content.try_into().unwrap_or_default())),
        (b'&' | b'@', _) => display_parts(content, f),
        _ => write!(f, "{}", percent_encode(content, NOT_IN_TEXTS)),
    }
}

/// Splits the first part from the others. Each part follows its length. Returns `None` after the
/// last one.
fn split_part(parts: &[u8]) -> Option<(&[u8], &[u8])> {
    let (&length, rest) = parts.split_first()?;
    let (length, rest) = match rest.split_first_chunk::<8>() {
        Some((long, rest)) if length == 255 => (usize::try_from(u64::from_le_bytes(*long)).unwrap_or(usize::MAX), rest),
        _ => (length.into(), rest),
    };
    Some(rest.split_at(length.min(rest.len())))
}

/// Writes the parts of a joined key.
fn display_parts(mut parts: &[u8], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let mut before = "(";
    while let Some((part, rest)) = split_part(parts) {
        f.write_str(before)?;
        display(part, f)?;
        (before, parts) = (",", rest);
    }
    f.write_str(if before == "(" { "()" } else { ")" })
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key(\"{}\")", self.as_bytes().escape_ascii())
    }
}
