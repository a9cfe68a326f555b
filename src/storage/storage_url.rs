use std::fmt;
use std::str::FromStr;

use super::{AnyStorage, names};
use crate::error::ConfigError;

/// The URL of a storage, as a field of a configuration type. It is validated when it is parsed.
///
/// [`AnyStorage`] lists the URLs. `Debug` and `Display` write only the scheme, because the URL may
/// contain a password. With the feature `serde`, it is serialized as a string that includes the
/// password.
///
/// ```
/// use tower_ratelimit::storage::StorageUrl;
///
/// let url: StorageUrl = "memory://".parse()?;
/// let storage = url.open()?;
/// # Ok::<(), tower_ratelimit::ConfigError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct StorageUrl(Box<str>);

impl StorageUrl {
    /// Creates a storage for the URL. A storage on a server connects on first use.
    ///
    /// Each call creates a new storage. Clone the result to share its connections, or the states of
    /// `memory://`.
    ///
    /// # Errors
    ///
    /// Returns an error if a file that the URL names can no longer be used, for example a
    /// certificate or an SQLite database.
    pub fn open(&self) -> Result<AnyStorage, ConfigError> {
        self.0.parse()
    }

    /// Returns this URL with another option, whose value is percent-encoded. A [`Duration`](std::time::Duration)
    /// is written as `Debug` prints it.
    ///
    /// ```
    /// # #[cfg(feature = "etcd")] {
    /// use std::time::Duration;
    /// use tower_ratelimit::storage::{EtcdStorage, StorageUrl};
    ///
    /// let timeout = Duration::from_millis(50);
    /// let url: StorageUrl = "etcd://localhost?prefix=shop".parse()?;
    /// let storage = EtcdStorage::new(url.with("timeout", format_args!("{timeout:?}"))?.as_str())?;
    /// # }
    /// # Ok::<(), tower_ratelimit::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Returns an error if the storage does not know the option or rejects the value, or if the URL
    /// contains the option already.
    pub fn with(&self, option: &str, value: impl fmt::Display) -> Result<Self, ConfigError> {
        let separator = if self.0.contains('?') { '&' } else { '?' };
        format!("{}{separator}{option}={}", self.0, names::encoded(&value.to_string())).parse()
    }

    /// Returns the whole URL, including a password.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Parses the URLs of [`AnyStorage`], and returns its errors.
///
/// To validate the URL, parsing creates the storage and drops it. It does not connect to a server,
/// but it reads the certificates that the URL names, and `sqlite:path` creates the file.
impl FromStr for StorageUrl {
    type Err = ConfigError;

    fn from_str(url: &str) -> Result<Self, ConfigError> {
        url.parse::<AnyStorage>()?;
        Ok(Self(url.into()))
    }
}

impl fmt::Display for StorageUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = self.0.split(':').next().unwrap_or_default();
        let slashes = if self.0.contains("://") { "//" } else { "" };
        write!(f, "{scheme}:{slashes}...")
    }
}

impl fmt::Debug for StorageUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StorageUrl({self})")
    }
}
