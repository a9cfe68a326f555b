//! The connection to a memcached server.

use common::servers::{Memcached, Server};
use common::{message, policy};
use tower_ratelimit::{Key, RateLimiter, Storage};

use super::{LONG, not_ready, storage};

#[cfg(unix)]
#[tokio::test]
async fn server_is_reached_on_a_unix_socket() {
    let socket = std::env::temp_dir().join(format!("tower-ratelimit {}.sock", std::process::id()));
    let storage = storage(&format!("memcached+unix://{}", socket.display().to_string().replace(' ', "%20")));
    not_ready(&storage).await;
    let mut server = Memcached::on(&socket);
    storage.ready(LONG).await.unwrap();
    server.kill();
    let error = not_ready(&storage).await;
    assert!(format!("{error:#}").contains(&*socket.display().to_string()), "{error}");
    std::fs::remove_file(socket).unwrap();
}

#[tokio::test]
async fn server_other_than_memcached_is_an_error() {
    let server = Server::start(&[]);
    let storage = storage(&format!("memcached://127.0.0.1:{}", server.port()));
    let limiter = RateLimiter::with_storage(policy("fixed-window 9/day"), storage);
    let error = message(limiter.hit(&Key::from("k")).await.unwrap_err());
    assert!(error.starts_with("cannot reach 127.0.0.1:") && error.contains("not from a memcached server"), "{error}");
}
