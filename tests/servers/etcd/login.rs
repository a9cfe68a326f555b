//! Users and passwords of etcd.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::harness::{EntryPoints, SECOND};
use common::servers::storage::failed_check;
use common::servers::{Etcd, Mode, Proxy, free_port, with_timeout};
use common::time::{EVENTUALLY, Stopwatch};
use common::{message, policy};
use serde_json::{Value, json};
use tokio::time::sleep;
use tower_ratelimit::storage::{Credentials, EtcdStorage, StorageErrorKind};
use tower_ratelimit::{Global, Key, RateLimiter, Storage};

use super::{PLENTY, entry_points, hasty, storage};

/// Shorter than the login in the first test, and longer than a decision on a busy machine.
const QUICK: Duration = Duration::from_millis(300);

const LOGIN: Duration = Duration::from_millis(400);

/// Creates a user `app` that may use the keys that begin with `rl:`, and returns a token of the user
/// `root`.
fn with_logins(etcd: &Etcd, password: &str) -> String {
    let ask = |path: &str, body: Value| etcd.ask(&format!("auth/{path}"), &body);
    ask("user/add", json!({ "name": "root", "password": "root" }));
    ask("role/add", json!({ "name": "root" }));
    ask("user/grant", json!({ "user": "root", "role": "root" }));
    ask("user/add", json!({ "name": "app", "password": password }));
    ask("role/add", json!({ "name": "limits" }));
    // The documented rights: keys that begin with `rl:`, so from `rl:` to `rl;`.
    let range = json!({ "permType": 2, "key": "cmw6", "range_end": "cmw7" });
    ask("role/grant", json!({ "name": "limits", "perm": range }));
    ask("user/grant", json!({ "user": "app", "role": "limits" }));
    ask("enable", json!({}));
    let login = ask("authenticate", json!({ "name": "root", "password": "root" }));
    login["token"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn storage_recovers_when_a_wrong_password_is_corrected() {
    let etcd = Etcd::start(1);
    let no_login = entry_points(&etcd.url());
    let user = entry_points(&format!("etcd://app:first@{}", etcd.hosts()));
    // Without authentication every client has access.
    no_login.recover().await;
    user.recover().await;
    let root = with_logins(&etcd, "first");
    no_login.fail().await;
    let mut error = no_login.limiter.hit(&Key::global()).await.unwrap_err();
    while error.is_timeout() {
        error = no_login.limiter.hit(&Key::global()).await.unwrap_err();
    }
    let error = message(error);
    assert!(error.contains("write etcd://user:password@"), "{error}");
    user.recover().await;
    let change = |password: &str| {
        let body = json!({ "name": "app", "password": password });
        etcd.members[0].ask("auth/user/changepw", &body, Some(&root)).unwrap();
    };
    change("second");
    user.fail().await;
    let error = user.limiter.hit(&Key::global()).await.unwrap_err();
    assert!(!error.may_have_counted() && !format!("{error:#}").contains("first"), "{error}");
    let wrong = storage(&format!("etcd://app:wrong@{}", etcd.hosts()));
    let error = message(failed_check(&wrong).await);
    assert!(error.starts_with(&format!("cannot log in to {}: ", etcd.hosts())), "{error}");
    change("first");
    user.recover().await;
    let second_handle = storage(&format!("etcd://app:first@{}?prefix=other", etcd.hosts()));
    let error = message(failed_check(&second_handle).await);
    assert!(error.contains("permission denied"), "{error}");
}

#[tokio::test]
async fn revoked_token_is_renewed_without_a_failed_hit() {
    let mut etcd = Etcd::start(1);
    let entry_points = entry_points(&format!("etcd://app:secret@{}", etcd.hosts()));
    let root = with_logins(&etcd, "secret");
    entry_points.recover().await;
    for _ in 0..3 {
        // Setting the same password again revokes all tokens.
        let body = json!({ "name": "app", "password": "secret" });
        etcd.members[0].ask("auth/user/changepw", &body, Some(&root)).unwrap();
        entry_points.admit().await;
    }
    // A restart revokes all tokens, too.
    etcd.members[0].restart();
    entry_points.recover().await;
}

#[tokio::test]
async fn credentials_provider_is_called_for_each_connection() {
    let etcd = Etcd::start(1);
    let root = with_logins(&etcd, "first");
    let password = Arc::new(Mutex::new("first"));
    let current = Arc::clone(&password);
    let storage = hasty(&etcd.url()).credentials(move || {
        let password = *current.lock().unwrap();
        async move {
            if password == "none" { Err("the vault is sealed".into()) } else { Ok(Credentials::new("app", password)) }
        }
    });
    let user = EntryPoints::new(&policy(PLENTY), storage, Global::new);
    user.recover().await;
    let body = json!({ "name": "app", "password": "second" });
    etcd.members[0].ask("auth/user/changepw", &body, Some(&root)).unwrap();
    user.fail().await;
    *password.lock().unwrap() = "none";
    let sealed = async || message(user.limiter.hit(&Key::global()).await.unwrap_err());
    while !sealed().await.contains("the credentials provider failed: the vault is sealed") {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    *password.lock().unwrap() = "second";
    user.recover().await;
}

/// Guards against this defect: the first hits of a process failed, because a login takes etcd
/// longer than the timeout.
#[tokio::test]
async fn first_hits_wait_for_the_login() {
    let etcd = Etcd::start(1);
    with_logins(&etcd, "secret");
    let proxy = Proxy::start(etcd.members[0].port());
    let member = format!("127.0.0.1:{}", proxy.port());
    // A process can begin with a member that is down.
    for hosts in [member.clone(), format!("127.0.0.1:{},{member},127.0.0.1:{}", free_port(), free_port())] {
        let begun = Stopwatch::start();
        loop {
            let storage = EtcdStorage::new(&with_timeout(&format!("etcd://app:secret@{hosts}"), QUICK)).unwrap();
            let limiter = RateLimiter::with_storage(policy(PLENTY), storage.clone());
            // Delays the first reply on each connection, and no other.
            proxy.set(Mode::Delay(LOGIN));
            let (watch, key) = (Stopwatch::start(), Key::global());
            let (hit, peek, checked, ()) =
                tokio::join!(limiter.hit(&key), limiter.peek(&key), storage.check(), async {
                    sleep((QUICK + LOGIN) / 2).await;
                    proxy.set(Mode::Pass);
                });
            let is_delayed = watch.wall() >= LOGIN;
            match (hit, peek, checked) {
                (Ok(hit), Ok(_), Ok(())) if is_delayed => break assert!(hit.is_admitted()),
                // On a busy machine, the reply may come after the delay ends, or a hit may time out
                // later.
                results => assert!(begun.wall() < EVENTUALLY, "{hosts}: {results:?}"),
            }
        }
    }
}

#[tokio::test]
async fn hits_wait_for_the_first_attempt_to_connect_and_for_no_later_one() {
    let etcd = Etcd::start(1);
    let proxy = Proxy::start(etcd.members[0].port());
    proxy.set(Mode::SwallowReplies);
    let storage = EtcdStorage::new(&with_timeout(&format!("etcd://127.0.0.1:{}", proxy.port()), QUICK)).unwrap();
    let limiter = RateLimiter::with_storage(policy(PLENTY), storage);
    let watch = Stopwatch::start();
    let error = limiter.hit(&Key::global()).await.unwrap_err();
    watch.assert_below(SECOND + 2 * QUICK, "the first hit fails");
    assert!(watch.wall() >= SECOND && !error.may_have_counted());
    // If the thread pauses after the attempt, the hit times out while it waits for the next one.
    assert!(error.kind() == StorageErrorKind::Unreachable || error.is_timeout() && !watch.excess().is_zero());
    assert!(message(error).contains("connecting took longer than 1s"));
    for _ in 0..5 {
        let watch = Stopwatch::start();
        limiter.hit(&Key::global()).await.unwrap_err();
        watch.assert_below(2 * QUICK, "a later hit fails");
        sleep(QUICK).await;
    }
}
