//! The address of the peer, which the server attaches to each request.

use std::net::{IpAddr, SocketAddr};

use super::{Head, KeyError};

/// Returns the address of the peer. Converts an IPv4-mapped address to IPv4.
#[inline]
pub(super) fn peer(head: &Head<'_>) -> Option<IpAddr> {
    attached(head).map(|address| address.ip().to_canonical())
}

#[inline]
fn attached(head: &Head<'_>) -> Option<SocketAddr> {
    #[cfg(feature = "axum")]
    if let Some(axum::extract::ConnectInfo(address)) = head.extensions.get() {
        return Some(*address);
    }
    #[cfg(feature = "axum")]
    if let Some(axum::extract::connect_info::MockConnectInfo(address)) = head.extensions.get() {
        return Some(*address);
    }
    #[cfg(feature = "tonic")]
    if let Some(address) = head.extensions.get().and_then(tonic::transport::server::TcpConnectInfo::remote_addr) {
        return Some(address);
    }
    let plain = head.extensions.get().copied();
    #[cfg(feature = "tonic")]
    let plain = plain.or_else(|| through_tls(head));
    plain
}

/// Returns the address from tonic's `TlsConnectInfo`. That type exists only if tonic is built with
/// TLS, so the address is read through a `tonic::Request`, which needs a clone of the extensions.
/// tonic's own acceptor also attaches `TcpConnectInfo`, so only custom acceptors take this path.
#[cfg(feature = "tonic")]
#[cold]
fn through_tls(head: &Head<'_>) -> Option<SocketAddr> {
    tonic::Request::from_parts(tonic::metadata::MetadataMap::new(), head.extensions.clone(), ()).remote_addr()
}

/// Returns the error for a missing peer address. Its text lists the ways to attach one.
#[cold]
pub(super) fn no_peer() -> KeyError {
    let axum = if cfg!(feature = "axum") {
        "with axum, serve with into_make_service_with_connect_info::<SocketAddr>()"
    } else {
        "with axum, enable the feature \"axum\" of tower-ratelimit and serve with \
         into_make_service_with_connect_info::<SocketAddr>()"
    };
    let tonic = if cfg!(feature = "tonic") {
        "with tonic, serve over TCP"
    } else {
        "with tonic, enable the feature \"tonic\" of tower-ratelimit and serve over TCP"
    };
    KeyError::server(format!(
        "the peer's address is missing: {axum}; {tonic}; with another server, insert a SocketAddr into each \
         request's extensions; on a Unix socket no peer has an address, so limit by ClientIp::behind_hops(1) or \
         by another key"
    ))
}
