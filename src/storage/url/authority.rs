//! The authority of a URL: `user:password@host:port,host:port`.

use std::net::Ipv6Addr;

use super::options::decoded;
use super::{Host, Login, Wrong};
use crate::error::ConfigError;

/// The login and the hosts of a URL.
pub(in crate::storage) struct Authority {
    pub(in crate::storage) login: Login,
    pub(in crate::storage) hosts: Vec<Host>,
}

impl Authority {
    /// Parses an authority. `port` is the default port. An empty text has no hosts.
    pub(in crate::storage) fn parse(text: &str, port: u16, wrong: &Wrong<'_>) -> Result<Self, ConfigError> {
        let (login, hosts) = match text.rsplit_once('@') {
            Some((login, hosts)) => (self::login(login, wrong)?, hosts),
            None => (Login::default(), text),
        };
        let hosts = hosts.split(',').filter(|_| !hosts.is_empty()).map(|host| self::host(host, port, wrong));
        Ok(Self { login, hosts: hosts.collect::<Result<_, _>>()? })
    }
}

/// Parses the user and the password. Errors never quote them.
fn login(text: &str, wrong: &Wrong<'_>) -> Result<Login, ConfigError> {
    if text.contains('@') {
        return Err(wrong("write @ in a user or a password as %40".to_owned()));
    }
    let Some((user, password)) = text.split_once(':') else {
        return Err(wrong("there is no password before @; write user:password@ or :password@".to_owned()));
    };
    let part = |text: &str| decoded(text).map_err(|why| wrong(format!("invalid user or password: {why}")));
    let (user, password) = (part(user)?, part(password)?);
    if password.is_empty() {
        return Err(wrong("the password before @ is empty; write user:password@, or leave out user and @".to_owned()));
    }
    Ok(Login { user: Some(user).filter(|user| !user.is_empty()), password: Some(password) })
}

fn host(text: &str, port: u16, wrong: &Wrong<'_>) -> Result<Host, ConfigError> {
    Host::parse(text, port).ok_or_else(|| {
        let help = format!("write host:{port}, 192.0.2.1:{port} or [2001:db8::1]:{port}");
        if may_be_login(text) {
            return wrong(format!("invalid host; {help}, and a password as user:password@ before the host"));
        }
        wrong(format!("invalid host {text:?}; {help}"))
    })
}

/// Returns `true` if the host must not be shown, because it may be a login without its `@`: the
/// text after the colon is neither a port nor an IPv6 address, so it may be a password. So may the
/// text after a `=`, in a connection string such as `host=db password=..`.
pub(super) fn may_be_login(host: &str) -> bool {
    if host.contains('=') {
        return true;
    }
    let is_address = |text: &str| text.parse::<Ipv6Addr>().is_ok();
    let is_port = |text: &str| text.len() <= 5 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'+' | b'-'));
    if let Some(inside) = host.strip_prefix('[') {
        let (address, rest) = inside.split_once(']').unwrap_or((inside, ""));
        return !is_address(address) || !is_port(rest.trim_start_matches(':'));
    }
    host.split_once(':').is_some_and(|(_, port)| !is_port(port) && !is_address(host))
}

impl Host {
    /// Parses a name or an address, with an optional port. `port` is the default.
    fn parse(text: &str, port: u16) -> Option<Self> {
        let (name, rest) = if let Some(inside) = text.strip_prefix('[') {
            let (address, rest) = inside.split_once(']')?;
            (address.parse::<Ipv6Addr>().ok()?.to_string(), rest)
        } else {
            let (name, rest) = text.split_at(text.find(':').unwrap_or(text.len()));
            let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
            (Some(name).filter(|name| !name.is_empty() && name.chars().all(plain))?.to_owned(), rest)
        };
        let port = match rest.strip_prefix(':') {
            Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => digits.parse().ok()?,
            None if rest.is_empty() => port,
            _ => return None,
        };
        (port != 0).then_some(Self { name, port })
    }
}
