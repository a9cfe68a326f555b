//! What a URL says: where to connect, as whom, and what to call the keys.

use std::time::Duration;

use crate::ConfigError;
use crate::storage::tls::Tls;
use crate::storage::url::{self, Address, Authority, Host, Login, Options, Parts, Wrong};

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

#[derive(Clone, Debug, Default)]
pub(super) struct Access {
    pub(super) login: Login,
    pub(super) db: u32,
    pub(super) tls: Option<Tls>,
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
        url::read(url, EXAMPLES, Self::read)
    }

    fn read(parts: &Parts<'_>, wrong: &Wrong<'_>) -> Result<Self, ConfigError> {
        let &Parts { scheme, authority, path, query } = parts;
        let (kind, tls) = scheme_of(scheme).ok_or_else(|| wrong(format!("its scheme is {scheme:?}, {EXAMPLES}")))?;
        enabled(kind, tls, scheme, wrong)?;
        let port = if kind == Kind::Sentinel { 26_379 } else { 6_379 };
        let Authority { login, hosts } = Authority::parse(authority, port, wrong)?;
        let mut options = Options::parse(query, wrong)?;
        let segments = Segments { path: parts.decoded_path(wrong)? };
        let db;
        let place = match kind {
            Kind::Unix => {
                if !hosts.is_empty() || path.len() < 2 {
                    return Err(wrong("write a path from the root, for example redis+unix:///path/to.sock".to_owned()));
                }
                db = options.take("db").map(|text| number_of_db(&text, wrong)).transpose()?;
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
                Place::Sentinels { hosts, service, login: sentinel_login(&mut options, wrong)? }
            }
        };
        let tls = if tls { Some(Tls::new(options.take("ca").as_deref(), None).map_err(wrong)?) } else { None };
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
fn enabled(kind: Kind, tls: bool, scheme: &str, wrong: &Wrong<'_>) -> Result<(), ConfigError> {
    let needs = |feature: &str| Err(wrong(format!("{scheme}:// needs the feature {feature:?} of tower-ratelimit")));
    match kind {
        Kind::Cluster if !cfg!(feature = "redis-cluster") => needs("redis-cluster"),
        Kind::Sentinel if !cfg!(feature = "redis-sentinel") => needs("redis-sentinel"),
        Kind::Unix if !cfg!(unix) => Err(wrong("this system has no unix sockets: write redis://host:6379".to_owned())),
        _ if tls && !cfg!(feature = "redis-rustls") => needs("redis-rustls"),
        _ => Ok(()),
    }
}

fn number_of_db(text: &str, wrong: &Wrong<'_>) -> Result<u32, ConfigError> {
    let number = text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()));
    number.ok_or_else(|| wrong(format!("{text:?} is no number of a database: write a number, for example /0")))
}

fn sentinel_login(options: &mut Options<'_>, wrong: &Wrong<'_>) -> Result<Login, ConfigError> {
    let login = Login { user: options.take("sentinel-user"), password: options.take("sentinel-password") };
    if login.user.is_some() && login.password.is_none() {
        return Err(wrong("sentinel-user has no password: write sentinel-password=... too".to_owned()));
    }
    Ok(login)
}

/// The path, decoded.
struct Segments {
    path: String,
}

impl Segments {
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
