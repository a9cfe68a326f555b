//! The names of the keys on the server.

use crate::key::Key;
use crate::policy::Policy;
use crate::storage::names;

/// The version of the [format](super::record) of the states and their logs. Every change of the
/// format changes it, so that programs with different formats use different keys.
pub(super) const VERSION: &str = "v1";

/// Returns the key of the states: `PREFIX:{POLICY|KEY}v1`, or `PREFIX:{OUTER}{POLICY|KEY}v1` for a
/// key [within](Key::within) an outer one.
///
/// The first text in braces selects the slot of a cluster. So all keys of a policy and a key are in
/// one slot, and all keys within the same outer key. A text with a policy contains `|`, which a key
/// encodes.
pub(super) fn states_key(prefix: &str, policy: &Policy, key: &Key) -> String {
    match key.split_within() {
        None => format!("{prefix}:{{{}}}{VERSION}", names::of(policy, key)),
        Some([outer, own]) => {
            format!("{prefix}:{{{}}}{{{}}}{VERSION}", names::of_key(&outer), names::of(policy, &own))
        }
    }
}

/// The names of the keys of a policy, to list them.
pub(super) struct KeyNames {
    /// Matches them, and few others.
    pub(super) pattern: String,
    before: String,
    policy: String,
    after: String,
}

impl KeyNames {
    /// `has_scripts` is `false` if a strategy has no script, so that the states are under
    /// [`cas_key`].
    pub(super) fn new(prefix: &str, policy: &Policy, has_scripts: bool) -> Self {
        let (before, policy) = (format!("{prefix}:{{"), names::of_policy(policy));
        let after = if has_scripts { format!("}}{VERSION}") } else { cas_key("}") };
        Self { pattern: format!("{}*{policy}*{after}", escaped(&before)), before, policy, after }
    }

    /// Returns the key with this name. Returns `None` for the names of logs, of slots and of other
    /// policies, and for names that end in a hash.
    pub(super) fn key(&self, name: &[u8]) -> Option<Key> {
        let name = str::from_utf8(name).ok()?;
        let name = name.strip_prefix(&*self.before)?.strip_suffix(&*self.after)?;
        let own = |name: &str| names::key(name.strip_prefix(&*self.policy)?);
        match name.split_once("}{") {
            None => own(name),
            Some((outer, name)) => Some(own(name)?.within(&names::key(outer)?)),
        }
    }
}

/// Escapes the characters that have a meaning in patterns.
pub(super) fn escaped(text: &str) -> String {
    text.chars().fold(String::new(), |mut text, c| {
        if matches!(c, '*' | '?' | '[' | ']' | '\\') {
            text.push('\\');
        }
        text.push(c);
        text
    })
}

/// Returns the key of a moving window's log: the key of the states and the limit's tag.
pub(super) fn log_key(states: &str, tag: &str) -> String {
    format!("{states}:{tag}")
}

/// Returns the key of the ledger of slots: `PREFIX:{POLICY|KEY}slots`.
pub(super) fn ledger_key(prefix: &str, policy: &Policy, key: &Key) -> String {
    format!("{prefix}:{{{}}}slots", names::of(policy, key))
}

/// Returns the key for compare-and-swap. The value of this key contains all states, including logs.
pub(super) fn cas_key(states: &str) -> String {
    format!("{states}:all")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> Policy {
        "fixed-window 5/minute; moving-window 5/hour".parse().unwrap()
    }

    /// All keys within the same outer key have the same first text in braces, also if it is long.
    #[test]
    fn outer_key_is_the_hash_tag() {
        let (policy, acme, alice) = (policy().with_name("user"), Key::from("acme}"), Key::from("alice"));
        assert_eq!(states_key("rl", &policy, &alice), "rl:{user|t:alice}v1");
        assert_eq!(states_key("rl", &policy, &alice.within(&acme)), "rl:{t:acme%7D}{user|t:alice}v1");
        assert_eq!(states_key("rl", &policy, &acme.within(&acme)), "rl:{t:acme%7D}{user|t:acme%7D}v1");
        let outer = Key::join([&acme, &alice]);
        assert_eq!(states_key("rl", &policy, &Key::global().within(&outer)), "rl:{&:(t:acme%7D,t:alice)}{user|*}v1");
        let long = Key::from("x".repeat(300));
        let name = states_key("rl", &policy, &alice.within(&long));
        assert_eq!(name, format!("rl:{{{}}}{{user|t:alice}}v1", names::of_key(&long)));
        assert!(name.len() < 230, "{name}");
    }

    #[test]
    fn names_of_keys_are_read_as_written() {
        let [one, other] = ["a*?[]", "b"].map(|name| policy().with_name(name));
        let names = KeyNames::new("r*l", &one, true);
        assert_eq!(names.pattern, r"r\*l:{*a%2A%3F%5B%5D|*}v1");
        let [alice, acme] = ["alice}{", "acme"].map(Key::from);
        for key in [alice.clone(), alice.within(&acme), Key::join([&alice, &acme]), Key::global()] {
            assert_eq!(names.key(states_key("r*l", &one, &key).as_bytes()), Some(key.clone()));
            for name in [states_key("r*l", &other, &key), states_key("rl", &one, &key), ledger_key("r*l", &one, &key)] {
                assert_eq!(names.key(name.as_bytes()), None);
            }
            assert_eq!(names.key(log_key(&states_key("r*l", &one, &key), "1.a/1").as_bytes()), None);
        }
        assert_eq!(names.key(states_key("r*l", &one, &Key::from("x".repeat(300))).as_bytes()), None);
        let swapped = KeyNames::new("rl", &one, false);
        assert_eq!(swapped.key(b"rl:{a%2A%3F%5B%5D|t:alice}:all"), Some(Key::from("alice")));
    }
}
