//! The slot map of a cluster, and the slot of a key.

use redis::{Arg, Cmd, Value};

use crate::storage::net::Usable;
use crate::storage::url::Host;

/// The number of slots in a cluster.
const SLOT_COUNT: u16 = 16_384;

/// The map from slots to nodes, as ranges in the order of their slots.
pub(super) struct Slots(Vec<Range>);

struct Range {
    first: u16,
    last: u16,
    host: Host,
}

impl Usable for Slots {}

impl Slots {
    /// Parses the reply of the node at `asked` to `CLUSTER SLOTS`. Returns `None` if the reply is
    /// malformed or has no slots.
    pub(super) fn parse(reply: &Value, asked: &Host) -> Option<Self> {
        let Value::Array(ranges) = reply else { return None };
        let mut ranges = ranges.iter().map(|range| Range::parse(range, asked)).collect::<Option<Vec<_>>>()?;
        ranges.sort_unstable_by_key(|range| range.last);
        (!ranges.is_empty()).then_some(Self(ranges))
    }

    /// Returns the node that holds a slot.
    pub(super) fn holder(&self, slot: u16) -> Option<&Host> {
        let range = self.0.get(self.0.partition_point(|range| range.last < slot))?;
        (range.first <= slot).then_some(&range.host)
    }

    /// Returns `true` if every slot has a node.
    pub(super) fn is_complete(&self) -> bool {
        let ends = self.0.iter().try_fold(0, |next, range| (range.first == next).then_some(range.last + 1));
        ends == Some(SLOT_COUNT)
    }

    /// Returns the nodes that hold slots, without duplicates.
    pub(super) fn holders(&self) -> Vec<&Host> {
        let mut hosts: Vec<&Host> = self.0.iter().map(|range| &range.host).collect();
        hosts.sort_unstable_by_key(|host| (&host.name, host.port));
        hosts.dedup();
        hosts
    }

    /// Returns a key in a slot of each node. `name` returns a different candidate for each number.
    ///
    /// Tries up to 64 candidates per slot, which is enough to find a key of a node with a single
    /// slot.
    pub(super) fn key_on_each(&self, name: impl Fn(u32) -> String) -> Vec<String> {
        let mut hosts = self.holders();
        let mut keys = Vec::with_capacity(hosts.len());
        for key in (0..64 * u32::from(SLOT_COUNT)).map(name) {
            let Some(holder) = self.holder(slot(key.as_bytes())) else { continue };
            if let Some(at) = hosts.iter().position(|host| *host == holder) {
                hosts.swap_remove(at);
                keys.push(key);
            }
            if hosts.is_empty() {
                break;
            }
        }
        keys
    }
}

impl Range {
    fn parse(range: &Value, asked: &Host) -> Option<Self> {
        let Value::Array(parts) = range else { return None };
        let [Value::Int(first), Value::Int(last), Value::Array(primary), ..] = parts.as_slice() else { return None };
        let [name, Value::Int(port), ..] = primary.as_slice() else { return None };
        let name = match name {
            Value::BulkString(bytes) => str::from_utf8(bytes).ok()?,
            Value::SimpleString(text) => text,
            _ => "",
        };
        // NULL (read as "" above) means the endpoint that was asked. The name is empty if a node does
        // not know its own address, and "?" if it should have a hostname and has none. The best guess
        // is then the asked host, too.
        let name = if matches!(name, "" | "?") { &asked.name } else { name };
        let host = Host { name: name.to_owned(), port: u16::try_from(*port).ok()? };
        let slot = |number: i64| u16::try_from(number).ok().filter(|slot| *slot < SLOT_COUNT);
        Some(Self { first: slot(*first)?, last: slot(*last)?, host })
    }
}

/// Returns the slot of the command's first key. The slot of a command without a key is arbitrary.
pub(super) fn slot_of(command: &Cmd) -> u16 {
    let mut arguments = command.args_iter().map(|argument| match argument {
        Arg::Simple(bytes) => bytes,
        _ => b"",
    });
    let name = arguments.next().unwrap_or_default();
    let is_script = name.eq_ignore_ascii_case(b"EVALSHA") || name.eq_ignore_ascii_case(b"EVAL");
    let key = arguments.nth(if is_script { 2 } else { 0 }).unwrap_or_default();
    slot(key)
}

/// Returns the slot of a key, as the specification of Redis Cluster defines it: the CRC16 (XMODEM)
/// of the key's hash tag, or of the whole key if it has none.
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
    crc % SLOT_COUNT
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected values are from the specification and from `CLUSTER KEYSLOT`.
    #[test]
    fn slots_match_the_specification() {
        assert_eq!(slot(b"123456789"), 0x31c3);
        assert_eq!(slot(b"foo"), 12_182);
        assert_eq!(slot(b"a{foo}b{c}"), 12_182);
        assert_eq!(slot(b"{}foo"), slot(b"{}foo"));
        assert_ne!(slot(b"{}foo"), 12_182, "empty braces are not a hash tag");
        let mut command = redis::cmd("evalsha");
        assert_eq!(slot_of(command.arg("sha").arg(1).arg("{foo}1").arg("bar")), 12_182);
        assert_eq!(slot_of(redis::cmd("GET").arg("foo")), 12_182);
    }

    #[test]
    fn slots_without_a_node_are_detected() {
        let range = |first, last, port| Range { first, last, host: Host { name: "h".to_owned(), port } };
        let complete = Slots(vec![range(0, 9, 1), range(10, 16_383, 2)]);
        assert!(
            complete.is_complete() && complete.holder(9).unwrap().port == 1 && complete.holder(10).unwrap().port == 2
        );
        let incomplete = Slots(vec![range(0, 9, 1), range(11, 16_383, 2)]);
        assert!(!incomplete.is_complete() && incomplete.holder(10).is_none() && incomplete.holder(11).is_some());
    }
}
