//! Parses the flags.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::slice;

use axum::body::Body;
use axum::http::{HeaderName, StatusCode};
use tower_ratelimit::extract::{AllowList, Method, Path};
use tower_ratelimit::storage::AnyStorage;
use tower_ratelimit::{
    ClientIp, ConfigError, EmptyRejection, Global, GrpcRejection, Header, Headers, KeyExtractor, MemoryStorage,
    OnError, PeerIp, Policy, ProblemRejection, Rejection, TextRejection,
};

pub(crate) const USAGE: &str = "\
An axum server with rate limits. /status/CODE responds with that status, every other path with 200.

--listen ADDRESS         address to listen on (default 127.0.0.1:3000; port 0 picks a free port)
--policy POLICY          limits for every request, for example \"10/minute\" (the default) or
                         \"token-bucket 10/second burst 20; 1000/day\"; repeat it to add limits to the policy
--route PATH=POLICY      adds a layer with this policy to one route; repeat it for more routes
--policies FILE          reads the limits from a TOML file and reloads it when it changes, and at SIGHUP:
                         default = \"10/minute\", [routes] \"/login\" = \"5/minute\", [tiers] paid = \"100/second\",
                         [[also]] policy = \"1000/second\", key = \"global\" (a key as in --key): spends from all or none;
                         within = \"header:x-tenant\": the keys of default, [tiers] and [[also]] are within this one,
                         which a Redis Cluster needs to decide on several keys
--tier-header NAME       header field with the client's tier in that file (default x-tier). Only a proxy in front
                         of the server may set it
--in-flight N            refuses requests of a client that has N in flight, until a response has ended;
                         each process counts its own, whatever --storage is;
                         /slow?ms=MS streams a chunk each 100 ms for MS milliseconds
--storage URL            URL of the storage: memory:// (the default), redis://HOST, memcached://HOST, etcd://HOST,
                         postgres://USER@HOST/DATABASE or sqlite:PATH; all but memory need a feature of
                         cargo run: --features redis, memcached, etcd, postgres or sqlite
--on-error ACTION        admits (admit, the default) or refuses (refuse) requests while the storage fails
--timeout TIME          timeout of the storage (default 100ms)
--fallback memory        decides in memory with a part of each quota while the storage fails; needs --replicas
--replicas N             number of servers that share the storage; the fallback admits 1/N of each quota
--deny-cache             caches refusals locally for up to one second
--in-order               decides on the keys of [[also]] one after the other, and refunds, if the storage cannot decide
                         on several keys together
--lease UNITS            takes up to UNITS from the storage at once and spends them locally for a short time;
                         not for elastic windows, leaky buckets and lockouts
--key KEY                the client's identity: peer-ip (the default), global, path, method or header:NAME;
                         join several by +
--trust CIDR             trusts the proxies of this network to name the client; repeat it for more networks
--client-ip-header NAME  header field in which those proxies name the client: x-forwarded-for (the default), forwarded,
                         or another
--allow CIDR             does not limit clients of this network; repeat it for more networks
--cost-header NAME       reads the cost of a request from this header field: 1 if it is missing, 400 if it is not a number.
                         For experiments only: a client must not choose the cost of its own request
--charge-status STATUS   charges only responses with this status: 401, 4xx, or several joined by commas; may be repeated
--clear-status STATUS    clears the client's limits after responses with this status: 2xx, or several joined by commas;
                         may be repeated. For experiments only: an attacker with an account of his own could clear the
                         failures of his address
--settle-header NAME     corrects the cost of a request to the number in this header field of its response;
                         /status/CODE?cost=N writes N into it; a response without it keeps the cost
--headers FIELDS         header fields of responses: x (the default), draft11, draft6 or none; repeat it for several,
                         and for options: reset-in-seconds and suffix=TEXT change x, retry-jitter=PERCENT lengthens
                         Retry-After
--rejection KIND         body of a refusal: text (the default), json, empty or grpc
--shadow                 admits all requests and logs those that the limits would refuse
";

/// The values of the flags.
pub(crate) struct Options {
    pub(crate) listen: SocketAddr,
    pub(crate) policy: Policy,
    pub(crate) routes: Vec<(String, Policy)>,
    pub(crate) policies: Option<PathBuf>,
    pub(crate) tier_header: HeaderName,
    pub(crate) in_flight: Option<u32>,
    pub(crate) storage: AnyStorage,
    pub(crate) deny_cache: bool,
    pub(crate) in_order: bool,
    pub(crate) lease: Option<u32>,
    pub(crate) on_error: OnError,
    /// The number of servers that divide the quotas, if there is a fallback.
    pub(crate) replicas: Option<u32>,
    pub(crate) key: String,
    pub(crate) trust: Vec<String>,
    pub(crate) client_ip_header: Option<HeaderName>,
    pub(crate) allow: Vec<String>,
    pub(crate) cost_header: Option<HeaderName>,
    pub(crate) charge: Vec<Statuses>,
    pub(crate) clear: Vec<Statuses>,
    pub(crate) settle_header: Option<HeaderName>,
    pub(crate) headers: Headers,
    pub(crate) rejection: Kind,
    pub(crate) shadow: bool,
}

const FLAGS: &str = "--listen, --policy, --route, --policies, --tier-header, --in-flight, --storage, --on-error, --timeout, --fallback, --replicas, --deny-cache, --in-order, --lease, --key, --trust, --client-ip-header, --allow, --cost-header, \
                     --charge-status, --clear-status, --settle-header, --headers, --rejection, --shadow";

impl Options {
    pub(crate) fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Self, String> {
        use lexopt::prelude::*;
        let mut parser = lexopt::Parser::from_args(arguments);
        let (mut limits, mut headers) = (Vec::new(), Vec::new());
        let (mut storage, mut deadline) = ("memory://".to_owned(), None);
        let mut fallback = None;
        let mut options = Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 3000)),
            policy: policy("10/minute")?,
            routes: Vec::new(),
            policies: None,
            tier_header: HeaderName::from_static("x-tier"),
            in_flight: None,
            storage: MemoryStorage::new().into(),
            deny_cache: false,
            in_order: false,
            lease: None,
            on_error: OnError::Admit,
            replicas: None,
            key: "peer-ip".to_owned(),
            trust: Vec::new(),
            client_ip_header: None,
            allow: Vec::new(),
            cost_header: None,
            charge: Vec::new(),
            clear: Vec::new(),
            settle_header: None,
            headers: Headers::default(),
            rejection: Kind::Text,
            shadow: false,
        };
        while let Some(argument) = parser.next().map_err(|error| error.to_string())? {
            let Long(flag) = argument else { return Err(argument.unexpected().to_string()) };
            let flag = format!("--{flag}");
            if !FLAGS.split(", ").any(|known| known == flag) {
                return Err(format!("unknown flag {flag}; the flags are {FLAGS}"));
            }
            match &*flag {
                "--shadow" => options.shadow = true,
                "--deny-cache" => options.deny_cache = true,
                "--in-order" => options.in_order = true,
                _ => {}
            }
            if matches!(&*flag, "--shadow" | "--deny-cache" | "--in-order") {
                continue;
            }
            let value = parser.value().and_then(ValueExt::string).map_err(|error| error.to_string())?;
            match &*flag {
                "--storage" => storage = value,
                "--timeout" => deadline = Some(value),
                "--fallback" => fallback = Some(value),
                _ => {
                    let set = options.set(&flag, value, &mut limits, &mut headers);
                    set.map_err(|error| format!("{flag}: {error}"))?;
                }
            }
        }
        options.storage = any_storage(&storage, deadline.as_deref())?;
        options.check_fallback(fallback.as_deref(), &storage)?;
        if options.policies.is_some() && !(limits.is_empty() && options.routes.is_empty()) {
            return Err("--policies replaces --policy and --route: write the limits into the file".to_owned());
        }
        if !limits.is_empty() {
            options.policy = policy(&limits.join("; ")).map_err(|error| format!("--policy: {error}"))?;
        }
        options.headers = header_fields(&headers).map_err(|error| format!("--headers: {error}"))?;
        options.check()?;
        options.check_wrappers(&storage)?;
        Ok(options)
    }

    fn set(
        &mut self,
        flag: &str,
        value: String,
        limits: &mut Vec<String>,
        headers: &mut Vec<String>,
    ) -> Result<(), String> {
        match flag {
            "--listen" => {
                let invalid = |_| format!("cannot read the address {value:?}: write one like 127.0.0.1:3000");
                self.listen = value.parse().map_err(invalid)?;
            }
            "--policy" => {
                // The value is parsed alone first, so that an error quotes only this flag.
                policy(value.strip_prefix("shadow ").unwrap_or(&value))?;
                limits.push(value);
            }
            "--route" => {
                let (path, policy) = route(&value)?;
                if self.routes.iter().any(|(other, _)| *other == path) {
                    return Err(format!("{path} is set twice: write \"{path}=5/minute; 100/day\" for several limits"));
                }
                self.routes.push((path, policy));
            }
            "--policies" => self.policies = Some(value.into()),
            "--tier-header" => self.tier_header = header_name(&value)?,
            "--in-flight" => {
                let invalid = |_| format!("cannot read {value:?}: write a number of requests, for example 20");
                self.in_flight = Some(value.parse().map_err(invalid)?);
            }
            "--on-error" => {
                self.on_error = match &*value {
                    "admit" => OnError::Admit,
                    "refuse" => OnError::Refuse,
                    _ => return Err(format!("unknown action {value:?}: write admit or refuse")),
                };
            }
            "--replicas" => {
                let replicas = value.parse().ok().filter(|replicas| *replicas > 0);
                let invalid = || {
                    format!("cannot read {value:?}: write the number of servers that share the storage, for example 3")
                };
                self.replicas = Some(replicas.ok_or_else(invalid)?);
            }
            "--lease" => {
                let units = value.parse().ok().filter(|units| *units > 0);
                let invalid = || format!("cannot read {value:?}: write a number of units, for example 100");
                self.lease = Some(units.ok_or_else(invalid)?);
            }
            "--key" => self.key = value,
            "--trust" => self.trust.push(value),
            "--client-ip-header" => self.client_ip_header = Some(header_name(&value)?),
            "--allow" => self.allow.push(value),
            "--cost-header" => self.cost_header = Some(header_name(&value)?),
            "--charge-status" => self.charge.extend(Statuses::parse_list(&value)?),
            "--clear-status" => self.clear.extend(Statuses::parse_list(&value)?),
            "--settle-header" => self.settle_header = Some(header_name(&value)?),
            "--headers" => {
                // As for `--policy`.
                header_fields(slice::from_ref(&value))?;
                headers.push(value);
            }
            _ => self.rejection = Kind::parse(&value)?,
        }
        Ok(())
    }

    /// Checks the flags that depend on each other.
    fn check(&self) -> Result<(), String> {
        if self.client_ip_header.is_some() && self.trust.is_empty() {
            return Err(
                "--client-ip-header needs the proxies that write the header, for example --trust 10.0.0.0/8".to_owned()
            );
        }
        if self.settle_header.is_some() && !self.charge.is_empty() {
            return Err("--settle-header and --charge-status exclude each other: remove one of them".to_owned());
        }
        self.client_ip().map_err(|error| format!("--trust: {error}"))?;
        self.key().map_err(|error| format!("--key: {error}"))?;
        self.allow_list().map_err(|error| format!("--allow: {error}"))?;
        Ok(())
    }

    fn check_fallback(&self, fallback: Option<&str>, storage: &str) -> Result<(), String> {
        match fallback {
            None if self.replicas.is_some() => Err("--replicas needs --fallback memory"),
            Some("memory") if storage.starts_with("memory:") => {
                Err("--fallback needs a storage that can fail, for example --storage redis://localhost")
            }
            Some("memory") if self.replicas.is_none() => {
                Err("--fallback needs the number of servers that share the storage, for example --replicas 3")
            }
            None | Some("memory") => Ok(()),
            Some(_) => Err("--fallback can only be memory: write --fallback memory"),
        }
        .map_err(str::to_owned)
    }

    /// Rejects wrappers around the memory storage, because they only save round trips to a server.
    fn check_wrappers(&self, url: &str) -> Result<(), String> {
        let flags = [(self.deny_cache, "--deny-cache"), (self.lease.is_some(), "--lease")];
        match flags.into_iter().find(|(is_there, _)| *is_there && url.starts_with("memory:")) {
            None => Ok(()),
            Some((_, flag)) => Err(format!(
                "{flag} needs a server, because memory is as fast without it: remove the flag, or name a server, \
                 for example --storage redis://localhost"
            )),
        }
    }

    /// Returns the extractor of the client's key.
    pub(crate) fn key(&self) -> Result<Box<dyn KeyExtractor>, String> {
        self.key_of(&self.key)
    }

    /// Returns the extractor of a key as in `--key`.
    pub(crate) fn key_of(&self, key: &str) -> Result<Box<dyn KeyExtractor>, String> {
        let parts = key.split('+').map(|part| self.key_part(part));
        parts
            .reduce(|joined, part| Ok(Box::new(joined?.and(part?))))
            .unwrap_or_else(|| Err("it is empty: write for example peer-ip".to_owned()))
    }

    fn key_part(&self, part: &str) -> Result<Box<dyn KeyExtractor>, String> {
        Ok(match part.split_once(':') {
            Some(("header", name)) => Box::new(Header::from(header_name(name)?)),
            None if part == "peer-ip" => match self.client_ip().map_err(|error| error.to_string())? {
                Some(client) => Box::new(client),
                None => Box::new(PeerIp::new()),
            },
            None if part == "global" => Box::new(Global::new()),
            None if part == "path" => Box::new(Path::new()),
            None if part == "method" => Box::new(Method::new()),
            _ => {
                return Err(format!(
                    "unknown key {part:?}: write peer-ip, global, path, method or header:NAME, joined by +"
                ));
            }
        })
    }

    /// Returns the extractor for clients behind trusted proxies, if there are any.
    fn client_ip(&self) -> Result<Option<ClientIp>, ConfigError> {
        if self.trust.is_empty() {
            return Ok(None);
        }
        let client = ClientIp::behind(&self.trust)?;
        Ok(Some(match &self.client_ip_header {
            None => client,
            Some(name) if name == "forwarded" => client.forwarded(),
            Some(name) => client.try_header(name.as_str())?,
        }))
    }

    pub(crate) fn allow_list(&self) -> Result<Option<AllowList>, ConfigError> {
        if self.allow.is_empty() {
            return Ok(None);
        }
        let list = match self.client_ip()? {
            Some(client) => AllowList::new(client),
            None => AllowList::new(PeerIp::new()),
        };
        self.allow.iter().try_fold(list, |list, network| list.try_allow(network)).map(Some)
    }
}

/// One status, or all statuses of a class.
#[derive(Clone, Copy)]
pub(crate) enum Statuses {
    One(StatusCode),
    Class(u16),
}

impl Statuses {
    fn parse_list(text: &str) -> Result<Vec<Self>, String> {
        text.split(',').map(Self::parse).collect()
    }

    fn parse(text: &str) -> Result<Self, String> {
        let wrong = || format!("cannot read {text:?}: write a status like 401, or a class like 4xx");
        let text = &*text.trim().to_lowercase();
        if let Some(class @ ("1" | "2" | "3" | "4" | "5")) = text.strip_suffix("xx") {
            return Ok(Self::Class(class.parse().map_err(|_| wrong())?));
        }
        text.parse().map(Self::One).map_err(|_| wrong())
    }

    pub(crate) fn contain(self, status: StatusCode) -> bool {
        match self {
            Self::One(one) => status == one,
            Self::Class(class) => status.as_u16() / 100 == class,
        }
    }
}

/// The format of refusals.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Text,
    Json,
    Empty,
    Grpc,
}

impl Kind {
    fn parse(text: &str) -> Result<Self, String> {
        Ok(match text {
            "text" => Self::Text,
            "json" => Self::Json,
            "empty" => Self::Empty,
            "grpc" => Self::Grpc,
            _ => return Err(format!("unknown kind {text:?}: write text, json, empty or grpc")),
        })
    }

    pub(crate) fn rejection(self) -> Box<dyn Rejection<Body>> {
        match self {
            Self::Text => Box::new(TextRejection::new()),
            Self::Json => Box::new(ProblemRejection::new()),
            Self::Empty => Box::new(EmptyRejection::new()),
            Self::Grpc => Box::new(GrpcRejection::new()),
        }
    }
}

fn policy(text: &str) -> Result<Policy, String> {
    text.parse().map_err(|error: ConfigError| error.to_string())
}

/// Returns the header fields that the values of `--headers` name. Without a name of fields, the options
/// in them change the default.
fn header_fields(values: &[String]) -> Result<Headers, String> {
    let words: Vec<&str> = values.iter().flat_map(|value| value.split(',')).map(str::trim).collect();
    let is_option = |word: &&str| word.eq_ignore_ascii_case("reset-in-seconds") || word.contains('=');
    let default = if words.iter().all(is_option) { Headers::default() } else { Headers::none() };
    words.iter().try_fold(default, |headers, word| {
        let headers_of_word: Headers = word.parse().map_err(|error: ConfigError| error.to_string())?;
        Ok(headers.and(headers_of_word))
    })
}

/// The storages behind features: URL schemes, name, feature, and `true` if the feature is enabled.
const STORAGES: [(&[&str], &str, &str, bool); 8] = [
    (&["redis", "valkey"], "Redis", "redis", cfg!(feature = "redis")),
    (&["rediss", "valkeys"], "Redis over TLS", "redis-rustls", cfg!(feature = "redis-rustls")),
    (&["memcached"], "memcached", "memcached", cfg!(feature = "memcached")),
    (&["memcacheds"], "memcached over TLS", "memcached-rustls", cfg!(feature = "memcached-rustls")),
    (&["etcd"], "etcd", "etcd", cfg!(feature = "etcd")),
    (&["etcds"], "etcd over TLS", "etcd-rustls", cfg!(feature = "etcd-rustls")),
    (&["postgres", "postgresql"], "PostgreSQL", "postgres", cfg!(feature = "postgres")),
    (&["sqlite"], "SQLite", "sqlite", cfg!(feature = "sqlite")),
];

/// Returns an error for a storage whose feature is not enabled.
fn check_features(url: &str) -> Result<(), String> {
    let scheme = url.split(':').next().unwrap_or(url);
    let family = scheme.split('+').next().unwrap_or(scheme).to_ascii_lowercase();
    let example = if family == "sqlite" { "sqlite:limits.db".to_owned() } else { format!("{scheme}://...") };
    match STORAGES.iter().find(|(schemes, ..)| schemes.contains(&&*family)) {
        Some((_, name, feature, false)) => Err(format!(
            "this server was built without {name}; run: cargo run --example server --features {feature} -- --storage {example}"
        )),
        _ => Ok(()),
    }
}

fn any_storage(url: &str, deadline: Option<&str>) -> Result<AnyStorage, String> {
    check_features(url)?;
    let parse = |flag, url: &str| url.parse().map_err(|error: ConfigError| format!("{flag}: {error}"));
    let storage = parse("--storage", url)?;
    match deadline {
        // The memory storage has no timeout.
        Some(deadline) if !url.starts_with("memory:") => {
            let separator = if url.contains('?') { '&' } else { '?' };
            parse("--timeout", &format!("{url}{separator}timeout={deadline}"))
        }
        _ => Ok(storage),
    }
}

fn header_name(name: &str) -> Result<HeaderName, String> {
    name.parse().map_err(|_| format!("invalid header name {name:?}: write one like x-api-key"))
}

fn route(value: &str) -> Result<(String, Policy), String> {
    let wrong = || format!("cannot read {value:?}: write PATH=POLICY, for example /login=5/minute");
    let (path, limits) = value.split_once('=').ok_or_else(wrong)?;
    if !path.starts_with('/') {
        return Err(wrong());
    }
    if path.contains(['{', '}', '*', ':']) {
        return Err(format!("invalid path {path:?}: write one without parameters, for example /login=5/minute"));
    }
    let policy = policy(limits).map_err(|error| format!("{path}: {error}"))?;
    let policy = match policy.name() {
        Some(_) => policy,
        None => policy.try_with_name(path).map_err(|error| error.to_string())?,
    };
    Ok((path.to_owned(), policy))
}
