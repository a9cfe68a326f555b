//! The servers of a URL, and sockets to them.
//!
//! A socket can be half-closed, so that the end of the backend can be awaited.
//!
//! A slot is taken before the login, and is free when the server has closed the socket. Only TCP
//! connects race, so a slow login is not repeated. After 30 seconds a slot is free anyway, because
//! a load balancer may keep a connection to a dead server.

use std::collections::HashMap;
use std::future::poll_fn;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr};
#[cfg(unix)]
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
#[cfg(unix)]
use tokio::net::UnixStream;
use tokio::net::lookup_host;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_postgres::Config;
use tokio_postgres::config::{Host, LoadBalanceHosts};
#[cfg(feature = "postgres-rustls")]
use tokio_postgres::tls::MakeTlsConnect;
#[cfg(feature = "postgres-rustls")]
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::storage::StorageError;
use crate::storage::net::{open_tcp, race, tries};
#[cfg(feature = "postgres-rustls")]
use crate::storage::tls::Tls;
use crate::sync::unpoisoned;

/// The address of a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum PeerAddress {
    Tcp(SocketAddr),
    #[cfg(unix)]
    Unix(PathBuf),
}

impl PeerAddress {
    /// Returns the same address for both addresses of `localhost`, which are one server.
    fn of_server(&self) -> Self {
        match self {
            Self::Tcp(address) if address.ip().is_loopback() => Self::Tcp((Ipv4Addr::LOCALHOST, address.port()).into()),
            other => other.clone(),
        }
    }
}

/// A connected socket. Clones share it. It is closed when the last one is dropped.
#[derive(Clone)]
pub(super) struct Socket(Arc<Stream>);

enum Stream {
    Tcp(TcpStream),
    #[cfg(unix)]
    Unix(UnixStream),
}

/// Evaluates an expression on the stream of either kind.
macro_rules! on_stream {
    ($socket:expr, $stream:ident => $result:expr) => {
        match &*$socket.0 {
            Stream::Tcp($stream) => $result,
            #[cfg(unix)]
            Stream::Unix($stream) => $result,
        }
    };
}

impl Socket {
    /// Connects to `address`. Sends several SYN packets if there is no reply. The caller sets the
    /// timeout.
    pub(super) async fn connect(address: &PeerAddress) -> io::Result<Self> {
        let stream = match address {
            PeerAddress::Tcp(address) => Stream::Tcp(race(tries(|| open_tcp(*address))).await?),
            #[cfg(unix)]
            PeerAddress::Unix(path) => Stream::Unix(UnixStream::connect(path).await?),
        };
        Ok(Self(Arc::new(stream)))
    }

    /// Sends the end of the stream (FIN). The server then ends the backend.
    pub(super) fn finish(&self) {
        // An error means that the connection is closed already.
        let _ = on_stream!(self, stream => SockRef::from(stream).shutdown(Shutdown::Write));
    }

    /// Waits until the server has closed the connection. Discards all bytes that it still sends.
    pub(super) async fn closed(&mut self) {
        let mut bytes = [0; 4_096];
        loop {
            let mut buffer = ReadBuf::new(&mut bytes);
            let read = poll_fn(|cx| Pin::new(&mut *self).poll_read(cx, &mut buffer)).await;
            if read.is_err() || buffer.filled().is_empty() {
                return;
            }
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(on_stream!(self, stream => stream.poll_read_ready(cx)))?;
            match on_stream!(self, stream => stream.try_read(buffer.initialize_unfilled())) {
                Ok(count) => {
                    buffer.advance(count);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            ready!(on_stream!(self, stream => stream.poll_write_ready(cx)))?;
            match on_stream!(self, stream => stream.try_write(bytes)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return Poll::Ready(result),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Does nothing, because PgBouncer drops the cancel request of a client that sends a FIN before
    /// the request was forwarded.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// A server to connect to.
pub(super) struct Server {
    pub(super) address: PeerAddress,
    /// The name in its certificate.
    #[cfg_attr(not(feature = "postgres-rustls"), allow(dead_code, reason = "only TLS needs the name"))]
    pub(super) name: String,
}

/// Resolves the hosts.
///
/// # Errors
///
/// Returns the last error if no host can be resolved.
pub(super) async fn resolve(config: &Config, server: &str) -> Result<Vec<Server>, StorageError> {
    let (hosts, addresses, ports) = (config.get_hosts(), config.get_hostaddrs(), config.get_ports());
    let mut servers = Vec::new();
    let mut error = None;
    for at in 0..hosts.len().max(addresses.len()) {
        let port = ports.get(at).or_else(|| ports.first()).copied().unwrap_or(5_432);
        let name = match hosts.get(at) {
            Some(Host::Tcp(name)) => name.clone(),
            #[cfg(unix)]
            Some(Host::Unix(folder)) if addresses.is_empty() => {
                let address = PeerAddress::Unix(folder.join(format!(".s.PGSQL.{port}")));
                servers.push(Server { address, name: String::new() });
                continue;
            }
            _ => String::new(),
        };
        if let Some(address) = addresses.get(at) {
            servers.push(Server { address: PeerAddress::Tcp((*address, port).into()), name });
            continue;
        }
        match lookup_host((&*name, port)).await {
            Ok(found) => {
                servers.extend(found.map(|address| Server { address: PeerAddress::Tcp(address), name: name.clone() }));
            }
            Err(failed) => error = Some(failed),
        }
    }
    if config.get_load_balance_hosts() == LoadBalanceHosts::Random {
        let random = RandomState::new();
        servers.sort_by_key(|server| random.hash_one(&server.address));
    }
    match error {
        Some(error) if servers.is_empty() => Err(StorageError::unreachable(server, error)),
        _ => Ok(servers),
    }
}

/// A place for one connection. It is taken before the login, and dropped when the server has closed
/// the connection.
pub(super) type BackendSlot = OwnedSemaphorePermit;

/// The slots of a storage on each server.
#[derive(Debug, Default)]
pub(super) struct BackendSlots {
    /// The number of slots per server.
    count: usize,
    taken: Mutex<HashMap<PeerAddress, Arc<Semaphore>>>,
}

impl BackendSlots {
    pub(super) fn new(count: usize) -> Self {
        Self { count, taken: Mutex::default() }
    }

    /// Waits for a free slot of the server.
    pub(super) async fn take(&self, address: &PeerAddress) -> BackendSlot {
        let address = address.of_server();
        let slots = {
            let mut taken = unpoisoned(self.taken.lock());
            // The addresses of a name can change, so those without a connection are forgotten.
            taken.retain(|other, slots| *other == address || Arc::strong_count(slots) > 1);
            let new = || Arc::new(Semaphore::new(self.count));
            Arc::clone(taken.entry(address).or_insert_with(new))
        };
        slots.acquire_owned().await.unwrap_or_else(|_| unreachable!("the semaphore is never closed"))
    }
}

/// The encryption of a connection.
#[derive(Clone)]
pub(super) enum Security {
    None,
    /// TLS with a server of this name.
    #[cfg(feature = "postgres-rustls")]
    Tls(Tls, Box<str>),
}

/// Returns the TLS connector for a server of this name.
#[cfg(feature = "postgres-rustls")]
pub(super) fn connector(
    tls: &Tls,
    name: &str,
) -> io::Result<<MakeRustlsConnect as MakeTlsConnect<Socket>>::TlsConnect> {
    let connector = MakeTlsConnect::<Socket>::make_tls_connect(&mut MakeRustlsConnect::new(tls.rustls()), name);
    connector.map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn addresses_of_this_machine_share_slots() {
        let (slots, address) = (BackendSlots::new(1), |text: &str| PeerAddress::Tcp(text.parse().unwrap()));
        let taken = slots.take(&address("127.0.0.1:5432")).await;
        assert!(slots.take(&address("[::1]:5432")).now_or_never().is_none());
        for other in ["127.0.0.1:5433", "192.0.2.1:5432"] {
            assert!(slots.take(&address(other)).now_or_never().is_some(), "{other}");
        }
        drop(taken);
        assert!(slots.take(&address("[::1]:5432")).now_or_never().is_some());
    }
}
