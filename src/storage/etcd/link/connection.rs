//! Opens one connection to a member, logs in, and waits for a first response.

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
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tonic::body::Body;
use tonic::client::Grpc;
use tonic::metadata::{Ascii, MetadataValue};
use tonic_prost::ProstCodec;
use tower_service::Service;

use super::super::error::{from_status, has_no_leader, is_auth_disabled};
use super::super::url::Access;
use super::super::wire::{Authenticate, Call, Status};
use crate::error::BoxError;
use crate::storage::net::{CONNECT_WITHIN, socket};
use crate::storage::url::Host;
use crate::storage::{StorageError, StorageErrorKind};

/// The interval of HTTP/2 pings while calls are in flight. etcd closes a connection that sends more
/// than one ping in five seconds.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);

/// The timeout of an HTTP/2 ping.
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(2);

/// A connection, and the task that does its I/O.
///
/// Dropping it aborts the task. A member that does not reply would otherwise keep the task alive.
pub(super) struct EtcdConnection {
    member: Box<str>,
    origin: Uri,
    requests: Requests,
    driver: AbortHandle,
    /// The token of the login, if the member requires one.
    token: Option<MetadataValue<Ascii>>,
}

impl EtcdConnection {
    /// Connects to `host` and logs in. Without a login, it waits for the response to a status call,
    /// because an accepted connection does not prove that the member works.
    pub(super) async fn open(host: &Host, access: &Access) -> Result<Self, StorageError> {
        let member = host.to_string();
        let connected = async {
            let stream = socket::open((&*host.name, host.port))
                .await
                .map_err(|error| StorageError::unreachable(&member, error))?;
            let mut connection = match &access.tls {
                Some(tls) => {
                    let stream = tls.over(stream, &host.name).await;
                    Self::over(stream.map_err(|error| StorageError::unreachable(&member, error))?, "https", &member)
                        .await?
                }
                None => Self::over(stream, "http", &member).await?,
            };
            connection.log_in(access).await.map_err(|error| error.while_connecting(&member))?;
            Ok(connection)
        };
        let late = || StorageError::unreachable(&member, format!("connecting took longer than {CONNECT_WITHIN:?}"));
        timeout(CONNECT_WITHIN, connected).await.unwrap_or_else(|_| Err(late()))
    }

    /// Does the HTTP/2 handshake on a stream.
    async fn over<S>(stream: S, scheme: &str, member: &str) -> Result<Self, StorageError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        // The host comes from a parsed URL, but the parser of `http` could be stricter.
        let origin = Uri::builder().scheme(scheme).authority(member).path_and_query("/").build();
        let origin = origin.map_err(|error| StorageError::unreachable(member, error))?;
        let mut builder = Builder::new(TokioExecutor::new());
        builder
            .timer(TokioTimer::new())
            .keep_alive_interval(KEEP_ALIVE_INTERVAL)
            .keep_alive_timeout(KEEP_ALIVE_TIMEOUT);
        let (requests, driver) = builder
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|error| StorageError::unreachable(member, with_source(&error)))?;
        let driver = tokio::spawn(async move { drop(driver.await) }).abort_handle();
        Ok(Self { member: member.into(), origin, requests: Requests(requests), driver, token: None })
    }

    /// Requests a token with the login. Without a login, sends a status call.
    async fn log_in(&mut self, access: &Access) -> Result<(), StorageError> {
        let login = access.login.get().await.map_err(|error| StorageError::unreachable(&self.member, error))?;
        let (Some(name), Some(password)) = (login.user, login.password) else {
            return match self.call(&Status {}).await {
                // A member that refuses the call for lack of permission is reachable, so the
                // connection is usable.
                Err(error) if error.kind() != StorageErrorKind::Refused || has_no_leader(&error) => Err(error),
                _ => Ok(()),
            };
        };
        let call = Authenticate { name, password };
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
            Err(error) => Err(error),
        }
    }

    /// Sends a call once, and returns the response.
    ///
    /// The future can be dropped at any time. The member may still execute the call.
    pub(super) async fn call<C: Call>(&self, call: &C) -> Result<C::Response, StorageError> {
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

    /// Returns `true` if the member closed the connection, or the runtime that opened it has ended.
    pub(super) fn is_closed(&self) -> bool {
        self.driver.is_finished() || self.requests.0.is_closed()
    }
}

impl Drop for EtcdConnection {
    fn drop(&mut self) {
        self.driver.abort();
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
