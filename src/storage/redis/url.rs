//! Parses the storage's URL: servers, login, prefix and timeout.

use std::time::Duration;

use crate::error::ConfigError;
use crate::storage::credentials::LoginSource;
use crate::storage::tls::Tls;
use crate::storage::url::{self, Address, Authority, Host, Login, Options, UrlParts, Wrong};

/// The settings in a URL.
#[derive(Clone, Debug)]
pub(super) struct RedisUrl {
    pub(super) servers: Servers,
    /// The access to the servers that keep the counters. Sentinels have a login of their own.
    pub(super) access: Access,
    pub(super) prefix: Box<str>,
    pub(super) timeout: Duration,
    pub(super) combine: Combine,
}

/// The servers in a URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Servers {
    Single(Address),
    /// At least one node of a cluster. The nodes return the addresses of the others.
    Cluster(Vec<Host>),
    /// At least one sentinel, the name of the service that the sentinels monitor, and their login.
    Sentinels {
        hosts: Vec<Host>,
        service: String,
        login: Login,
    },
}

/// The login, database and TLS settings of a connection.
#[derive(Clone, Debug, Default)]
pub(super) struct Access {
    pub(super) login: LoginSource,
    pub(super) db: u32,
    pub(super) tls: Option<Tls>,
}

/// The connections on which hits are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Combine {
    Never,
    /// Those that have proved to be one server.
    OnSingleServer,
    /// All, because the user vouches for them.
    Always,
}

impl Combine {
    /// The values of the option `combine` in a URL.
    pub(super) const WORDS: [(&str, Self); 3] =
        [("true", Self::OnSingleServer), ("false", Self::Never), ("always", Self::Always)];
}

/// An example of each kind of URL, for error messages.
const EXAMPLES: &str = "write redis://host:6379, rediss://host:6379, redis+unix:///path/to.sock, \
     redis+cluster://host:6379,host:6379 or redis+sentinel://host:26379,host:26379/service";

/// The kind of servers that a scheme selects.
#[derive(Clone, Copy, PartialEq, Eq)]
enum UrlKind {
    One,
    Unix,
    Cluster,
    Sentinel,
}

impl RedisUrl {
    pub(super) fn parse(url: &str) -> Result<Self, ConfigError> {
        url::read(url, EXAMPLES, Self::read)
    }

    fn read(parts: &UrlParts<'_>, wrong: &Wrong<'_>) -> Result<Self, ConfigError> {
        let &UrlParts { scheme, authority, path, query } = parts;
        let (kind, tls) = scheme_of(scheme).ok_or_else(|| wrong(format!("unknown scheme {scheme:?}: {EXAMPLES}")))?;
        check_features(kind, tls, scheme, wrong)?;
        let port = if kind == UrlKind::Sentinel { 26_379 } else { 6_379 };
        let Authority { login, hosts } = Authority::parse(authority, port, wrong)?;
        let mut options = Options::parse(query, wrong)?;
        let decoded = parts.decoded_path(wrong)?;
        let trimmed = decoded.strip_prefix('/').unwrap_or(&decoded);
        let trimmed = trimmed.strip_suffix('/').unwrap_or(trimmed);
        let parse_db = |text: Option<&str>| text.map_or(Ok(0), |text| parse_database(text, wrong));
        let path_db = || parse_db(Some(trimmed).filter(|text| !text.is_empty()));
        let db;
        let servers = match kind {
            UrlKind::Unix => {
                if !hosts.is_empty() || path.len() < 2 {
                    return Err(wrong("write an absolute path, for example redis+unix:///path/to.sock".to_owned()));
                }
                db = parse_db(options.take("db").as_deref())?;
                Servers::Single(Address::Unix(decoded.into()))
            }
            _ if hosts.is_empty() => return Err(wrong(format!("the host is missing: {EXAMPLES}"))),
            UrlKind::One => {
                let [host] = <[Host; 1]>::try_from(hosts)
                    .map_err(|_| wrong("for several hosts, write redis+cluster:// or redis+sentinel://".to_owned()))?;
                db = path_db()?;
                Servers::Single(Address::Tcp(host))
            }
            UrlKind::Cluster => {
                db = path_db()?;
                if db != 0 {
                    return Err(wrong("a cluster has only database 0: write no database".to_owned()));
                }
                Servers::Cluster(hosts)
            }
            UrlKind::Sentinel => {
                let (service, rest) =
                    trimmed.split_once('/').map_or((trimmed, None), |(first, rest)| (first, Some(rest)));
                if service.is_empty() {
                    return Err(wrong(
                        "the name of the service is missing: write it after the hosts, \
                          for example redis+sentinel://host:26379/mymaster"
                            .to_owned(),
                    ));
                }
                db = parse_db(rest)?;
                Servers::Sentinels { hosts, service: service.to_owned(), login: sentinel_login(&mut options, wrong)? }
            }
        };
        let tls = if tls { Some(Tls::from_options(&mut options, None, wrong)?) } else { None };
        let (prefix, timeout) = (options.prefix()?, options.timeout()?);
        let combine = options.choice("combine", Combine::OnSingleServer, &Combine::WORDS)?;
        options.end()?;
        let access = Access { login: LoginSource::Fixed(login), db, tls };
        Ok(Self { servers, access, prefix, timeout, combine })
    }
}

fn scheme_of(scheme: &str) -> Option<(UrlKind, bool)> {
    let (base, kind) = scheme.split_once('+').map_or((scheme, None), |(base, kind)| (base, Some(kind)));
    let tls = match base {
        "redis" | "valkey" => false,
        "rediss" | "valkeys" => true,
        _ => return None,
    };
    let kind = match kind {
        None => UrlKind::One,
        Some("unix") if !tls => UrlKind::Unix,
        Some("cluster") => UrlKind::Cluster,
        Some("sentinel") => UrlKind::Sentinel,
        Some(_) => return None,
    };
    Some((kind, tls))
}

/// Returns an error if the URL needs a feature that is not enabled or that the system lacks.
fn check_features(kind: UrlKind, tls: bool, scheme: &str, wrong: &Wrong<'_>) -> Result<(), ConfigError> {
    let needs = |feature: &str| Err(wrong(format!("{scheme}:// needs the feature {feature:?} of tower-ratelimit")));
    match kind {
        UrlKind::Cluster if !cfg!(feature = "redis-cluster") => needs("redis-cluster"),
        UrlKind::Sentinel if !cfg!(feature = "redis-sentinel") => needs("redis-sentinel"),
        UrlKind::Unix if !cfg!(unix) => {
            Err(wrong("this system has no Unix sockets: write redis://host:6379".to_owned()))
        }
        _ if tls && !cfg!(feature = "redis-rustls") => needs("redis-rustls"),
        _ => Ok(()),
    }
}

fn parse_database(text: &str, wrong: &Wrong<'_>) -> Result<u32, ConfigError> {
    let number = text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()));
    number.ok_or_else(|| wrong(format!("invalid database {text:?}: write a number, for example /0")))
}

fn sentinel_login(options: &mut Options<'_>, wrong: &Wrong<'_>) -> Result<Login, ConfigError> {
    let login = Login { user: options.take("sentinel-user"), password: options.take("sentinel-password") };
    if login.user.is_some() && login.password.is_none() {
        return Err(wrong("sentinel-user needs a password: write sentinel-password=... too".to_owned()));
    }
    Ok(login)
}
