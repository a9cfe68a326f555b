//! The documented promise of each strategy: the maximum number of hits that start in any period.

use tower_ratelimit::Limit;

pub(crate) struct Promise {
    /// The title of the strategy.
    pub(crate) title: &'static str,
    /// The difference to the other strategies, in a few words.
    pub(crate) idea: &'static str,
    /// The maximum number of units that are admitted in any period.
    pub(crate) most: u32,
    /// The formula of that number.
    pub(crate) formula: &'static str,
}

/// Returns the promise of the table in the guide on choosing a strategy.
pub(crate) fn of(limit: &Limit) -> Promise {
    let amount = limit.quota().amount();
    let twice = amount.saturating_mul(2);
    let (title, idea, most, formula) = match limit.strategy().name() {
        "fixed-window" => {
            ("Fixed window", "Starts anew each period. Two quotas can meet at the turn.", twice - 1, "2N - 1")
        }
        "fixed-window-aligned" => {
            ("Fixed window, aligned", "Starts anew by the calendar. Two quotas can meet at the turn.", twice, "2N")
        }
        "sliding-window-counter" => {
            ("Sliding window counter", "Still counts a part of the previous period after a turn.", twice, "2N")
        }
        "sliding-window-counter-aligned" => {
            ("Sliding window counter, aligned", "Counts a part of the previous period after a turn.", twice, "2N")
        }
        "moving-window" => ("Moving window", "Remembers each hit. Never exceeds the quota in any period.", amount, "N"),
        "elastic-window" => ("Elastic window", "Locks a client out until it is quiet for a period.", amount, "N"),
        "token-bucket" => {
            let most = limit.capacity().saturating_add(amount);
            ("Token bucket", "Spends saved tokens at once, then admits at a steady rate.", most, "B + N")
        }
        "leaky-bucket" => ("Leaky bucket", "Delays hits to an even pace. Refuses when the queue is full.", amount, "N"),
        // A policy's text has no other strategies.
        _ => ("Strategy", "", u32::MAX, ""),
    };
    Promise { title, idea, most, formula }
}

#[cfg(test)]
mod tests {
    use tower_ratelimit::Policy;

    use super::of;

    #[test]
    fn each_strategy_of_a_text_has_a_promise() {
        for (policy, most) in [
            ("fixed-window 10/minute", 19),
            ("fixed-window-aligned 10/minute", 20),
            ("sliding-window-counter 10/minute", 20),
            ("sliding-window-counter-aligned 10/minute", 20),
            ("moving-window 10/minute", 10),
            ("elastic-window 10/minute", 10),
            ("token-bucket 10/minute burst 3", 13),
            ("leaky-bucket 10/minute queue 30", 10),
        ] {
            let policy: Policy = policy.parse().unwrap();
            assert_eq!(of(&policy.limits()[0]).most, most, "{policy}");
        }
    }
}
