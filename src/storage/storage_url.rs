use std::fmt;
use std::str::FromStr;

use super::AnyStorage;
use crate::ConfigError;

/// The validated URL of a storage, for configuration types.
///
/// With the feature `serde`, it is serialized as a string, including a password. `Debug` and
/// `Display` write only the scheme, because the URL may contain a password.
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
    /// Creates the storage. A storage on a server connects on first use.
    ///
    /// # Errors
    ///
    /// Returns an error if a file that the URL names can no longer be used.
    pub fn open(&self) -> Result<AnyStorage, ConfigError> {
        self.0.parse()
    }

    /// Returns the URL, which may contain a password.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Parses the URLs that [`AnyStorage`] supports. Parsing creates the storage once and drops it, so
/// it reads the files that the URL names, and `sqlite:path` creates the file.
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
