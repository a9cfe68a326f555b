//! Parses the storage's URL: members, login, prefix, timeout and limits.

use std::time::Duration;

use crate::error::ConfigError;
use crate::storage::credentials::LoginSource;
use crate::storage::tls::Tls;
use crate::storage::url::{self, Authority, Host, Options, Parts, Wrong};

/// The settings of a URL.
#[derive(Clone, Debug)]
pub(super) struct EtcdUrl {
    /// At least one member.
    pub(super) members: Vec<Host>,
    pub(super) access: Access,
    pub(super) prefix: Box<str>,
    pub(super) deadline: Duration,
    pub(super) long_logs: bool,
    pub(super) max_skew: Duration,
}

/// The login and the TLS settings of a connection.
#[derive(Clone, Debug, Default)]
pub(super) struct Access {
    pub(super) login: LoginSource,
    pub(super) tls: Option<Tls>,
}

const EXAMPLES: &str = "write etcd://host:2379, etcd://host:2379,host:2379 or etcds://host:2379";
const PORT: u16 = 2_379;

/// The protocol for ALPN, which etcd requires with TLS.
const HTTP2: Option<&'static [u8]> = Some(b"h2");

impl EtcdUrl {
    pub(super) fn parse(url: &str) -> Result<Self, ConfigError> {
        url::read(url, EXAMPLES, Self::read)
    }

    fn read(parts: &Parts<'_>, wrong: &Wrong<'_>) -> Result<Self, ConfigError> {
        let &Parts { scheme, authority, path, query } = parts;
        let is_tls = match scheme {
            "etcd" => false,
            "etcds" | "etcd+tls" => true,
            _ => return Err(wrong(format!("unknown scheme {scheme:?}: {EXAMPLES}"))),
        };
        if is_tls && !cfg!(feature = "etcd-rustls") {
            return Err(wrong(format!("{scheme}:// needs the feature \"etcd-rustls\" of tower-ratelimit")));
        }
        let Authority { login, hosts } = Authority::parse(authority, PORT, wrong)?;
        if hosts.is_empty() {
            return Err(wrong(format!("the host is missing: {EXAMPLES}")));
        }
        if login.password.is_some() && login.user.is_none() {
            return Err(wrong("the password has no user: write user:password@".to_owned()));
        }
        if !matches!(path, "" | "/") {
            return Err(wrong(format!(
                "unexpected path {path:?}: leave it out, or write ?prefix=... to set the prefix of all keys"
            )));
        }
        let mut options = Options::parse(query, wrong)?;
        let tls = if is_tls { Some(Tls::from_options(&mut options, HTTP2, wrong)?) } else { None };
        let (prefix, deadline) = (options.prefix()?, options.timeout()?);
        let (long_logs, max_skew) = (options.long_logs()?, options.max_skew()?);
        options.end()?;
        let access = Access { login: LoginSource::Fixed(login), tls };
        Ok(Self { members: hosts, access, prefix, deadline, long_logs, max_skew })
    }
}
