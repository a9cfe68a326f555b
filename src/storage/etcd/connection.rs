//! Opens one connection to a member, logs in, and waits for a first response. Converts errors.
//!
//! Every error may have counted, except those that etcd returns before it does anything.
//!
//! A login token belongs to a connection, because members lose tokens when they restart. A call
//! that fails with `invalid auth token` was not executed.

use std::error::Error;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::uri::{PathAndQuery, Uri};
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tonic::Code;
use tonic::body::Body;
use tonic::client::Grpc;
use tonic::metadata::{Ascii, MetadataValue};
use tonic_prost::ProstCodec;
use tower_service::Service;

use super::wire::{AuthenticateRequest, EtcdCall, StatusRequest};
use crate::error::BoxError;
use crate::storage::credentials::LoginSource;
use crate::storage::net::{self, Driver, FirstBytes, ServerStream, Usable};
use crate::storage::tls::Tls;
use crate::storage::url::Address;
use crate::storage::{StorageError, StorageErrorKind};

/// The interval of HTTP/2 pings while calls are in flight. etcd closes a connection that sends more
/// than one ping in five seconds.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);

/// The timeout of an HTTP/2 ping.
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(2);

/// The login and the TLS settings of a connection.
#[derive(Clone, Debug, Default)]
pub(super) struct EtcdAccess {
    pub(super) login: LoginSource,
    pub(super) tls: Option<Tls>,
}

/// A connection, and the task that does its I/O.
pub(super) struct EtcdConnection {
    member: Box<str>,
    origin: Uri,
    requests: Requests,
    driver: Driver,
    /// The token of the login, if the member requires one.
    token: Option<MetadataValue<Ascii>>,
}

impl EtcdConnection {
    /// Connects to `address` and logs in. Without a login, it waits for the response to a status call,
    /// because an accepted connection does not prove that the member works.
    pub(super) async fn open(address: &Address, access: &EtcdAccess) -> Result<Self, StorageError> {
        let (member, first) = (address.to_string(), FirstBytes::default());
        let connected = async {
            let stream = net::open(address, access.tls.as_ref(), &first).await;
            let stream = stream.map_err(|error| StorageError::unreachable(&member, error))?;
            let scheme = if access.tls.is_some() { "https" } else { "http" };
            let mut connection = Self::over(stream, scheme, &member).await?;
            connection.log_in(access).await.map_err(|error| error.while_connecting(&member))?;
            Ok(connection)
        };
        net::connecting(&member, "etcd", &first, connected).await
    }

    /// Does the HTTP/2 handshake on a stream.
    async fn over(stream: Box<dyn ServerStream>, scheme: &str, member: &str) -> Result<Self, StorageError> {
        // The host comes from a parsed URL, but the parser of `http` could be stricter.
        let origin = Uri::builder().scheme(scheme).authority(member).path_and_query("/").build();
        let origin = origin.map_err(|error| StorageError::unreachable(member, error))?;
        let mut builder = Builder::new(TokioExecutor::new());
        builder
            .timer(TokioTimer::new())
            .keep_alive_interval(KEEP_ALIVE_INTERVAL)
            .keep_alive_timeout(KEEP_ALIVE_TIMEOUT);
        let (requests, io) = builder
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|error| StorageError::unreachable(member, with_source(&error)))?;
        Ok(Self { member: member.into(), origin, requests: Requests(requests), driver: Driver::spawn(io), token: None })
    }

    /// Requests a token with the login. Without a login, sends a status call.
    async fn log_in(&mut self, access: &EtcdAccess) -> Result<(), StorageError> {
        let login = access.login.get().await.map_err(|error| StorageError::cannot_log_in(&self.member, error))?;
        let (Some(name), Some(password)) = (login.user, login.password) else {
            return match self.call(&StatusRequest {}).await {
                // A member that refuses the call for lack of permission is reachable, so the
                // connection is usable.
                Err(error) if error.kind() != StorageErrorKind::Refused || has_no_leader(&error) => Err(error),
                _ => Ok(()),
            };
        };
        let call = AuthenticateRequest { name, password };
        match self.call(&call).await {
            Ok(response) => {
                let token = response.token.parse();
                let token = token.map_err(|_| {
                    StorageError::unexpected_reply(&self.member, "the token contains invalid characters")
                })?;
                self.token = Some(token);
                Ok(())
            }
            Err(error) if is_auth_disabled(&error) => Ok(()),
            Err(error) => match status(&error) {
                Some(refused) if means_not_executed(refused) && !means_no_leader(refused) => {
                    Err(StorageError::cannot_log_in(&self.member, EtcdCause(refused.clone())))
                }
                _ => Err(error),
            },
        }
    }

    /// Sends a call once, and returns the response.
    ///
    /// The future can be dropped at any time. The member may still execute the call.
    pub(super) async fn call<C: EtcdCall>(&self, call: &C) -> Result<C::Response, StorageError> {
        let mut request = tonic::Request::new(call.clone());
        // With this metadata, a member without a leader fails the call at once instead of waiting.
        request.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
        if let Some(token) = &self.token {
            request.metadata_mut().insert("token", token.clone());
        }
        let mut client = Grpc::with_origin(self.requests.clone(), self.origin.clone());
        client.ready().await.map_err(|error| StorageError::unreachable(&self.member, error))?;
        let codec = ProstCodec::<C, C::Response>::default();
        let response = client.unary(request, PathAndQuery::from_static(C::PATH), codec).await;
        response.map(tonic::Response::into_inner).map_err(|status| self.convert(status))
    }

    /// Converts a status. If its source is a [`TransportError`], that error records if the call was
    /// sent.
    fn convert(&self, status: tonic::Status) -> StorageError {
        match status.source().and_then(|source| source.downcast_ref::<TransportError>()) {
            Some(error) if !error.sent => StorageError::unreachable(&self.member, error.message.clone()),
            Some(error) => StorageError::connection_lost(&self.member, error.message.clone()),
            None => from_status(&self.member, status),
        }
    }
}

impl Usable for EtcdConnection {
    fn is_usable(&self) -> bool {
        !self.driver.is_finished() && !self.requests.0.is_closed()
    }
}

/// A service that sends requests. Its error records if the request was sent.
#[derive(Clone)]
struct Requests(SendRequest<Body>);

impl Service<Request<Body>> for Requests {
    type Response = Response<Incoming>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Incoming>, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.0.poll_ready(cx).map_err(|error| TransportError::new(&error, false).into())
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let response = self.0.try_send_request(request);
        Box::pin(async move {
            response.await.map_err(|mut error| {
                // hyper returns a request that it did not send.
                let sent = error.take_message().is_none();
                TransportError::new(error.error(), sent).into()
            })
        })
    }
}

/// The error of a connection that failed before the response arrived.
#[derive(Debug)]
struct TransportError {
    message: String,
    sent: bool,
}

impl TransportError {
    fn new(error: &hyper::Error, sent: bool) -> Self {
        Self { message: with_source(error), sent }
    }
}

impl fmt::Display for TransportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for TransportError {}

/// Formats an error with its source, because hyper's own messages are very short.
fn with_source(error: &hyper::Error) -> String {
    error.source().map_or_else(|| error.to_string(), |source| format!("{error}: {source}"))
}

/// The gRPC status of a call that was sent, as the source of its error. The member sent it, or the
/// client created it because the response could not be read.
#[derive(Debug)]
struct EtcdCause(tonic::Status);

/// Converts the status of a call that was sent.
fn from_status(member: &str, status: tonic::Status) -> StorageError {
    let is_local = status.source().is_some();
    let (code, was_refused) = (status.code(), means_not_executed(&status));
    let cause = EtcdCause(status);
    match code {
        // Only a status that the client created has a source. The stream broke, or the response
        // cannot be decoded.
        _ if is_local => StorageError::connection_lost(member, cause),
        _ if was_refused => StorageError::refused(member, cause),
        Code::ResourceExhausted => StorageError::refused(member, cause).with_may_have_counted(true),
        Code::DeadlineExceeded => StorageError::timed_out(member).with_source(cause),
        _ => StorageError::unexpected_reply(member, cause),
    }
}

/// Returns `true` if the lease of a write does not exist. Nothing was written.
pub(super) fn is_lease_not_found(error: &StorageError) -> bool {
    status(error).is_some_and(|status| status.code() == Code::NotFound)
}

/// Returns `true` if the member requires a login or rejects the token. Nothing was executed.
pub(super) fn is_unauthenticated(error: &StorageError) -> bool {
    status(error).is_some_and(means_unauthenticated)
}

/// Returns `true` if authentication is disabled in etcd.
fn is_auth_disabled(error: &StorageError) -> bool {
    status(error).is_some_and(|status| status.message().contains("authentication is not enabled"))
}

/// Returns `true` if the member has no leader. Nothing was executed. Other members may have one.
pub(super) fn has_no_leader(error: &StorageError) -> bool {
    status(error).is_some_and(means_no_leader)
}

/// Returns `true` if the member is temporarily unable to execute the call, for example because of
/// `leader changed` or `request timed out`. Another member may succeed.
pub(super) fn is_unavailable(error: &StorageError) -> bool {
    status(error).is_some_and(|status| status.code() == Code::Unavailable)
}

/// Returns `true` if the call was not sent.
pub(super) fn is_unsent(error: &StorageError) -> bool {
    let was_never_sent = error.is_timeout() && !error.may_have_counted();
    error.kind() == StorageErrorKind::Unreachable || was_never_sent
}

/// Returns the status in the member's response. The errors of an attempt to connect have none.
fn status(error: &StorageError) -> Option<&tonic::Status> {
    let source = error.source().filter(|_| error.kind() != StorageErrorKind::Unreachable)?;
    source.downcast_ref().map(|EtcdCause(status)| status)
}

/// Returns `true` for statuses that a member returns before it executes a call.
///
/// After `request timed out` or `database space exceeded`, the call may have been executed: etcd can
/// execute the write that exceeds the space, and report the error nevertheless.
fn means_not_executed(status: &tonic::Status) -> bool {
    match status.code() {
        Code::InvalidArgument
        | Code::NotFound
        | Code::PermissionDenied
        | Code::FailedPrecondition
        | Code::Unimplemented
        | Code::Unauthenticated => true,
        Code::ResourceExhausted => status.message().contains("too many requests"),
        _ => means_no_leader(status),
    }
}

fn means_no_leader(status: &tonic::Status) -> bool {
    status.code() == Code::Unavailable && status.message().contains("no leader")
}

fn means_unauthenticated(status: &tonic::Status) -> bool {
    let messages = ["user name is empty", "revision of auth store is old"];
    status.code() == Code::Unauthenticated || messages.iter().any(|text| status.message().contains(text))
}

impl fmt::Display for EtcdCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(status) = self;
        match status.source() {
            Some(source) => fmt::Display::fmt(source, f),
            None if means_unauthenticated(status) && means_not_executed(status) => {
                write!(f, "{} (write etcd://user:password@ in the URL)", status.message())
            }
            None if status.message().contains("space exceeded") => {
                write!(f, "{} (compact and defragment etcd, then run etcdctl alarm disarm)", status.message())
            }
            None => f.write_str(status.message()),
        }
    }
}

impl Error for EtcdCause {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        // `Display` writes the message of the status's source, so the chain continues after that
        // source.
        self.0.source().and_then(Error::source)
    }
}
