//! The documented promise of each strategy: the maximum number of hits that start in any period.

use tower_ratelimit::Limit;

use crate::locks;

pub(crate) struct Promise {
    /// The title of the strategy.
    pub(crate) title: &'static str,
    /// The difference to the other strategies, in a few words.
    pub(crate) idea: &'static str,
    /// The maximum number of units that are admitted in any period, if there is one.
    pub(crate) most: Option<u32>,
    /// The formula of that number.
    pub(crate) formula: String,
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
        "calendar" => {
            let thrice = amount.saturating_mul(3);
            ("Calendar window", "Starts anew at midnight. Three quotas can meet around a short window.", thrice, "3N")
        }
        _ => return of_lockout(limit),
    };
    Promise { title, idea, most: Some(most), formula: formula.to_owned() }
}

fn of_lockout(limit: &Limit) -> Promise {
    let (title, quota) = ("Lockout", limit.quota());
    let Some(locks) = locks::of(limit).filter(|locks| !locks.by_refusals) else {
        let idea = "Locks a client out that goes on after refusals.";
        return Promise { title, idea, most: None, formula: String::new() };
    };
    // Whole quotas that locks separate fit into a period, after the rest of a window.
    let quotas = quota.period().as_micros().div_ceil(locks.first.as_micros()).saturating_add(1);
    let most = u128::from(quota.amount()).saturating_mul(quotas) - 1;
    Promise {
        title,
        idea: "Admits N hits in a window, then locks the client out.",
        most: Some(u32::try_from(most).unwrap_or(u32::MAX)),
        formula: format!("{quotas}N - 1"),
    }
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
            ("calendar 10/month", 30),
            ("lockout 10/minute for 1m", 19),
            ("lockout 10/minute for 15m x2 up to 1d", 19),
            ("lockout 10/minute for 59s", 29),
            ("lockout 10/minute for 15s", 49),
        ] {
            let policy: Policy = policy.parse().unwrap();
            assert_eq!(of(&policy.limits()[0]).most, Some(most), "{policy}");
        }
        let refusals: Policy = "10/minute; lockout 5 refusals/minute for 1h".parse().unwrap();
        assert_eq!(of(&refusals.limits()[1]).most, None, "the first limit bounds the hits");
    }
}
