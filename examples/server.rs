//! An axum server limited by what its flags say. `cargo run --example server` and try the line it prints.
//!
//! `--help` shows its flags. Its first line of output is `listening on http://ADDRESS`.

use std::net::SocketAddr;
use std::process::ExitCode;

use axum::Router;
use axum::http::HeaderName;
use axum::routing::any;
use tower_ratelimit::extract::{Head, Method, Missing, Path};
use tower_ratelimit::{Global, Header, KeyExtractor, MemoryStorage, PeerIp, Policy, RateLimitLayer};

const USAGE: &str = "\
--listen ADDRESS        where to listen (127.0.0.1:3000; port 0 takes a free one)
--policy POLICY         limits for every request, for example \"10/minute\" (the default) or
                        \"token-bucket 10/second burst 20; 1000/day\"; repeat it for more limits of the same policy
--storage URL           where to keep them: memory:// (the default)
--key KEY               who is asking: peer-ip (the default), global, path, method or header:NAME; join several by +
--cost-header NAME      how many units a request takes: a missing header counts 1, an unreadable one is a 400.
                        For trying things out: never let a client say what its own request costs
--route PATH=POLICY     a further layer on one route, inside the other; repeat it for more routes
";

/// What the flags say.
struct Options {
    listen: SocketAddr,
    policy: Policy,
    storage: MemoryStorage,
    key: String,
    cost_header: Option<HeaderName>,
    routes: Vec<(String, Policy)>,
}

impl Options {
    fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Self, String> {
        use lexopt::prelude::*;
        let mut parser = lexopt::Parser::from_args(arguments);
        let mut limits = Vec::new();
        let mut options = Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 3000)),
            policy: parse_policy("10/minute")?,
            storage: MemoryStorage::new(),
            key: "peer-ip".to_owned(),
            cost_header: None,
            routes: Vec::new(),
        };
        while let Some(argument) = parser.next().map_err(|error| error.to_string())? {
            let Long(flag) = argument else { return Err(argument.unexpected().to_string()) };
            let flag = flag.to_owned();
            let known = ["listen", "policy", "storage", "key", "cost-header", "route"];
            if !known.contains(&&*flag) {
                return Err(format!("unknown flag --{flag}: there are --{}", known.join(", --")));
            }
            let value = parser.value().and_then(ValueExt::string).map_err(|error| error.to_string())?;
            match &*flag {
                "listen" => {
                    options.listen = value.parse().map_err(|_| {
                        format!("--listen: cannot read the address {value:?}: write one like 127.0.0.1:3000")
                    })?;
                }
                "policy" => {
                    // By itself first, so that an error quotes what was written.
                    parse_policy(&value).map_err(|error| format!("--policy: {error}"))?;
                    limits.push(value);
                }
                "storage" => options.storage = storage(&value).map_err(|error| format!("--storage: {error}"))?,
                "key" => {
                    key(&value).map_err(|error| format!("--key: {error}"))?;
                    options.key = value;
                }
                "cost-header" => {
                    let name = header_name(&value).map_err(|error| format!("--cost-header: {error}"))?;
                    options.cost_header = Some(name);
                }
                _ => options.routes.push(route(&value).map_err(|error| format!("--route: {error}"))?),
            }
        }
        if !limits.is_empty() {
            options.policy = parse_policy(&limits.join("; ")).map_err(|error| format!("--policy: {error}"))?;
        }
        Ok(options)
    }
}

fn parse_policy(text: &str) -> Result<Policy, String> {
    text.parse().map_err(|error: tower_ratelimit::ConfigError| error.to_string())
}

fn storage(url: &str) -> Result<MemoryStorage, String> {
    let scheme = url.split("://").next().unwrap_or(url);
    match scheme {
        "memory" if url == "memory://" => Ok(MemoryStorage::new()),
        "redis" | "rediss" | "redis+unix" | "redis+cluster" | "redis+sentinel" | "valkey" | "valkeys"
        | "valkey+unix" | "valkey+cluster" | "valkey+sentinel" | "memcached" | "etcd" => {
            let feature = match scheme {
                "memcached" | "etcd" => scheme,
                _ => "redis",
            };
            Err(format!("{scheme}:// needs the feature \"{feature}\", which is missing: use memory://"))
        }
        _ => Err(format!("cannot read the URL {url:?}: write memory://")),
    }
}

fn key(text: &str) -> Result<Box<dyn KeyExtractor>, String> {
    text.split('+')
        .map(|part| -> Result<Box<dyn KeyExtractor>, String> {
            Ok(match part.split_once(':') {
                Some(("header", name)) => Box::new(Header::from(header_name(name)?)),
                None if part == "peer-ip" => Box::new(PeerIp::new()),
                None if part == "global" => Box::new(Global),
                None if part == "path" => Box::new(Path),
                None if part == "method" => Box::new(Method),
                _ => {
                    return Err(format!(
                        "unknown key {part:?}: write peer-ip, global, path, method or header:NAME, joined by +"
                    ));
                }
            })
        })
        .reduce(|joined, part| Ok(Box::new(joined?.and(part?))))
        .unwrap_or_else(|| Err("it is empty: write for example peer-ip".to_owned()))
}

fn header_name(name: &str) -> Result<HeaderName, String> {
    name.parse().map_err(|_| format!("{name:?} cannot be the name of a header: write one like x-api-key"))
}

fn route(value: &str) -> Result<(String, Policy), String> {
    let wrong = || format!("cannot read {value:?}: write PATH=POLICY, for example /login=5/minute");
    let (path, policy) = value.split_once('=').ok_or_else(wrong)?;
    if !path.starts_with('/') || path.contains(['{', '}', '*', ':']) {
        return Err(wrong());
    }
    let policy = parse_policy(policy)?.try_with_name(path).map_err(|error| error.to_string())?;
    Ok((path.to_owned(), policy))
}

/// The units a request says it takes.
fn cost(header: &HeaderName, head: &Head<'_>) -> Result<u32, Missing> {
    let Some(value) = head.headers.get(header) else { return Ok(1) };
    value
        .to_str()
        .ok()
        .and_then(|value| value.trim().parse().ok())
        .ok_or_else(|| Missing::client(format!("{header} is no whole number from 0 to 4294967295")))
}

fn app(options: &Options) -> Result<Router, String> {
    let layer = |policy: &Policy| -> Result<_, String> {
        let layer = RateLimitLayer::with_storage(policy.clone(), key(&options.key)?, options.storage.clone());
        Ok(match options.cost_header.clone() {
            Some(header) => layer.cost(move |head: &Head<'_>| cost(&header, head)),
            None => layer,
        })
    };
    let answer = || any(|| async { "hello\n" });
    let mut app = Router::new().fallback(|| async { "hello\n" });
    for (path, policy) in &options.routes {
        app = app.route(path, answer().layer(layer(policy)?));
    }
    Ok(app.layer(layer(&options.policy)?))
}

#[tokio::main]
async fn main() -> ExitCode {
    if std::env::args().any(|argument| argument == "--help" || argument == "-h") {
        print!("{USAGE}");
        return ExitCode::SUCCESS;
    }
    let started = match Options::parse(std::env::args().skip(1)) {
        Ok(options) => start(options).await,
        Err(error) => Err(error),
    };
    match started {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("server: {error}");
            ExitCode::from(2)
        }
    }
}

async fn start(options: Options) -> Result<(), String> {
    let app = app(&options)?;
    let listen = options.listen;
    let listener =
        tokio::net::TcpListener::bind(listen).await.map_err(|error| format!("cannot listen on {listen}: {error}"))?;
    let address = listener.local_addr().map_err(|error| error.to_string())?;
    println!("listening on http://{address}");
    println!("try: curl -i http://{address}/");
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, service).await.map_err(|error| error.to_string())
}
