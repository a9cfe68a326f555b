//! Parses memcached URLs.

use std::time::Duration;

use crate::error::ConfigError;
use crate::storage::url::{self, Address, Authority, Options, Parts, Wrong};

/// The parsed URL.
#[derive(Debug)]
pub(super) struct MemcachedUrl {
    /// The servers, at least one.
    pub(super) servers: Vec<Address>,
    pub(super) prefix: Box<str>,
    pub(super) deadline: Duration,
    pub(super) long_logs: bool,
    pub(super) max_skew: Duration,
}

/// The valid forms of a URL.
const EXAMPLES: &str =
    "write memcached://host:11211, memcached://host:11211,host:11211 or memcached+unix:///path/to.sock";

const PORT: u16 = 11_211;

impl MemcachedUrl {
    pub(super) fn parse(url: &str) -> Result<Self, ConfigError> {
        url::read(url, EXAMPLES, Self::read)
    }

    fn read(parts: &Parts<'_>, wrong: &Wrong<'_>) -> Result<Self, ConfigError> {
        let unix = match parts.scheme {
            "memcached" => false,
            "memcached+unix" => true,
            other => return Err(wrong(format!("unknown scheme {other:?}: {EXAMPLES}"))),
        };
        let Authority { login, hosts } = Authority::parse(parts.authority, PORT, wrong)?;
        if login.password.is_some() {
            return Err(wrong("memcached URLs have no user and password; leave out the text before @".to_owned()));
        }
        let path = parts.decoded_path(wrong)?;
        let servers = if unix {
            if !cfg!(unix) {
                return Err(wrong("this system has no Unix sockets; write memcached://host:11211".to_owned()));
            }
            if !hosts.is_empty() || path.len() < 2 {
                return Err(wrong("write a path from the root, for example memcached+unix:///path/to.sock".to_owned()));
            }
            vec![Address::Unix(path.into())]
        } else {
            if hosts.is_empty() {
                return Err(wrong(format!("the host is missing: {EXAMPLES}")));
            }
            if path.len() > 1 {
                return Err(wrong(format!("memcached has no databases, but the path is {path:?}; leave it out")));
            }
            if let Some((_, twice)) = hosts.iter().enumerate().find(|(at, host)| hosts[..*at].contains(host)) {
                return Err(wrong(format!("the host {twice} occurs twice; write it once")));
            }
            hosts.into_iter().map(Address::Tcp).collect()
        };
        let mut options = Options::parse(parts.query, wrong)?;
        let (prefix, deadline) = (options.prefix()?, options.timeout()?);
        let (long_logs, max_skew) = (options.long_logs()?, options.max_skew()?);
        options.end()?;
        Ok(Self { servers, prefix, deadline, long_logs, max_skew })
    }
}
