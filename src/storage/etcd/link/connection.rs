//! One connection to a member: opened, let in, and known to answer.

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

use super::super::error::EtcdStorageError;
use super::super::url::Access;
use super::super::wire::{Authenticate, Call, Status};
use crate::BoxError;
use crate::storage::net::{CONNECT_WITHIN, socket};
use crate::storage::url::Host;

/// While calls are under way, the other side is asked so often whether it is still there. A member that is asked more often than
/// every five seconds closes the connection.
const ASK_EVERY: Duration = Duration::from_secs(10);
const ANSWERS_WITHIN: Duration = Duration::from_secs(2);

/// A connection, and the task that writes and reads for all who use it. It ends with its last user: a stopped member would keep it
/// for ever.
pub(super) struct Connection {
    member: Box<str>,
    origin: Uri,
    requests: Requests,
    driver: AbortHandle,
    /// Who we are, to a member that wants to know.
    token: Option<MetadataValue<Ascii>>,
}

impl Connection {
    /// Connects to `host`, and is let in there. Anybody may connect to anything, so it has to answer something too.
    pub(super) async fn open(host: &Host, access: &Access) -> Result<Self, EtcdStorageError> {
        let member = host.to_string();
        let connected = async {
            let stream = socket::open(host).await.map_err(|error| EtcdStorageError::unreached(&member, error))?;
            let mut connection = match &access.tls {
                Some(tls) => {
                    let stream = tls.over(stream, &host.name).await;
                    Self::over(stream.map_err(|error| EtcdStorageError::unreached(&member, error))?, "https", &member)
                        .await?
                }
                None => Self::over(stream, "http", &member).await?,
            };
            connection.log_in(access).await.map_err(EtcdStorageError::while_connecting)?;
            Ok(connection)
        };
        let late = || EtcdStorageError::unreached(&member, format!("connecting took longer than {CONNECT_WITHIN:?}"));
        timeout(CONNECT_WITHIN, connected).await.unwrap_or_else(|_| Err(late()))
    }

    async fn over<S>(stream: S, scheme: &str, member: &str) -> Result<Self, EtcdStorageError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        // What the URL's reader takes for a host is one here too.
        let origin = Uri::builder().scheme(scheme).authority(member).path_and_query("/").build();
        let origin = origin.map_err(|error| EtcdStorageError::unreached(member, error))?;
        let mut builder = Builder::new(TokioExecutor::new());
        builder.timer(TokioTimer::new()).keep_alive_interval(ASK_EVERY).keep_alive_timeout(ANSWERS_WITHIN);
        let (requests, driver) = builder
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|error| EtcdStorageError::unreached(member, told(&error)))?;
        let driver = tokio::spawn(async move { drop(driver.await) }).abort_handle();
        Ok(Self { member: member.into(), origin, requests: Requests(requests), driver, token: None })
    }

    async fn log_in(&mut self, access: &Access) -> Result<(), EtcdStorageError> {
        let (Some(name), Some(password)) = (&access.login.user, &access.login.password) else {
            return match self.ask(&Status {}).await {
                // That we may not ask for that is an answer too.
                Err(error) if !error.is_refused() || error.is_without_leader() => Err(error),
                _ => Ok(()),
            };
        };
        let call = Authenticate { name: name.clone(), password: password.clone() };
        match self.ask(&call).await {
            Ok(answer) => {
                let token = answer.token.parse();
                let token = token.map_err(|_| EtcdStorageError::unexpected(&self.member, "its token is no text"))?;
                self.token = Some(token);
                Ok(())
            }
            Err(error) if error.is_without_logins() => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Sends a call, once, and waits for its answer. The future may be dropped at any time; the call may have been executed then.
    pub(super) async fn ask<C: Call>(&self, call: &C) -> Result<C::Answer, EtcdStorageError> {
        let mut request = tonic::Request::new(call.clone());
        // A member that is cut off from the others says so, and does not wait for them.
        request.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
        if let Some(token) = &self.token {
            request.metadata_mut().insert("token", token.clone());
        }
        let mut client = Grpc::with_origin(self.requests.clone(), self.origin.clone());
        client.ready().await.map_err(|error| EtcdStorageError::unreached(&self.member, error))?;
        let codec = ProstCodec::<C, C::Answer>::default();
        let answer = client.unary(request, PathAndQuery::from_static(C::PATH), codec).await;
        answer.map(tonic::Response::into_inner).map_err(|status| self.wrong(status))
    }

    fn wrong(&self, status: tonic::Status) -> EtcdStorageError {
        match status.source().and_then(|cause| cause.downcast_ref::<Broken>()) {
            Some(broken) if !broken.sent => EtcdStorageError::unreached(&self.member, broken.why.clone()),
            Some(broken) => EtcdStorageError::lost(&self.member, broken.why.clone()),
            None => EtcdStorageError::answered(&self.member, status),
        }
    }

    /// Whether the other side has closed it, or the runtime on which it was opened has ended.
    pub(super) fn is_closed(&self) -> bool {
        self.driver.is_finished() || self.requests.0.is_closed()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// Sends requests, and knows of those that were not.
#[derive(Clone)]
struct Requests(SendRequest<Body>);

impl Service<Request<Body>> for Requests {
    type Response = Response<Incoming>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Incoming>, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.0.poll_ready(cx).map_err(|error| Broken::new(&error, false).into())
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let response = self.0.try_send_request(request);
        Box::pin(async move {
            response.await.map_err(|mut error| {
                // What comes back was not sent.
                let sent = error.take_message().is_none();
                Broken::new(error.error(), sent).into()
            })
        })
    }
}

/// The connection has ended before the answer came.
#[derive(Debug)]
struct Broken {
    why: String,
    sent: bool,
}

impl Broken {
    fn new(error: &hyper::Error, sent: bool) -> Self {
        Self { why: told(error), sent }
    }
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)
    }
}

impl Error for Broken {}

/// With its cause: alone it says next to nothing.
fn told(error: &hyper::Error) -> String {
    error.source().map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"))
}
