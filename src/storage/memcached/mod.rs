mod client;
mod connection;
mod error;
mod expiry;
mod keys;
mod meta;
mod node;
mod ring;
#[cfg(test)]
mod tests;
mod url;

use std::fmt;
use std::time::Duration;

use tokio::time::Instant;

use self::client::Client;
pub use self::error::MemcachedStorageError;
use self::url::Target;
use crate::ConfigError;
use crate::error::or_panic;
use crate::storage::url::{checked_deadline, checked_prefix};

/// Doc.
#[derive(Clone)]
pub struct MemcachedStorage {
    client: Client,
}

impl MemcachedStorage {
    /// A storage on the servers that `url` names. It connects to none of them yet.
    ///
    /// # Errors
    ///
    /// When the URL cannot be understood.
    pub fn new(url: &str) -> Result<Self, ConfigError> {
        let Target { servers, prefix, deadline } = Target::parse(url)?;
        Ok(Self { client: Client::new(servers, &prefix, deadline) })
    }

    /// What all keys begin with, instead of what the URL says: programs that share a server tell theirs apart with it.
    ///
    /// # Panics
    ///
    /// When it is not 1 to 64 ASCII characters, or holds white space, `{` or `}`; [`try_prefix`](Self::try_prefix) returns an
    /// error instead.
    #[must_use]
    #[track_caller]
    pub fn prefix(self, prefix: &str) -> Self {
        or_panic(self.try_prefix(prefix))
    }

    /// As [`prefix`](Self::prefix).
    ///
    /// # Errors
    ///
    /// When it is not 1 to 64 ASCII characters, or holds white space, `{` or `}`.
    pub fn try_prefix(mut self, prefix: &str) -> Result<Self, ConfigError> {
        checked_prefix(prefix)?;
        self.client.prefix = prefix.into();
        Ok(self)
    }

    /// How long an answer may take, instead of what the URL says.
    ///
    /// # Panics
    ///
    /// When it is less than a millisecond or more than an hour; [`try_deadline`](Self::try_deadline) returns an error instead.
    #[must_use]
    #[track_caller]
    pub fn deadline(self, deadline: Duration) -> Self {
        or_panic(self.try_deadline(deadline))
    }

    /// As [`deadline`](Self::deadline).
    ///
    /// # Errors
    ///
    /// When it is less than a millisecond or more than an hour.
    pub fn try_deadline(mut self, deadline: Duration) -> Result<Self, ConfigError> {
        checked_deadline(deadline)?;
        self.client.deadline = deadline;
        Ok(self)
    }

    /// Returns as soon as all servers answer: for a program that would rather not start without them. It tries again until
    /// `timeout` has passed.
    ///
    /// # Errors
    ///
    /// What was wrong at last.
    pub async fn ready(&self, timeout: Duration) -> Result<(), MemcachedStorageError> {
        self.client.ready(Instant::now() + timeout.min(FOREVER)).await
    }
}

/// An instant that is further away cannot be counted on every system.
const FOREVER: Duration = Duration::from_secs(365 * 86_400);

impl fmt::Debug for MemcachedStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.client.fmt(f)
    }
}
