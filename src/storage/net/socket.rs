//! TCP connections without Nagle's algorithm, and with timeouts that detect a dead peer.

use std::io;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpStream, ToSocketAddrs};

/// The connection breaks if sent data is not acknowledged within this time.
#[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
const UNACKNOWLEDGED: Duration = Duration::from_secs(2);

/// TCP sends keepalive probes after this idle time.
const IDLE: Duration = Duration::from_secs(15);

/// Connects to `address`. The caller sets the timeout.
pub(in crate::storage) async fn open(address: impl ToSocketAddrs) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let socket = SockRef::from(&stream);
    #[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
    socket.set_tcp_user_timeout(Some(UNACKNOWLEDGED))?;
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(IDLE))?;
    Ok(stream)
}
