//! Decisions on several keys, compared with the model.

use std::time::Duration;

use tower_ratelimit::storage::{Clock, ManualClock, StorageRequest};
use tower_ratelimit::testing::Model;
use tower_ratelimit::{Key, Op, Policy, Storage};

use crate::policy;
use crate::random::Numbers;
use crate::time::EVENTUALLY;

/// Compares two to eight members with the model. Each has up to three of the `limits`.
pub async fn random_members_decide_like_the_model<S: Storage>(
    rounds: u64,
    limits: &[&str],
    storage: impl Fn(ManualClock) -> S,
) {
    let mut numbers = Numbers(0x0f1e_2d3c_4b5a_6978);
    for round in 0..rounds {
        let (clock, mut model) = (ManualClock::default(), Model::default());
        let storage = storage(clock.clone());
        storage.ready(EVENTUALLY).await.unwrap();
        let count = 2 + numbers.below(7);
        let texts: Vec<String> = (0..count)
            .map(|_| (0..=numbers.below(3)).map(|_| numbers.one_of(limits)).collect::<Vec<_>>().join("; "))
            .collect();
        let policies: Vec<Policy> =
            texts.iter().enumerate().map(|(at, text)| policy(text).with_name(format!("m{at}"))).collect();
        for step in 0..60 {
            let keys: Vec<_> = policies.iter().map(|_| Key::from(numbers.below(2))).collect();
            let members = policies.iter().zip(&keys).map(|(policy, key)| {
                let op = numbers.one_of(&[Op::Hit, Op::Hit, Op::Hit, Op::Peek]);
                StorageRequest::new(policy, key, op, numbers.one_of(&[0, 1, 1, 2]))
            });
            let members: Vec<_> = members.collect();
            let decided = storage.decide_all(&members).await;
            let decisions = decided.unwrap_or_else(|error| panic!("{texts:?}: {error:#}"));
            assert_eq!(decisions, model.decide_all(&members, clock.now()), "round {round}, step {step}, {texts:?}");
            clock.advance(Duration::from_micros(numbers.below(2_000_000)));
        }
    }
}
