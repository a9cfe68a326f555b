//! Parses the storage's URL: its own options, and those of `tokio-postgres`.

use std::str::FromStr;
use std::time::Duration;

use tokio_postgres::Config;
#[cfg(unix)]
use tokio_postgres::config::Host;
use tokio_postgres::config::{SslMode, TargetSessionAttrs};

use super::table::Table;
use super::tls;
use crate::error::ConfigError;
use crate::storage::tls::Tls;
use crate::storage::url::{self, Options, Parts, Wrong};

const EXAMPLES: &str = "write postgres://user:password@host/database or postgres://user@host/database";

/// The default number of connections.
const CONNECTIONS: usize = 4;

/// The settings of a URL.
#[derive(Clone, Debug)]
pub(super) struct PostgresUrl {
    pub(super) config: Config,
    pub(super) tls: Option<Tls>,
    /// The hosts, for messages.
    pub(super) server: String,
    pub(super) table: Table,
    pub(super) connections: usize,
    pub(super) migrates: bool,
    pub(super) prefix: Box<str>,
    pub(super) deadline: Duration,
    pub(super) long_logs: bool,
    pub(super) max_skew: Duration,
}

impl PostgresUrl {
    pub(super) fn parse(url: &str) -> Result<Self, ConfigError> {
        url::read(url, EXAMPLES, Self::read)
    }

    fn read(parts: &Parts<'_>, wrong: &Wrong<'_>) -> Result<Self, ConfigError> {
        let &Parts { scheme, authority, path, query } = parts;
        if !matches!(scheme, "postgres" | "postgresql") {
            return Err(wrong(format!("unknown scheme {scheme:?}: {EXAMPLES}")));
        }
        let mut options = Options::parse(query, wrong)?;
        let (prefix, deadline) = (options.prefix()?, options.timeout()?);
        let (long_logs, max_skew) = (options.long_logs()?, options.max_skew()?);
        let mut table = Table::default();
        if let Some(schema) = options.take("schema") {
            table = table.with_schema(&schema).map_err(|error| wrong(error.to_string()))?;
        }
        if let Some(name) = options.take("table") {
            table = table.with_name(&name).map_err(|error| wrong(error.to_string()))?;
        }
        let yes_or_no = &[("true", true), ("false", false)];
        table = table.with_unlogged(options.choice("unlogged", false, yes_or_no)?);
        let migrates = options.choice("migrate", true, yes_or_no)?;
        let connections = match options.take("connections") {
            None => CONNECTIONS,
            Some(text) => text.parse().ok().filter(|count| (1..=64).contains(count)).ok_or_else(|| {
                wrong(format!("invalid connections {text:?}; write a number from 1 to 64, for example connections=4"))
            })?,
        };
        let tls = tls::from_options(&mut options, wrong)?;
        // `tokio-postgres` parses the other options: host, options, target_session_attrs and so on.
        let rest = options.into_rest();
        let rest: Vec<String> = rest.into_iter().map(|(name, value)| format!("{name}={value}")).collect();
        let config = Config::from_str(&format!("postgres://{authority}{path}?{}", rest.join("&")));
        // The error names an option or a part of the URL. It does not quote a password.
        let mut config = config.map_err(|error| wrong(format!("{}: {EXAMPLES}", super::error::Cause(error))))?;
        #[cfg(unix)]
        if tls.is_some() && config.get_hosts().iter().any(|host| matches!(host, Host::Unix(_))) {
            return Err(wrong("a Unix socket has no TLS: remove sslmode".to_owned()));
        }
        config.ssl_mode(if tls.is_some() { SslMode::Require } else { SslMode::Disable });
        if config.get_user().is_none() {
            return Err(wrong(format!("the user is missing: {EXAMPLES}")));
        }
        if config.get_hosts().is_empty() {
            return Err(wrong(format!("the host is missing: {EXAMPLES}")));
        }
        // A replica rejects writes, so with several hosts each new connection checks for this. With
        // one host, the check is omitted to save its round trip. The first write to a replica fails
        // then.
        if config.get_target_session_attrs() == TargetSessionAttrs::Any && config.get_hosts().len() > 1 {
            config.target_session_attrs(TargetSessionAttrs::ReadWrite);
        }
        if config.get_application_name().is_none() {
            config.application_name("tower-ratelimit");
        }
        let hosts = authority.rsplit_once('@').map_or(authority, |(_, hosts)| hosts);
        let server = if hosts.is_empty() { "PostgreSQL" } else { hosts }.to_owned();
        Ok(Self { config, tls, server, table, connections, migrates, prefix, deadline, long_logs, max_skew })
    }
}
