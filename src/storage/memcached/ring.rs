//! Which of several servers a key lives on.
//!
//! Each server has 160 points on a circle, made from its name by MD5; a key lives on the server whose point comes next. So all
//! who know the same servers agree, in whatever order they name them, and when one server more or less is named, only its keys
//! move. The points are those of libmemcached's weighted ketama with equal weights.

use crate::storage::url::Address;

/// Each makes four points.
const HASHES: u32 = 40;

/// With this port a server's name is without it.
const DEFAULT_PORT: u16 = 11_211;

/// The points in order, each with the place of its server in the list.
pub(super) struct Ring(Box<[(u32, usize)]>);

impl Ring {
    pub(super) fn of(servers: &[Address]) -> Self {
        let mut points = Vec::new();
        for (place, server) in servers.iter().enumerate() {
            let name = name(server);
            for number in 0..HASHES {
                let digest = md5::compute(format!("{name}-{number}")).0;
                let (quarters, _) = digest.as_chunks::<4>();
                points.extend(quarters.iter().map(|quarter| (u32::from_le_bytes(*quarter), place)));
            }
        }
        points.sort_unstable();
        Self(points.into())
    }

    /// The place in the list of the server that has this key.
    pub(super) fn place(&self, key: &str) -> usize {
        let [first, second, third, fourth, ..] = md5::compute(key).0;
        let hash = u32::from_le_bytes([first, second, third, fourth]);
        let next = self.0.partition_point(|(point, _)| *point < hash);
        self.0.get(next).or(self.0.first()).map_or(0, |(_, place)| *place)
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
        Ring::of(&servers)
    }

    fn places(ring: &Ring) -> String {
        (0..100).map(|number| ring.place(&format!("key{number}")).to_string()).collect()
    }

    /// Where pylibmc 1.6.3 (libmemcached 1.0.16, `ketama_weighted`) put them on real servers, and uhashring 2.5 says they are.
    #[test]
    fn keys_live_where_other_clients_look_for_them() {
        let three = ring(&[("127.0.0.1", 11_211), ("127.0.0.1", 21_812), ("localhost", 21_813)]);
        let expected =
            "1212012111111011021021121022110222210002120100221200010011212210200020220221021222000120021011101010";
        assert_eq!(places(&three), expected);
        for (key, place) in [("rl:a", 2), ("rl:b", 0), ("rl:e", 1), ("rl:free|t:alice", 2), ("rl:free|t:bob", 1)] {
            assert_eq!(three.place(key), place, "{key}");
        }
    }

    #[test]
    fn the_order_in_which_servers_are_named_does_not_matter() {
        let (one, other) = (ring(&[("a", 1), ("b", 2), ("c", 3)]), ring(&[("c", 3), ("b", 2), ("a", 1)]));
        let mirrored: String = places(&one)
            .chars()
            .map(|place| {
                if place == '1' {
                    '1'
                } else if place == '0' {
                    '2'
                } else {
                    '0'
                }
            })
            .collect();
        assert_eq!(places(&other), mirrored);
    }

    #[test]
    fn a_server_more_takes_keys_and_moves_no_others() {
        let (before, after) = (ring(&[("a", 1), ("b", 2)]), ring(&[("a", 1), ("b", 2), ("c", 3)]));
        let (before, after) = (places(&before), places(&after));
        let moved: Vec<char> =
            before.chars().zip(after.chars()).filter(|(was, is)| was != is).map(|(_, is)| is).collect();
        assert!((20..50).contains(&moved.len()) && moved.iter().all(|is| *is == '2'), "{moved:?}");
    }
}
