//! Reads and writes the binary records of states without the library.

use common::servers::{Reply, Server};

/// Returns the first four bytes of the tag's MD5, whose highest bit is 1 for a moving window.
fn digest(tag: &str) -> u32 {
    let [a, b, c, d, ..] = md5::compute(tag).0;
    let hash = u32::from_be_bytes([a, b, c, d]);
    if tag.contains("moving-window") { hash | 1 << 31 } else { hash & !(1 << 31) }
}

/// Returns the numbers of the records with these tags, in the order of the records. The first number
/// of a record is the instant at which it expires.
pub(super) fn read(server: &Server, key: &str, tags: &[String]) -> Vec<(String, Vec<u64>)> {
    let script = "local stored, at, answer = redis.call('GET', KEYS[1]) or '', 1, {}
        while at <= #stored do
            local digest = struct.unpack('>I4', stored, at)
            local format = digest < 2147483648 and '>I4I8I4I4' or '>I4I8I4I8I4I4I4I4I4'
            local record = { struct.unpack(format, stored, at) }
            at = record[#record]
            record[#record] = nil
            for index, number in ipairs(record) do record[index] = string.format('%.0f', number) end
            answer[#answer + 1] = table.concat(record, ' ')
        end
        return answer";
    let Reply::List(records) = server.ask(&["EVAL", script, "1", key]) else { panic!("no list") };
    let named = records.iter().map(|record| {
        let numbers: Vec<u64> = record.to_string().split(' ').map(|number| number.parse().unwrap()).collect();
        let tag = tags.iter().find(|tag| u64::from(digest(tag)) == numbers[0]);
        (tag.unwrap_or_else(|| panic!("no tag of {}: {tags:?}", numbers[0])).clone(), numbers[1..].to_vec())
    });
    named.collect()
}

/// Writes a record.
pub(super) fn write(server: &Server, key: &str, tag: &str, numbers: &[u64]) {
    let script = "local is_log = tonumber(ARGV[1]) >= 2147483648
        redis.call('SET', KEYS[1], struct.pack(is_log and '>I4I8I4I8I4I4I4I4I4' or '>I4I8I4I4', unpack(ARGV)))";
    let numbers: Vec<String> =
        std::iter::once(digest(tag).into()).chain(numbers.iter().copied()).map(|number| number.to_string()).collect();
    let command = ["EVAL", script, "1", key].into_iter().chain(numbers.iter().map(String::as_str));
    let reply = server.ask(&command.collect::<Vec<_>>());
    assert_eq!(reply, Reply::Nil, "{numbers:?}");
}
