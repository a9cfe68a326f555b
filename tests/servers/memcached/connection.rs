//! The connection to a memcached server.

use common::servers::Memcached;
use tower_ratelimit::Storage;

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
