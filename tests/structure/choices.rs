//! Choices: everything that a layer takes is created in the same way, and the tables of the guides
//! show the code.

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::Path;

use axum::Router;
use axum::extract::connect_info::MockConnectInfo;
use common::pages::guides;
use http::{Response, StatusCode};
use tower_ratelimit::extract::{Extension, MatchedPath, Method, Path as PathExtractor, key_by};
use tower_ratelimit::storage::{Breaker, Cas, CasStorage, ManualClock, TokioClock};
use tower_ratelimit::{
    BoxError, ClientIp, EmptyRejection, Global, GrpcRejection, Header, Headers, Key, KeyExtractor, MemoryStorage,
    OnError, PeerIp, Policy, ProblemRejection, Quota, RateLimitLayer, RateLimiter, Storage, TextRejection,
};
#[cfg(feature = "servers")]
use tower_ratelimit::{EtcdStorage, MemcachedStorage, PostgresStorage, RedisStorage, SqliteStorage};

use crate::{ROOT, sources};

/// `ClientIp` has two constructors, whose names state which proxies it trusts.
const OTHER_CONSTRUCTORS: [&str; 1] = ["ClientIp"];

/// Returns the public extractors and rejections that a caller creates.
fn types() -> BTreeSet<String> {
    let mut types = BTreeSet::new();
    for (_, _, code) in sources() {
        for implementation in ["KeyExtractor for ", "Rejection<B> for "] {
            let names =
                code.split(implementation).skip(1).map(|rest| rest.split([' ', '<', '\n']).next().unwrap().to_owned());
            // `KeyExtractor::and` and `or` create these.
            let is_wrapper = |name: &str| ["F", "Arc", "Box", "Or", "And"].contains(&name);
            types.extend(names.filter(|name| !is_wrapper(name)));
        }
    }
    assert!(types.contains("PeerIp") && types.contains("GrpcRejection") && types.len() >= 12, "{types:?}");
    types
}

/// Returns the code of the sources, their docs, the guides and the examples.
fn shown_code() -> Vec<(String, String)> {
    let mut files = guides();
    let mut folders = vec![Path::new(ROOT).join("src"), Path::new(ROOT).join("examples")];
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|ending| ending == "rs") {
                files.push((path.display().to_string(), fs::read_to_string(&path).unwrap()));
            }
        }
    }
    files.push(("README.md".to_owned(), fs::read_to_string(Path::new(ROOT).join("README.md")).unwrap()));
    files
}

/// Guards against this defect: `PeerIp::new()` and `Global` compile, but `PeerIp` and
/// `Global::new()` do not.
#[test]
fn every_extractor_and_rejection_has_a_constructor_new() {
    let code: String = sources().into_iter().map(|(_, _, code)| code).collect();
    for name in types() {
        let mut blocks = code.split("\nimpl").skip(1).map(|block| block.split("\n}").next().unwrap());
        let is_own = |block: &str| {
            let head = block.split('{').next().unwrap();
            !head.contains(" for ") && head.split(['<', ' ']).any(|word| word == name)
        };
        let has_new = blocks.any(|block| is_own(block) && block.contains("fn new"));
        assert_eq!(has_new, !OTHER_CONSTRUCTORS.contains(&&*name), "{name}");
    }
}

#[test]
fn docs_and_examples_create_extractors_and_rejections_by_new() {
    for name in types() {
        for (file, text) in shown_code() {
            for bare in [format!(", {name})"), format!("({name})"), format!("({name}, "), format!("({name}.")] {
                assert!(!text.contains(&bare), "{file}: {bare} without ::new()");
            }
        }
    }
}

/// The tables of the guides by whose rows a reader chooses. Each has a column `code` or `as text`.
const CHOICES: [(&str, &str); 9] = [
    ("choosing_a_strategy.md", "| you want |"),
    ("headers_and_refusals.md", "| family |"),
    ("headers_and_refusals.md", "| rejection |"),
    ("keys_and_proxies.md", "| clients are known by |"),
    ("outages.md", "| storage |"),
    ("plans_and_tenants.md", "| budget |"),
    ("quotas_by_day_and_month.md", "| as text |"),
    ("several_processes.md", "| storage | code |"),
    ("testing_your_app.md", "| in a test, you want to |"),
];

/// Returns the cells of a row of a table.
fn cells(row: &str) -> Vec<String> {
    let row = row.trim_matches('|').replace("\\|", "\0");
    row.split('|').map(|cell| cell.trim().replace('\0', "|")).collect()
}

#[test]
fn each_row_of_a_table_of_choices_shows_code() {
    // Without the indentation of the lines that rustfmt has wrapped.
    let compiled: String =
        include_str!("choices.rs").rsplit("fn compiled").next().unwrap().lines().map(str::trim).collect();
    let guides = guides();
    for (guide, header) in CHOICES {
        let (_, text) = guides.iter().find(|(file, _)| file == guide).unwrap();
        let mut rows =
            text.lines().skip_while(|line| !line.starts_with(header)).take_while(|line| line.starts_with('|'));
        let titles = cells(rows.next().unwrap_or_else(|| panic!("{guide} has no table {header}")));
        let column = titles.iter().position(|title| title == "code" || title == "as text");
        let column = column.unwrap_or_else(|| panic!("{guide}: the table {header} has no code"));
        for row in rows.skip(1) {
            let cell = &cells(row)[column];
            let code: Vec<&str> = cell.split('`').skip(1).step_by(2).collect();
            assert!(!code.is_empty(), "{guide}: {row} has no code");
            for code in code {
                let is_valid = match &*titles[column] {
                    "code" => compiled.contains(code),
                    _ => code.parse::<Policy>().is_ok(),
                };
                assert!(is_valid, "{guide}: {code} is not below, where the compiler checks it");
            }
        }
    }
}

struct User {
    id: u64,
}

struct Order {
    account: u64,
}

fn response(status: StatusCode) -> Response<String> {
    Response::builder().status(status).body(String::new()).unwrap()
}

/// The code of the tables, for the compiler.
#[allow(dead_code, reason = "the test above reads it")]
async fn compiled(a: PeerIp, b: Global, store: impl CasStorage, app: Router) -> Result<(), BoxError> {
    type Path = PathExtractor;

    let _ = (PeerIp::new(), ClientIp::behind(["10.0.0.0/8"])?, Header::new("x-tenant"), MatchedPath::new());
    let _ = (Path::new(), Method::new(), Global::new());
    let _ = Extension::new(|user: &User| Key::from(user.id));
    let _ = key_by(|head| Key::from(head.uri().authority().map_or("none", |host| host.as_str())));
    let _ = (a.and(b), a.or(b));
    let _ = async |limiter: RateLimiter, order: Order| -> Result<_, BoxError> {
        Ok(limiter.hit(&Key::from(order.account)).await?)
    };

    let services = NonZeroU32::MIN;
    let _ = |per_user: Policy, per_tenant: Policy, user: Global, tenant: Global| {
        RateLimitLayer::new(per_user, user).and(per_tenant, tenant)
    };
    let _ = |all: Policy| -> Result<_, BoxError> { Ok(all.divide(services)?.with_name("search")) };
    let _ = |all: Policy| all.with_name("shared");
    let _ = "100/minute keep 20".parse::<Policy>()?;

    let layer = || RateLimitLayer::new(Quota::per_minute(1), Global::new());
    let _ = layer().rejection(TextRejection::new());
    let _ = layer().rejection(ProblemRejection::new());
    let _ = layer().rejection(EmptyRejection::new());
    let _ = layer().rejection(GrpcRejection::new());
    let _ = layer().rejection_by(|refused, _| response(refused.status()));
    let _ = layer().headers(Headers::x_rate_limit());
    let _ = layer().headers(Headers::draft11());
    let _ = layer().headers(Headers::draft6());
    let _ = layer().headers(Headers::none());

    #[cfg(feature = "servers")]
    {
        let _ = (RedisStorage::new("redis://cache/")?, MemcachedStorage::new("memcached://one,two")?);
        let _ = (EtcdStorage::new("etcd://one,two,three")?, SqliteStorage::open("limits.db")?);
        let _ = PostgresStorage::new("postgres://user@host/database")?;
        let _ = RedisStorage::new("redis://127.0.0.1:1/")?;
        let _ = RedisStorage::new("redis://localhost?prefix=test-7")?;
    }
    let _ = Cas::new(store);
    let _ = |redis: MemoryStorage| layer().storage(redis, OnError::Admit);
    let _ = |redis: MemoryStorage| layer().storage(redis, OnError::Refuse);
    let _ = |redis: MemoryStorage| layer().storage(Breaker::new(redis), OnError::Admit);
    let _ = |redis: MemoryStorage| layer().storage(Breaker::new(redis), OnError::Refuse);
    let _ =
        |redis: MemoryStorage| layer().storage(Breaker::new(redis).fallback(MemoryStorage::new(), 3), OnError::Admit);
    let _ = |redis: MemoryStorage| Breaker::new(redis).fallback(MemoryStorage::new(), 3);

    let clock = ManualClock::default();
    let storage = MemoryStorage::builder().clock(clock.clone()).build()?;
    let _ = MemoryStorage::builder().clock(TokioClock::new()).build()?;
    storage.clear_all().await?;
    let _: Router = app.layer(MockConnectInfo(SocketAddr::from(([192, 0, 2, 1], 1234))));
    Ok(())
}
