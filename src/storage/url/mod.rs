//! Parses the URLs of servers: `scheme://user:password@host:port,host/path?option=value`.
#![cfg_attr(
    not(any(feature = "redis", feature = "memcached", feature = "etcd")),
    allow(dead_code, unused_imports, reason = "the URL of a file has no hosts, and PostgreSQL parses its own")
)]

mod authority;
mod options;

use std::fmt;
use std::path::PathBuf;

pub(super) use self::authority::Authority;
use self::authority::may_be_login;
#[cfg(any(feature = "memcached", feature = "etcd", feature = "postgres"))]
pub(super) use self::options::CasOptions;
#[cfg(feature = "sqlite")]
pub(super) use self::options::PREFIX;
pub(super) use self::options::{Options, decoded};
use crate::error::ConfigError;

/// The address of one server.
#[cfg_attr(not(feature = "redis"), allow(dead_code, reason = "not all servers support Unix sockets"))]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Address {
    Tcp(Host),
    Unix(PathBuf),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Host {
    /// A name or an address. An IPv6 address has no brackets.
    pub(super) name: String,
    pub(super) port: u16,
}

/// The user and the password of a server. `Debug` hides the password.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct Login {
    pub(super) user: Option<String>,
    pub(super) password: Option<String>,
}

/// Creates an error from a message. The message states the problem and the correction.
pub(super) type Wrong<'a> = dyn Fn(String) -> ConfigError + 'a;

/// The parts of a URL, before percent-decoding.
pub(super) struct UrlParts<'a> {
    pub(super) scheme: &'a str,
    pub(super) authority: &'a str,
    /// Starts with a slash, unless it is empty.
    pub(super) path: &'a str,
    pub(super) query: &'a str,
}

/// Splits a URL, and calls `parse` with its parts and a function that creates errors. Errors quote
/// the URL without its secrets. `examples` is the advice in the error for a URL without `://`.
pub(super) fn read<T>(
    url: &str,
    examples: &str,
    parse: impl FnOnce(&UrlParts<'_>, &Wrong<'_>) -> Result<T, ConfigError>,
) -> Result<T, ConfigError> {
    let wrong = |why: String| ConfigError::new(format!("cannot read the URL {:?}: {why}", without_secrets(url)));
    parse(&UrlParts::split(url, examples, &wrong)?, &wrong)
}

/// Reads the options of a storage that has no URL, from the text of a URL's query.
#[cfg(any(feature = "deadpool-postgres", feature = "redis-connection-manager", feature = "redis-cluster-async"))]
pub(super) fn read_options<T>(
    query: &str,
    parse: impl FnOnce(&mut Options<'_>, &Wrong<'_>) -> Result<T, ConfigError>,
) -> Result<T, ConfigError> {
    let wrong = |why: String| ConfigError::new(format!("cannot read the options {query:?}: {why}"));
    let mut options = Options::parse(query, &wrong)?;
    let parsed = parse(&mut options, &wrong)?;
    options.end()?;
    Ok(parsed)
}

impl<'a> UrlParts<'a> {
    fn split(url: &'a str, examples: &str, wrong: &Wrong<'_>) -> Result<Self, ConfigError> {
        let parts = url.split_once("://").filter(|(scheme, _)| is_scheme(scheme));
        let (scheme, rest) = parts.ok_or_else(|| wrong(examples.to_owned()))?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
        if path.contains('@') || query.contains('@') {
            // The error quotes nothing, because the text may be a password.
            return Err(wrong(
                "write @ after the host as %40; write /, ? and @ in a password as %2F, %3F and %40".to_owned(),
            ));
        }
        if rest.contains('#') || query.contains('#') {
            return Err(wrong(
                "a fragment is not supported; leave out # and the text after it, or write # as %23".to_owned(),
            ));
        }
        Ok(Self { scheme, authority, path, query })
    }

    /// Returns the percent-decoded path.
    #[cfg_attr(not(feature = "redis"), allow(dead_code, reason = "not all servers have a path"))]
    pub(super) fn decoded_path(&self, wrong: &Wrong<'_>) -> Result<String, ConfigError> {
        decoded(self.path).map_err(|why| wrong(format!("invalid path {:?}: {why}", self.path)))
    }
}

/// Returns the URL for an error message, without user, password and options.
///
/// If the `@` is missing, the text after the colon may be a password instead of a port. Then the
/// result contains only the scheme. A text without a scheme is shown only if it is a host or a path,
/// because it may be a connection string with a password, such as `host=db password=..`.
fn without_secrets(url: &str) -> String {
    let before_options = url.split('?').next().unwrap_or_default();
    let (scheme, rest) = match url.split_once("://") {
        Some((scheme, _)) if is_scheme(scheme) => url.split_at(scheme.len() + 3),
        None if is_host_or_path(before_options) => ("", before_options),
        _ => return "***".to_owned(),
    };
    let (hidden, shown) = rest.rsplit_once('@').map_or(("", rest), |(_, shown)| ("***@", shown));
    let shown = shown.split('?').next().unwrap_or_default();
    let authority = shown.split('/').next().unwrap_or_default();
    if hidden.is_empty() && authority.split(',').any(may_be_login) {
        return format!("{scheme}***");
    }
    format!("{scheme}{hidden}{shown}")
}

/// Returns `true` if the text before `://` can be a scheme.
fn is_scheme(text: &str) -> bool {
    text.trim().chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.'))
}

/// Returns `true` if the text has only the characters of a host, a port and a path.
fn is_host_or_path(text: &str) -> bool {
    text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':' | '/' | '[' | ']' | ','))
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, port } = self;
        if name.contains(':') { write!(f, "[{name}]:{port}") } else { write!(f, "{name}:{port}") }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(host) => host.fmt(f),
            Self::Unix(path) => path.display().fmt(f),
        }
    }
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let password = self.password.as_ref().map(|_| "***");
        f.debug_struct("Login").field("user", &self.user).field("password", &password).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(url: &str) -> String {
        let hosts = |parts: &UrlParts<'_>, wrong: &Wrong<'_>| {
            Authority::parse(parts.authority, 6379, wrong).map(|authority| authority.hosts)
        };
        read(url, "write redis://host:6379", hosts).expect_err(url).to_string()
    }

    #[test]
    fn password_without_the_at_sign_is_not_shown() {
        for url in [
            "redis://me:secret",
            "redis://:secret",
            "redis://me:secret:6379",
            "redis://me:secrethost:6379",
            "redis://me:secret/0",
            "redis://me:pa/secret",
            "redis://me:secret?timeout=1s",
            "redis://host,me:secret",
            "redis://me:secret,host",
            "redis://[secret",
            "redis://[::1]:secret",
            "me:secret",
            "me:secret/0",
            "me:secret@host",
            "host=db user=app password=secret dbname=x",
            "host=db password=secret://x",
            "host=db password=x?secret@secret",
            "redis://host=db password=secret",
        ] {
            let error = error(url);
            assert!(!error.contains("secret") && error.contains("write"), "{url}: {error}");
        }
        let error = error("redis://me:secret:6379");
        assert!(error.contains("user:password@"), "{error}");
    }

    #[test]
    fn invalid_host_without_a_password_is_quoted() {
        for host in
            [":6379", "host:", "host:0", "host:65536", "host:+1", "ho st", "2001:db8::1", "[::1", "[::1]6379", "[::1]:"]
        {
            let error = error(&format!("redis://{host}"));
            assert_eq!(error.matches(&format!("{host:?}")).count(), 1, "{error}");
            assert!(error.contains(&format!("redis://{host}")), "{error}");
        }
        for text in ["localhost:6379", "127.0.0.1,[::1]:6379/0", "/var/run/redis.sock"] {
            assert!(error(text).contains(&format!("{text:?}")), "{}", error(text));
        }
        assert!(error("localhost:6379?timeout=1s").contains("\"localhost:6379\""));
    }
}
