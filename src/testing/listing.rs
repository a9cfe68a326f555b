//! The law of the pages of keys.

use std::net::Ipv6Addr;
use std::time::Duration;

use super::harness::{Harness, Inputs, failed};
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::Policy;
use crate::storage::{KeysRequest, Storage, StorageErrorKind};

/// The largest number of pages.
const PAGES: u32 = 10_000;

/// Does nothing if the storage does not support [`Storage::keys`].
pub(super) fn pages_have_the_keys_in_use(inputs: &Inputs<'_>, harness: &Harness<'_>) {
    let [alice, bob, brackets] = ["alice", "b", "%7C, |}{(\u{e9})#"].map(Key::from);
    let cleared = Key::from("cleared");
    let address = Key::from(Ipv6Addr::LOCALHOST);
    let mut keys = vec![alice.clone(), bob.clone(), brackets, Key::from("bill"), Key::from(7), address, Key::global()];
    keys.extend([Key::join([&alice, &bob]), alice.within(&bob)]);
    for policy in inputs.all_policies() {
        let other = policy.clone().with_name("another policy");
        if listed(harness, policy, "").is_none() {
            return;
        }
        for key in keys.iter().chain([&cleared]) {
            let _ = harness.hit(policy, key, 1);
        }
        let _ = harness.hit(&other, &Key::from("other"), 1);
        let _ = harness.peek(policy, &Key::from("peeked at"), 1);
        harness.clear(policy, &cleared);
        expect(harness, policy, "", &keys);
        let of_text = keys.iter().filter(|key| key.to_string().starts_with("t:b"));
        expect(harness, policy, "t:b", &of_text.cloned().collect::<Vec<_>>());
        let resets = keys.iter().map(|key| harness.peek(policy, key, 1).reset_after());
        harness.clock.advance(resets.max().unwrap_or_default() + Duration::from_micros(1));
        expect(harness, policy, "", &[]);
    }
}

/// Checks the keys of all pages, and their decisions.
fn expect(harness: &Harness<'_>, policy: &Policy, prefix: &str, keys: &[Key]) {
    let listed = listed(harness, policy, prefix).unwrap_or_default();
    let texts = |keys: &mut dyn Iterator<Item = &Key>| {
        let mut texts: Vec<_> = keys.map(ToString::to_string).collect();
        texts.sort();
        // A storage may list a key twice.
        texts.dedup();
        texts
    };
    let (found, expected) = (texts(&mut listed.iter().map(|(key, _)| key)), texts(&mut keys.iter()));
    harness.check(found == expected, || {
        format!("{policy}: the pages of keys that begin with {prefix:?} have {found:?} instead of {expected:?}")
    });
    let numbers = |decision: &Decision| (decision.is_admitted(), decision.remaining(), decision.reset_after());
    for (key, decision) in &listed {
        let (listed, peek) = (numbers(decision), numbers(&harness.peek(policy, key, 1)));
        harness.check(listed == peek, || format!("{policy}: {key} is listed with {listed:?}, but a peek is {peek:?}"));
    }
}

/// Returns the keys of all pages, or `None` if the storage does not support it.
fn listed(harness: &Harness<'_>, policy: &Policy, prefix: &str) -> Option<Vec<(Key, Decision)>> {
    let (mut listed, mut after) = (Vec::new(), None);
    for _ in 0..PAGES {
        let request = KeysRequest::new(policy, prefix, after.as_deref(), 2);
        let page = match harness.block_on(harness.storage.keys(request)) {
            Err(error) if error.kind() == StorageErrorKind::Unsupported && after.is_none() => return None,
            page => harness.unwrap_or_panic(page.map_err(failed)),
        };
        listed.extend(page.keys);
        after = page.next;
        if after.is_none() {
            return Some(listed);
        }
    }
    harness.unwrap_or_panic(Err(format!("{policy}: the pages of keys do not end")))
}
