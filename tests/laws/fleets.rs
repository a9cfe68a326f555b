//! Law 17: random fleets of processes with leases spend at most what the strategy promises.

use common::fleets::{FLEETS, Fleet, Promise, Spending};
use common::policy;
use common::random::Numbers;

/// The number of fleets by default. Some of them spend more than the strategy promises without
/// leases.
const ENOUGH: u64 = 240;

/// Checks each span that begins and ends with a spent unit, and each window. Returns `true` if the
/// fleet has spent more than the strategy promises for a span alone.
fn assert_promised(fleet: &Fleet, seed: u64, spending: &Spending) -> bool {
    let mut exceeds = false;
    for limit in fleet.policy.limits() {
        let promise = Promise::of(limit);
        spending.visit_spans(|span, units| {
            exceeds |= units > promise.units(span);
            let promised = promise.units(span + fleet.lease());
            assert!(
                units <= promised,
                "law 17: {units} units of {limit} were spent in {span} us, but {promised} are promised: seed {seed}, \
                 {fleet:?}"
            );
        });
    }
    // A lease ends with its window.
    spending.visit_windows(&fleet.policy, |limit, units| {
        let most = u64::from(limit.quota().amount());
        assert!(units <= most, "law 17: {units} units were spent in a window of {limit}: seed {seed}, {fleet:?}");
    });
    exceeds
}

/// Runs a fleet for each seed. `FLEETS` sets their number.
#[test]
fn fleets_spend_at_most_what_the_strategy_promises_for_the_time_of_a_lease_more() {
    let count = std::env::var("FLEETS").map_or(ENOUGH, |count| count.parse().expect("FLEETS is a number"));
    let (mut local, mut exceeding) = (0, 0);
    for seed in 0..count {
        let text = FLEETS[usize::try_from(seed).unwrap() % FLEETS.len()];
        let mut numbers = Numbers((seed + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let fleet = Fleet::random(policy(text), &mut numbers);
        let spending = fleet.run(&mut numbers);
        local += spending.local;
        exceeding += u64::from(assert_promised(&fleet, seed, &spending));
    }
    println!("{count} fleets admitted {local} hits from leases, {exceeding} needed the time of a lease");
    assert!(local > count * 50, "{local} hits were admitted from leases");
    assert!(exceeding > 0 || count < ENOUGH, "no lease was spent late");
}
