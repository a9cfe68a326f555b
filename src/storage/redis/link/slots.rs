//! Which node of a cluster holds which key.

use redis::{Arg, Cmd, Value};

use crate::storage::net::Usable;
use crate::storage::url::Host;

/// How many slots a cluster has.
const SLOTS: u16 = 16_384;

/// The nodes that hold the slots: ranges in order, each with its last slot.
pub(super) struct Slots(Vec<Range>);

struct Range {
    first: u16,
    last: u16,
    host: Host,
}

impl Usable for Slots {}

impl Slots {
    /// From the reply to `CLUSTER SLOTS` of the node at `asked`; nothing when it cannot be read, or says of no slot where it is.
    pub(super) fn read(reply: &Value, asked: &Host) -> Option<Self> {
        let Value::Array(ranges) = reply else { return None };
        let mut ranges = ranges.iter().map(|range| Range::read(range, asked)).collect::<Option<Vec<_>>>()?;
        ranges.sort_unstable_by_key(|range| range.last);
        (!ranges.is_empty()).then_some(Self(ranges))
    }

    /// The node that holds this slot, if one does.
    pub(super) fn holder(&self, slot: u16) -> Option<&Host> {
        let range = self.0.get(self.0.partition_point(|range| range.last < slot))?;
        (range.first <= slot).then_some(&range.host)
    }

    /// Whether there is no slot without a node.
    pub(super) fn is_whole(&self) -> bool {
        let ends = self.0.iter().try_fold(0, |next, range| (range.first == next).then_some(range.last + 1));
        ends == Some(SLOTS)
    }

    /// The nodes that hold slots, each once.
    pub(super) fn holders(&self) -> Vec<&Host> {
        let mut hosts: Vec<&Host> = self.0.iter().map(|range| &range.host).collect();
        hosts.sort_unstable_by_key(|host| (&host.name, host.port));
        hosts.dedup();
        hosts
    }

    /// A key in a slot of each node. There are enough names for a node that holds one slot; one that holds none has no key.
    pub(super) fn name_on_each(&self, name: impl Fn(u32) -> String) -> Vec<String> {
        let mut hosts = self.holders();
        let mut names = Vec::with_capacity(hosts.len());
        for name in (0..64 * u32::from(SLOTS)).map(name) {
            let Some(holder) = self.holder(slot(name.as_bytes())) else { continue };
            if let Some(at) = hosts.iter().position(|host| *host == holder) {
                hosts.swap_remove(at);
                names.push(name);
            }
            if hosts.is_empty() {
                break;
            }
        }
        names
    }
}

impl Range {
    fn read(range: &Value, asked: &Host) -> Option<Self> {
        let Value::Array(parts) = range else { return None };
        let [Value::Int(first), Value::Int(last), Value::Array(primary), ..] = parts.as_slice() else { return None };
        let [name, Value::Int(port), ..] = primary.as_slice() else { return None };
        let name = match name {
            Value::BulkString(bytes) => str::from_utf8(bytes).ok()?,
            Value::SimpleString(text) => text,
            _ => "",
        };
        // A node that does not know its own address says nothing, or "?": it is where it was asked.
        let name = if matches!(name, "" | "?") { &asked.name } else { name };
        let host = Host { name: name.to_owned(), port: u16::try_from(*port).ok()? };
        let slot = |number: i64| u16::try_from(number).ok().filter(|slot| *slot < SLOTS);
        Some(Self { first: slot(*first)?, last: slot(*last)?, host })
    }
}

/// The slot of the command's first key; without a key any.
pub(super) fn slot_of(command: &Cmd) -> u16 {
    let mut arguments = command.args_iter().map(|argument| match argument {
        Arg::Simple(bytes) => bytes,
        _ => b"",
    });
    let name = arguments.next().unwrap_or_default();
    let scripted = name.eq_ignore_ascii_case(b"EVALSHA") || name.eq_ignore_ascii_case(b"EVAL");
    let key = arguments.nth(if scripted { 2 } else { 0 }).unwrap_or_default();
    slot(key)
}

/// CRC16 (XMODEM) of the key, or of what stands in its first braces, as the specification of Redis Cluster says.
fn slot(key: &[u8]) -> u16 {
    let tag = || {
        let inside = &key[key.iter().position(|byte| *byte == b'{')? + 1..];
        let end = inside.iter().position(|byte| *byte == b'}')?;
        (end > 0).then_some(&inside[..end])
    };
    let crc = tag().unwrap_or(key).iter().fold(0, |crc: u16, byte| {
        (0..8).fold(
            crc ^ (u16::from(*byte) << 8),
            |crc, _| {
                if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 }
            },
        )
    });
    crc % SLOTS
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values that `CLUSTER KEYSLOT` of a server says, and the one of the specification.
    #[test]
    fn slots_are_those_of_the_specification() {
        assert_eq!(slot(b"123456789"), 0x31c3);
        assert_eq!(slot(b"foo"), 12_182);
        assert_eq!(slot(b"a{foo}b{c}"), 12_182);
        assert_eq!(slot(b"{}foo"), slot(b"{}foo"));
        assert_ne!(slot(b"{}foo"), 12_182, "empty braces are no tag");
        let mut command = redis::cmd("evalsha");
        assert_eq!(slot_of(command.arg("sha").arg(1).arg("{foo}1").arg("bar")), 12_182);
        assert_eq!(slot_of(redis::cmd("GET").arg("foo")), 12_182);
    }

    #[test]
    fn holes_are_seen() {
        let range = |first, last, port| Range { first, last, host: Host { name: "h".to_owned(), port } };
        let whole = Slots(vec![range(0, 9, 1), range(10, 16_383, 2)]);
        assert!(whole.is_whole() && whole.holder(9).unwrap().port == 1 && whole.holder(10).unwrap().port == 2);
        let holes = Slots(vec![range(0, 9, 1), range(11, 16_383, 2)]);
        assert!(!holes.is_whole() && holes.holder(10).is_none() && holes.holder(11).is_some());
    }
}
