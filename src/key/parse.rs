//! Keys from their texts, for the names of keys on servers.

use std::net::{Ipv4Addr, Ipv6Addr};

use percent_encoding::percent_decode_str;

use super::Key;

impl Key {
    /// Returns the key that [`Display`](std::fmt::Display) writes as `text`, or `None` if there is none.
    pub(crate) fn from_text(text: &str) -> Option<Self> {
        parse(text).filter(|key| key.to_string() == text)
    }
}

fn parse(text: &str) -> Option<Key> {
    if text == "*" {
        return Some(Key::global());
    }
    let (kind, content) = text.split_once(':')?;
    Some(match kind {
        "t" => Key::from(&*percent_decode_str(content).collect::<Vec<u8>>()),
        "n" => content.parse::<u64>().ok()?.into(),
        "4" => content.parse::<Ipv4Addr>().ok()?.into(),
        "6" => content.parse::<Ipv6Addr>().ok()?.into(),
        "&" => Key::join(&parts(content)?),
        "@" => {
            let [outer, own] = <[Key; 2]>::try_from(parts(content)?).ok()?;
            own.within(&outer)
        }
        _ => return None,
    })
}

/// Parses the parts of a joined key. Their texts encode parentheses and commas.
fn parts(content: &str) -> Option<Vec<Key>> {
    let mut rest = content.strip_prefix('(')?.strip_suffix(')')?;
    let mut parts = Vec::new();
    while !rest.is_empty() {
        let mut depth = 0_usize;
        let end = rest.find(|c| {
            depth = if c == '(' { depth + 1 } else { depth.saturating_sub(usize::from(c == ')')) };
            c == ',' && depth == 0
        });
        let (part, others) = rest.split_at(end.unwrap_or(rest.len()));
        parts.push(parse(part)?);
        rest = others.strip_prefix(',').unwrap_or_default();
    }
    Some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_read_as_written() {
        let [a, b] = ["a", "b, (c)|}{#%"].map(Key::from);
        let addresses = [Key::from(Ipv4Addr::LOCALHOST), Key::from(Ipv6Addr::LOCALHOST)];
        let joined = Key::join([&a, &Key::join([&b, &addresses[1]]), &Key::global()]);
        let within = joined.within(&b.within(&a));
        let keys = [Key::global(), Key::from(""), Key::from(&[0xff, 0][..]), 7.into(), Key::join([]), Key::join([&a])];
        for key in keys.into_iter().chain(addresses).chain([a, b, joined, within]) {
            assert_eq!(Key::from_text(&key.to_string()), Some(key));
        }
    }

    #[test]
    fn other_texts_are_no_keys() {
        for text in
            ["", "a", "t", "x:a", "n:", "n:+7", "n:07", "4:1", "t:a#b", "&:", "&:(", "&:(t:a,)", "@:(t:a)", "t:%61"]
        {
            assert_eq!(Key::from_text(text), None, "{text}");
        }
    }
}
