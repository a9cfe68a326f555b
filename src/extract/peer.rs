//! The other end of the connection, as servers attach it to a request.

use std::net::{IpAddr, SocketAddr};

use super::{Head, KeyError};

/// The peer's address, an IPv4-mapped one as IPv4.
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

/// The address behind tonic's `TlsConnectInfo`, a type that exists only when tonic is built with TLS: a request of tonic's own
/// knows, and wants the extensions for itself. Tonic's own acceptor attaches the other type too, so only those who bring
/// an acceptor come here.
#[cfg(feature = "tonic")]
#[cold]
fn through_tls(head: &Head<'_>) -> Option<SocketAddr> {
    tonic::Request::from_parts(tonic::metadata::MetadataMap::new(), head.extensions.clone(), ()).remote_addr()
}

/// The error without an address. It lists the ways to provide one.
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
