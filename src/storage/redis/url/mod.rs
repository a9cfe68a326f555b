//! What a URL says: where to connect, as whom, and what to call the keys.

mod authority;
mod options;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use self::authority::Authority;
use self::options::Options;
pub(super) use self::options::{checked_deadline, checked_prefix};
use super::tls::Tls;
use crate::ConfigError;

/// All that a URL says.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub(super) place: Place,
    /// How to be let in by the servers that keep the counters.
    pub(super) access: Access,
    pub(super) prefix: Box<str>,
    pub(super) deadline: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Server(Address),
    /// Nodes of a cluster, at least one: the others are found out.
    Cluster(Vec<Host>),
    /// Sentinels, at least one, who know where `service` is, and how to be let in by them.
    Sentinels {
        hosts: Vec<Host>,
        service: String,
        login: Login,
    },
}

/// Where one server listens.
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

#[derive(Clone, Debug, Default)]
pub(super) struct Access {
    pub(super) login: Login,
    pub(super) db: u32,
    pub(super) tls: Option<Tls>,
}

/// Never shows its password.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct Login {
    pub(super) user: Option<String>,
    pub(super) password: Option<String>,
}

/// One of each kind, to choose from.
const EXAMPLES: &str = "write redis://host:6379, rediss://host:6379, redis+unix:///path/to.sock, \
     redis+cluster://host:6379,host:6379 or redis+sentinel://host:26379,host:26379/service";

/// Which servers a scheme is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    One,
    Unix,
    Cluster,
    Sentinel,
}

impl Target {
    pub(super) fn parse(url: &str) -> Result<Self, ConfigError> {
        let wrong = |what: String| ConfigError::new(format!("cannot read the URL {:?}: {what}", without_secrets(url)));
        Self::read(url, &wrong)
    }

    fn read(url: &str, wrong: &dyn Fn(String) -> ConfigError) -> Result<Self, ConfigError> {
        let (scheme, rest) = url.split_once("://").ok_or_else(|| wrong(EXAMPLES.to_owned()))?;
        let (kind, tls) = scheme_of(scheme).ok_or_else(|| wrong(format!("its scheme is {scheme:?}, {EXAMPLES}")))?;
        enabled(kind, tls, scheme, wrong)?;
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
        let port = if kind == Kind::Sentinel { 26_379 } else { 6_379 };
        let Authority { login, hosts } = Authority::parse(authority, port, wrong)?;
        let mut options = Options::parse(query, wrong)?;
        let segments = Segments::of(path, wrong)?;
        let db;
        let place = match kind {
            Kind::Unix => {
                if !hosts.is_empty() || path.len() < 2 {
                    return Err(wrong("write a path from the root, for example redis+unix:///path/to.sock".to_owned()));
                }
                db = options.db()?;
                Place::Server(Address::Unix(segments.path.into()))
            }
            _ if hosts.is_empty() => return Err(wrong(format!("it names no host: {EXAMPLES}"))),
            Kind::One => {
                let [host] = <[Host; 1]>::try_from(hosts).map_err(|_| {
                    wrong("it names several hosts: write redis+cluster:// or redis+sentinel:// for them".to_owned())
                })?;
                db = segments.only().map(|text| number_of_db(text, wrong)).transpose()?;
                Place::Server(Address::Tcp(host))
            }
            Kind::Cluster => {
                db = segments.only().map(|text| number_of_db(text, wrong)).transpose()?;
                if db.unwrap_or(0) != 0 {
                    return Err(wrong("a cluster has no database but 0: leave it out".to_owned()));
                }
                Place::Cluster(hosts)
            }
            Kind::Sentinel => {
                let (service, rest) = segments.first_and_rest();
                let service = service.ok_or_else(|| {
                    wrong(
                        "it does not say what the sentinels call the service: write it after a /, \
                          for example redis+sentinel://host:26379/mymaster"
                            .to_owned(),
                    )
                })?;
                db = rest.map(|text| number_of_db(text, wrong)).transpose()?;
                Place::Sentinels { hosts, service, login: options.sentinel_login()? }
            }
        };
        let tls = if tls { Some(options.tls()?) } else { None };
        let (prefix, deadline) = (options.prefix()?, options.deadline()?);
        options.end()?;
        Ok(Self { place, access: Access { login, db: db.unwrap_or(0), tls }, prefix, deadline })
    }
}

fn scheme_of(scheme: &str) -> Option<(Kind, bool)> {
    let (base, kind) = scheme.split_once('+').map_or((scheme, None), |(base, kind)| (base, Some(kind)));
    let tls = match base {
        "redis" | "valkey" => false,
        "rediss" | "valkeys" => true,
        _ => return None,
    };
    let kind = match kind {
        None => Kind::One,
        Some("unix") if !tls => Kind::Unix,
        Some("cluster") => Kind::Cluster,
        Some("sentinel") => Kind::Sentinel,
        Some(_) => return None,
    };
    Some((kind, tls))
}

/// An error that names the feature which is missing, if one is.
fn enabled(kind: Kind, tls: bool, scheme: &str, wrong: &dyn Fn(String) -> ConfigError) -> Result<(), ConfigError> {
    let needs = |feature: &str| Err(wrong(format!("{scheme}:// needs the feature {feature:?} of tower-ratelimit")));
    match kind {
        Kind::Cluster if !cfg!(feature = "redis-cluster") => needs("redis-cluster"),
        Kind::Sentinel if !cfg!(feature = "redis-sentinel") => needs("redis-sentinel"),
        Kind::Unix if !cfg!(unix) => Err(wrong("this system has no unix sockets: write redis://host:6379".to_owned())),
        _ if tls && !cfg!(feature = "redis-rustls") => needs("redis-rustls"),
        _ => Ok(()),
    }
}

fn number_of_db(text: &str, wrong: &dyn Fn(String) -> ConfigError) -> Result<u32, ConfigError> {
    let number = text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()));
    number.ok_or_else(|| wrong(format!("{text:?} is no number of a database: write a number, for example /0")))
}

/// The path, decoded.
struct Segments {
    path: String,
}

impl Segments {
    fn of(path: &str, wrong: &dyn Fn(String) -> ConfigError) -> Result<Self, ConfigError> {
        Ok(Self { path: decoded(path).map_err(|why| wrong(format!("in {path:?} {why}")))? })
    }

    fn trimmed(&self) -> &str {
        let path = self.path.strip_prefix('/').unwrap_or(&self.path);
        path.strip_suffix('/').unwrap_or(path)
    }

    /// What stands between the slashes, if anything does.
    fn only(&self) -> Option<&str> {
        Some(self.trimmed()).filter(|text| !text.is_empty())
    }

    fn first_and_rest(&self) -> (Option<String>, Option<&str>) {
        let (first, rest) =
            self.trimmed().split_once('/').map_or((self.trimmed(), None), |(first, rest)| (first, Some(rest)));
        (Some(first).filter(|text| !text.is_empty()).map(str::to_owned), rest)
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
fn without_secrets(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").map_or(("", url), |(scheme, _)| url.split_at(scheme.len() + 3));
    let shown = rest.rsplit_once('@').map_or(rest, |(_, shown)| shown);
    let hidden = if shown.len() < rest.len() { "***@" } else { "" };
    format!("{scheme}{hidden}{}", shown.split('?').next().unwrap_or_default())
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
