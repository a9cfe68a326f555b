//! Users, passwords and databases.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use common::harness::{DEADLINE, EntryPoints, SECOND};
use common::servers::Server;
use common::servers::storage::failed_check;
use common::{message, policy};
use tower_ratelimit::storage::Credentials;
use tower_ratelimit::{BoxError, Global};

use super::{PLENTY, entry_points, ready, storage, storage_within};

/// Guards against a defect of another client: the connection manager of the `redis` crate does not
/// reconnect after a rejected login.
#[tokio::test]
async fn storage_becomes_ready_when_a_wrong_password_is_corrected() {
    let server = Server::start(&["--requirepass", "first"]);
    let url = format!("redis://:p%40ss%2Fword@127.0.0.1:{}", server.port());
    let (with, without) = (storage(&url), storage(&server.url()));
    assert!(message(failed_check(&with).await).contains("authentication failed"));
    assert!(message(failed_check(&without).await).contains("NOAUTH"));
    server.ask(&["CONFIG", "SET", "requirepass", "p@ss/word"]);
    assert!(ready(&with).await < SECOND);
    assert!(!format!("{with:?}").contains("p@ss"));
}

#[tokio::test]
async fn requests_are_decided_when_a_wrong_password_is_corrected() {
    let server = Server::start(&[]);
    let at = format!("127.0.0.1:{}", server.port());
    server.ask(&["ACL", "SETUSER", "app", "on", ">first", "~*", "+@all"]);
    let user = entry_points(&format!("redis://app:first@{at}"), &policy(PLENTY));
    user.recover().await;
    server.ask(&["ACL", "SETUSER", "app", "resetpass", ">second"]);
    server.ask(&["CLIENT", "KILL", "USER", "app"]);
    user.fail().await;
    server.ask(&["ACL", "SETUSER", "app", ">first"]);
    user.recover().await;

    let wrong = entry_points(&format!("redis://:secret@{at}"), &policy(PLENTY));
    wrong.fail().await;
    server.ask(&["CONFIG", "SET", "requirepass", "other"]);
    wrong.fail().await;
    let server = Server::start(&["--requirepass", "first"]);
    let entry_points = entry_points(&format!("redis://:second@127.0.0.1:{}", server.port()), &policy(PLENTY));
    entry_points.fail().await;
    server.ask(&["CONFIG", "SET", "requirepass", "second"]);
    entry_points.recover().await;
}

/// A provider of a password, which counts its calls.
#[derive(Clone, Default)]
struct Vault {
    password: Arc<Mutex<Option<&'static str>>>,
    calls: Arc<AtomicU32>,
}

impl Vault {
    fn set(&self, password: Option<&'static str>) {
        *self.password.lock().unwrap() = password;
    }

    fn credentials(&self) -> Result<Credentials, BoxError> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let password = self.password.lock().unwrap().ok_or("the vault is sealed")?;
        Ok(Credentials::new("app", password))
    }
}

#[tokio::test]
async fn provider_is_called_for_each_connection() {
    let server = Server::start(&[]);
    server.ask(&["ACL", "SETUSER", "app", "on", ">first", "~*", "+@all"]);
    let vault = Vault::default();
    let provider = vault.clone();
    let url = format!("redis://app:unused@127.0.0.1:{}", server.port());
    let storage = storage_within(&url, DEADLINE).credentials(move || {
        let credentials = provider.credentials();
        async { credentials }
    });
    let error = message(failed_check(&storage).await);
    assert!(error.contains("the credentials provider failed: the vault is sealed"), "{error}");

    vault.set(Some("first"));
    let user = EntryPoints::new(&policy(PLENTY), storage.clone(), Global::new);
    user.recover().await;
    let calls = vault.calls.load(Ordering::SeqCst);
    for _ in 0..3 {
        user.recover().await;
    }
    assert_eq!(vault.calls.load(Ordering::SeqCst), calls, "an open connection needs no new credentials");

    // The password rotates, and the server closes the connection. The provider has the old password
    // for a while.
    server.ask(&["ACL", "SETUSER", "app", "resetpass", ">second"]);
    server.ask(&["CLIENT", "KILL", "USER", "app"]);
    user.fail().await;
    vault.set(Some("second"));
    user.recover().await;
    assert!(vault.calls.load(Ordering::SeqCst) > calls);
    let debug = format!("{storage:?}");
    assert!(!debug.contains("second") && !debug.contains("unused"), "{debug}");
}

#[tokio::test]
async fn no_error_contains_a_password_of_a_provider() {
    let server = Server::start(&["--rename-command", "AUTH", ""]);
    let storage = storage(&server.url()).credentials(|| async { Ok(Credentials::new("me", "hunter2")) });
    let error = failed_check(&storage).await;
    assert!(!format!("{error:#} {error:?}").contains("hunter2"), "{error:?}");
    assert!(!format!("{:?}", Credentials::new("me", "hunter2")).contains("hunter2"));
}

#[tokio::test]
async fn url_selects_the_user_and_the_database() {
    let server = Server::start(&[]);
    server.ask(&["ACL", "SETUSER", "a:b", "on", ">s e", "+@all", "~*"]);
    let at = format!("127.0.0.1:{}", server.port());
    ready(&storage(&format!("redis://a%3Ab:s%20e@{at}/3"))).await;
    let error = failed_check(&storage(&format!("redis://a%3Ab:se@{at}/3"))).await;
    assert!(format!("{error:#}").contains("authentication failed"), "{error}");
    let error = message(failed_check(&storage(&format!("valkey://{at}/99"))).await);
    assert!(error.contains("99") || error.contains("range"), "{error}");
    let clients = storage(&format!("redis://{at}/5"));
    ready(&clients).await;
    assert!(server.ask(&["CLIENT", "LIST"]).to_string().contains(" db=5 "));
}

/// A server without `AUTH` quotes the command that it rejects.
#[tokio::test]
async fn no_error_contains_a_password() {
    let server = Server::start(&["--rename-command", "AUTH", ""]);
    let error = failed_check(&storage(&format!("redis://me:hunter2@127.0.0.1:{}", server.port()))).await;
    let causes = std::iter::successors(Some(&error as &dyn std::error::Error), |cause| cause.source());
    let texts: Vec<String> = causes.map(|cause| format!("{cause} {cause:?}")).collect();
    assert!(texts.len() > 1 && !texts.concat().contains("hunter2"), "{texts:?}");
}
