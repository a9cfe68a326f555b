//! A usage as JSON.

use std::fmt::{self, Write};
use std::time::Duration;

use crate::decision::Decision;
use crate::policy::Policy;
use crate::text::write_json_string;

pub(super) fn of(policy: &Policy, decision: &Decision) -> String {
    let mut json = String::with_capacity(64 + 128 * policy.limits().len());
    write(policy, decision, &mut json).expect("writing to a string does not fail");
    json
}

fn write(policy: &Policy, decision: &Decision, json: &mut String) -> fmt::Result {
    write!(json, r#"{{"limited":true,"admitted":{}"#, decision.is_admitted())?;
    if let Some(wait) = decision.retry_after() {
        write!(json, r#","retry_after":{}"#, Seconds(wait))?;
    }
    json.push_str(r#","limits":["#);
    for (position, (limit, status)) in policy.limits().iter().zip(decision.limits()).enumerate() {
        let comma = if position == 0 { "" } else { "," };
        // `quoted_name` returns a Structured Field string: printable ASCII, in which only `"` and
        // `\` are escaped. So it is also a valid JSON string.
        write!(json, r#"{comma}{{"name":{},"strategy":"#, policy.quoted_name(position))?;
        write_json_string(limit.strategy().name(), json)?;
        write!(
            json,
            r#","quota":"{}","limit":{},"remaining":{},"reset":{}}}"#,
            limit.quota(),
            status.capacity(),
            status.remaining(),
            Seconds(status.reset_after())
        )?;
    }
    json.push_str("]}");
    Ok(())
}

/// Seconds with up to six decimals.
struct Seconds(Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.subsec_micros() {
            0 => write!(f, "{}", self.0.as_secs()),
            micros => f.write_str(format!("{}.{micros:06}", self.0.as_secs()).trim_end_matches('0')),
        }
    }
}
