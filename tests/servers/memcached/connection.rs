//! The connection to a memcached server.

use common::servers::Memcached;
use common::time::eventually;
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
    let path = socket.display().to_string();
    eventually("the error names the socket", async || format!("{:#}", not_ready(&storage).await).contains(&path)).await;
    std::fs::remove_file(socket).unwrap();
}
