//! Without HTTP: messages are limited by their sender, and undelivered messages are refunded.

use tower_ratelimit::{BoxError, Key, Policy, RateLimiter};

struct Message {
    from: &'static str,
    text: &'static str,
}

/// Handles the messages in order. Returns a line for each.
async fn app(messages: &[Message]) -> Result<Vec<String>, BoxError> {
    let policy: Policy = "2/second; 3/minute".parse()?;
    let limiter = RateLimiter::new(policy);
    let mut lines = Vec::new();
    for message in messages {
        let key = Key::from(message.from);
        let hit = limiter.reserve(&key, 1).await?;
        lines.push(match hit.retry_after() {
            Some(wait) => format!("{}: refused for {} ms", message.from, wait.as_millis()),
            None if deliver(message) => format!("{}: delivered, {} left", message.from, hit.remaining()),
            None => {
                hit.refund().await?;
                format!("{}: not delivered, {} left", message.from, limiter.peek(&key).await?.remaining())
            }
        });
    }
    Ok(lines)
}

fn deliver(message: &Message) -> bool {
    !message.text.is_empty()
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), BoxError> {
    let messages = [("alice", "hello"), ("alice", ""), ("bob", "hi"), ("alice", "again"), ("alice", "and again")];
    let messages = messages.map(|(from, text)| Message { from, text });
    for line in app(&messages).await? {
        println!("{line}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn undelivered_messages_are_refunded() {
        let messages = [("alice", "hello"), ("alice", ""), ("bob", "hi"), ("alice", "again"), ("alice", "and again")];
        let messages = messages.map(|(from, text)| Message { from, text });
        let lines = app(&messages).await.unwrap();
        assert_eq!(
            lines[..4],
            [
                "alice: delivered, 1 left",
                "alice: not delivered, 1 left",
                "bob: delivered, 1 left",
                "alice: delivered, 0 left"
            ]
        );
        assert!(lines[4].starts_with("alice: refused for "), "{}", lines[4]);
    }
}
