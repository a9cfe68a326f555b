//! Consistent hashing: assigns keys to servers.
//!
//! Each server has 160 points on a ring, which are MD5 hashes of its name. A key belongs to the
//! server with the next point. So the order of the servers does not matter. If a server is added or
//! removed, only its keys move.
//!
//! The points are those of libmemcached's weighted ketama with equal weights.
//!
//! Keys of a dead server fail and do not move, because old counts that reappear are worse than
//! none.

use crate::storage::url::Address;

/// The number of hashes per server. Each hash gives four points.
const HASHES: u32 = 40;

/// The number of points per server.
const POINTS: usize = 4 * HASHES as usize;

/// The port that is left out of a server's name.
const DEFAULT_PORT: u16 = 11_211;

/// The sorted points, each with the index of its server.
pub(super) struct Ring(Box<[(u32, usize)]>);

impl Ring {
    pub(super) fn new(servers: &[Address]) -> Self {
        let mut points = Vec::new();
        for (index, server) in servers.iter().enumerate() {
            let name = name(server);
            for number in 0..HASHES {
                let digest = md5::compute(format!("{name}-{number}")).0;
                let (quarters, _) = digest.as_chunks::<4>();
                points.extend(quarters.iter().map(|quarter| (u32::from_le_bytes(*quarter), index)));
            }
        }
        points.sort_unstable();
        Self(points.into())
    }

    /// Returns the index of the server of a key.
    pub(super) fn index(&self, key: &str) -> usize {
        // There is one server.
        if self.0.len() <= POINTS {
            return 0;
        }
        let [first, second, third, fourth, ..] = md5::compute(key).0;
        let hash = u32::from_le_bytes([first, second, third, fourth]);
        let next = self.0.partition_point(|(point, _)| *point < hash);
        self.0.get(next).or(self.0.first()).map_or(0, |(_, index)| *index)
    }
}

fn name(server: &Address) -> String {
    match server {
        Address::Tcp(host) if host.port == DEFAULT_PORT => host.name.clone(),
        Address::Tcp(host) => format!("{}:{}", host.name, host.port),
        Address::Unix(path) => path.display().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::url::Host;

    fn ring(servers: &[(&str, u16)]) -> Ring {
        let servers: Vec<Address> =
            servers.iter().map(|&(name, port)| Address::Tcp(Host { name: name.to_owned(), port })).collect();
        Ring::new(&servers)
    }

    fn indexes(ring: &Ring) -> String {
        (0..100).map(|number| ring.index(&format!("key{number}")).to_string()).collect()
    }

    /// The expected indexes come from pylibmc 1.6.3 (libmemcached 1.0.16, `ketama_weighted`) and
    /// uhashring 2.5.
    #[test]
    fn keys_have_the_same_servers_as_in_other_clients() {
        let three = ring(&[("127.0.0.1", 11_211), ("127.0.0.1", 21_812), ("localhost", 21_813)]);
        let expected =
            "1212012111111011021021121022110222210002120100221200010011212210200020220221021222000120021011101010";
        assert_eq!(indexes(&three), expected);
        for (key, index) in [("rl:a", 2), ("rl:b", 0), ("rl:e", 1), ("rl:free|t:alice", 2), ("rl:free|t:bob", 1)] {
            assert_eq!(three.index(key), index, "{key}");
        }
    }

    #[test]
    fn order_of_servers_does_not_matter() {
        let (one, other) = (ring(&[("a", 1), ("b", 2), ("c", 3)]), ring(&[("c", 3), ("b", 2), ("a", 1)]));
        let mirrored: String = indexes(&one)
            .chars()
            .map(|index| {
                if index == '1' {
                    '1'
                } else if index == '0' {
                    '2'
                } else {
                    '0'
                }
            })
            .collect();
        assert_eq!(indexes(&other), mirrored);
    }

    #[test]
    fn added_server_takes_keys_and_moves_no_others() {
        let (before, after) = (ring(&[("a", 1), ("b", 2)]), ring(&[("a", 1), ("b", 2), ("c", 3)]));
        let (before, after) = (indexes(&before), indexes(&after));
        let moved: Vec<char> =
            before.chars().zip(after.chars()).filter(|(was, is)| was != is).map(|(_, is)| is).collect();
        assert!((20..50).contains(&moved.len()) && moved.iter().all(|is| *is == '2'), "{moved:?}");
    }
}
