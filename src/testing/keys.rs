//! Laws of a storage for keys and policies: their independence, and clears.

use super::sequential::{Inputs, parsed};
use crate::key::Key;
use crate::policy::Policy;

impl Inputs<'_> {
    pub(super) fn keys_and_policies_are_independent(&self) {
        let harness = self.harness("10: keys and policies are independent");
        let policy = parsed("1/day").with_name("policy");
        let keys = many_keys();
        // In the second round, all units are spent, so each key is stored under its own name.
        for is_first in [true, false] {
            for (number, key) in keys.iter().enumerate() {
                let hit = harness.hit(&policy, key, 1);
                harness.check(hit.is_admitted() == is_first, || {
                    let before = if is_first { "never been hit" } else { "spent its unit" };
                    format!("{key} (number {number}) has {before}, but the decision is {hit:?}")
                });
            }
        }
        let (long, forty) = ("x".repeat(300), "x".repeat(40));
        let names = ["a", "A", " a", "a ", "a|b", "a|t:b", "ab", "x y", &forty, &long].map(str::to_owned);
        let longer = [&forty, &long].map(|name| format!("{name}y"));
        let policies = names.into_iter().chain(longer).map(|name| parsed("1/day").with_name(name));
        let policies: Vec<Policy> = policies.chain([parsed("1/day"), parsed("1/hour")]).collect();
        let keys = ["a", "b", "b|c", "c", "a|b", "t:b"].map(Key::from);
        for (policy, key) in policies.iter().flat_map(|policy| keys.iter().map(move |key| (policy, key))) {
            let hit = harness.hit(policy, key, 1);
            harness.check(hit.is_admitted(), || {
                format!("{key} of {:?} has never been hit, but is refused: {hit:?}", policy.identity())
            });
        }
    }

    pub(super) fn clears_remove_one_key(&self) {
        let harness = self.harness("of clearing: a clear removes one key of one policy");
        for policy in self.policies.iter().chain(self.several) {
            let [key, other] =
                ["cleared", "kept"].map(|text| Key::join([&Key::from(text), &Key::from(policy.identity())]));
            let other_policy = policy.clone().with_name("other policy");
            let fresh = harness.peek(policy, &key, 1).remaining();
            for (policy, key) in [(policy, &key), (policy, &other), (&other_policy, &key)] {
                let _ = harness.exhaust(policy, key);
            }
            harness.clear(policy, &key);
            let left = [(policy, &key), (policy, &other), (&other_policy, &key)]
                .map(|(policy, key)| harness.peek(policy, key, 1).remaining());
            harness.check(left[0] == fresh, || format!("{policy} has {} of {fresh} units left after a clear", left[0]));
            harness.check(left[1] == 0, || format!("{policy}: another key was cleared"));
            harness.check(left[2] == 0, || format!("{policy}: the key was cleared in another policy"));
            harness.clear(policy, &Key::from("unknown key"));
        }
    }

    /// Does nothing if the storage does not support [`Storage::clear_all`].
    pub(super) fn clear_all_removes_all_keys(&self) {
        let harness = self.harness("of clearing: `clear_all` removes all keys");
        if !harness.clear_all() {
            return;
        }
        let keys = ["a", "b"].map(Key::from);
        let all = || self.policies.iter().flat_map(|policy| keys.iter().map(move |key| (policy, key)));
        let first: Vec<u32> = all().map(|(policy, key)| harness.hit(policy, key, 1).remaining()).collect();
        for (policy, key) in all() {
            let _ = harness.exhaust(policy, key);
        }
        let _ = harness.clear_all();
        let again: Vec<u32> = all().map(|(policy, key)| harness.hit(policy, key, 1).remaining()).collect();
        harness.check(first == again, || {
            format!("the units left after a first hit are {first:?}, but {again:?} after `clear_all` and a hit")
        });
    }
}

/// Returns keys that a storage may confuse.
fn many_keys() -> Vec<Key> {
    let [long, longer] = [300, 2_000].map(|len| "x".repeat(len));
    let texts = ["", "a", "A", " a", "a ", "a b", "ab", "a\0", "t:a", "a|b", "*", "%7C", "1", "1.2.3.4", "\n"];
    let unicode = ["\u{e9}", "\u{c9}", "e\u{301}", "\u{fffd}"];
    let mut keys: Vec<Key> = texts.into_iter().chain(unicode).chain([&*long, &longer]).map(Key::from).collect();
    // Not UTF-8. A lossy conversion turns each of these bytes into the same character.
    keys.extend([&[0xff][..], &[0xfe], &[0xc3], &[b'a', 0xff], &[b'a', 0xfe]].map(Key::from));
    keys.extend([1, 0xfe, 0xff, 1 << 32, (1 << 32) + 1, u64::MAX].map(Key::from));
    keys.extend([&long, &longer].map(|long| Key::from(format!("{long}y"))));
    keys.extend([
        Key::global(),
        Key::from(std::net::Ipv4Addr::new(1, 2, 3, 4)),
        Key::from(std::net::Ipv4Addr::new(1, 2, 3, 254)),
        Key::from(std::net::Ipv4Addr::new(1, 2, 3, 255)),
        Key::from(std::net::Ipv6Addr::LOCALHOST),
        Key::join([&Key::from("a")]),
        Key::join([&Key::from("a"), &Key::from("bc")]),
        Key::join([&Key::from("ab"), &Key::from("c")]),
    ]);
    keys
}
