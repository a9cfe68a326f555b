//! Behind nginx, over a Unix socket. The peer has no address, so the client is the last entry of
//! `X-Forwarded-For`, which nginx appends.
//!
//! nginx has `proxy_pass http://unix:/tmp/app.sock;` and
//! `proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;`. Its workers need the permission to
//! write to the socket.

use axum::Router;
use axum::routing::get;
use tower_ratelimit::{ClientIp, Quota, RateLimitLayer};

fn app() -> Router {
    // Only nginx can connect to the socket.
    let limit = RateLimitLayer::new(Quota::per_hour(60), ClientIp::behind_hops(1));
    Router::new().route("/", get(|| async { "hello\n" })).layer(limit)
}

#[cfg(unix)]
#[tokio::main]
async fn main() -> std::io::Result<()> {
    use std::os::unix::fs::FileTypeExt;

    let path = std::env::args().nth(1).unwrap_or_else(|| "/tmp/app.sock".to_owned());
    // The socket of an earlier run.
    if std::fs::metadata(&path).is_ok_and(|file| file.file_type().is_socket()) {
        std::fs::remove_file(&path)?;
    }
    let listener = tokio::net::UnixListener::bind(&path)?;
    println!("listening on {path}");
    axum::serve(listener, app()).await
}

#[cfg(not(unix))]
fn main() {
    eprintln!("this system has no Unix sockets");
}

#[cfg(all(test, unix))]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{UnixListener, UnixStream};

    use super::*;

    #[tokio::test]
    async fn client_is_the_last_entry_of_the_field() {
        let path = std::env::temp_dir().join(format!("unix_socket-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        tokio::spawn(axum::serve(UnixListener::bind(&path).unwrap(), app()).into_future());
        for (forwarded_for, remaining) in
            [("203.0.113.1", 59), ("203.0.113.2", 59), ("6.6.6.6, 203.0.113.1", 58), ("203.0.113.1, 203.0.113.2", 58)]
        {
            let mut stream = UnixStream::connect(&path).await.unwrap();
            let request = format!(
                "GET / HTTP/1.1\r\nhost: localhost\r\nx-forwarded-for: {forwarded_for}\r\nconnection: close\r\n\r\n"
            );
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            assert!(answer.contains(&format!("\r\nx-ratelimit-remaining: {remaining}\r\n")), "{answer}");
        }
        std::fs::remove_file(&path).unwrap();
    }
}
