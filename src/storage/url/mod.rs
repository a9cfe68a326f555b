//! What URLs of servers have in common: `scheme://user:password@host:port,host/path?option=value`.

mod authority;
mod options;

use std::fmt;
use std::path::PathBuf;

pub(super) use self::authority::Authority;
use self::authority::may_be_login;
pub(super) use self::options::{Options, checked_prefix};
use crate::ConfigError;

/// Where one server listens.
#[cfg_attr(not(feature = "redis"), allow(dead_code, reason = "not all can be on a unix socket"))]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Address {
    Tcp(Host),
    Unix(PathBuf),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Host {
    /// A name or an address, an IPv6 one without brackets.
    pub(super) name: String,
    pub(super) port: u16,
}

/// Never shows its password.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct Login {
    pub(super) user: Option<String>,
    pub(super) password: Option<String>,
}

/// Makes the error of what is wrong, which says what to write.
pub(super) type Wrong<'a> = dyn Fn(String) -> ConfigError + 'a;

/// The parts of a URL, as they are written.
pub(super) struct Parts<'a> {
    pub(super) scheme: &'a str,
    pub(super) authority: &'a str,
    /// With the slash it begins with.
    pub(super) path: &'a str,
    pub(super) query: &'a str,
}

/// What `read` makes of a URL. Errors quote it without what may be secret; `examples` say what can be written.
pub(super) fn read<T>(
    url: &str,
    examples: &str,
    read: impl FnOnce(&Parts<'_>, &Wrong<'_>) -> Result<T, ConfigError>,
) -> Result<T, ConfigError> {
    let wrong = |what: String| ConfigError::new(format!("cannot read the URL {:?}: {what}", without_secrets(url)));
    read(&Parts::of(url, examples, &wrong)?, &wrong)
}

impl<'a> Parts<'a> {
    fn of(url: &'a str, examples: &str, wrong: &Wrong<'_>) -> Result<Self, ConfigError> {
        let (scheme, rest) = url.split_once("://").ok_or_else(|| wrong(examples.to_owned()))?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
        if path.contains('@') || query.contains('@') {
            // Nothing is quoted: it may be a password.
            return Err(wrong(
                "after the host @ is written %40; in a password / is written %2F, ? %3F and @ %40".to_owned(),
            ));
        }
        if rest.contains('#') || query.contains('#') {
            return Err(wrong("there is nothing to be said after #; a # itself is written %23".to_owned()));
        }
        Ok(Self { scheme, authority, path, query })
    }

    /// The path without percent-encoding.
    #[cfg_attr(not(feature = "redis"), allow(dead_code, reason = "not all have one"))]
    pub(super) fn decoded_path(&self, wrong: &Wrong<'_>) -> Result<String, ConfigError> {
        decoded(self.path).map_err(|why| wrong(format!("in {:?} {why}", self.path)))
    }
}

/// Without percent-encoding, or what is wrong with it.
fn decoded(text: &str) -> Result<String, &'static str> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digit = |at: usize| after.get(at).and_then(|&byte| char::from(byte).to_digit(16));
        let (Some(high), Some(low)) = (digit(0), digit(1)) else {
            return Err("a % has to be followed by two digits from 0 to F; a % itself is written %25");
        };
        bytes.push(u8::try_from(high * 16 + low).unwrap_or_default());
        rest = &after[2..];
    }
    String::from_utf8(bytes).map_err(|_| "what is written with % is not UTF-8")
}

/// What can be shown of a URL: no user and no password, wherever they may stand, and no options.
///
/// If the `@` was forgotten, a password stands where a port would. Then nothing but the scheme is shown.
fn without_secrets(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").map_or(("", url), |(scheme, _)| url.split_at(scheme.len() + 3));
    let (hidden, shown) = rest.rsplit_once('@').map_or(("", rest), |(_, shown)| ("***@", shown));
    let shown = shown.split('?').next().unwrap_or_default();
    let authority = shown.split('/').next().unwrap_or_default();
    if hidden.is_empty() && authority.split(',').any(may_be_login) {
        return format!("{scheme}***");
    }
    format!("{scheme}{hidden}{shown}")
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
        let hosts = |parts: &Parts<'_>, wrong: &Wrong<'_>| {
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
            "redis://me:secret?deadline=1s",
            "redis://host,me:secret",
            "redis://me:secret,host",
            "redis://[secret",
            "redis://[::1]:secret",
            "me:secret",
            "me:secret/0",
        ] {
            let error = error(url);
            assert!(!error.contains("secret") && error.contains("write"), "{url}: {error}");
        }
        let error = error("redis://me:secret:6379");
        assert!(error.contains("user:password@"), "{error}");
    }

    #[test]
    fn host_that_holds_no_password_is_quoted() {
        for host in
            [":6379", "host:", "host:0", "host:65536", "host:+1", "ho st", "2001:db8::1", "[::1", "[::1]6379", "[::1]:"]
        {
            let error = error(&format!("redis://{host}"));
            assert_eq!(error.matches(&format!("{host:?}")).count(), 1, "{error}");
            assert!(error.contains(&format!("redis://{host}")), "{error}");
        }
        assert!(error("localhost:6379").contains("\"localhost:6379\""));
    }
}
