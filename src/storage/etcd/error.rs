use std::error::Error;
use std::fmt;
use std::sync::Arc;

use tonic::{Code, Status};

use crate::BoxError;
use crate::storage::CasError;
use crate::storage::net::{Kind, LinkError};

/// The error of a call to etcd.
///
/// The message names the member, and never contains a password. [`source`](Error::source) returns the
/// cause.
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::EtcdStorage;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_ratelimit::ConfigError> {
/// let unreachable = EtcdStorage::new("etcd://root:secret@127.0.0.1:1")?;
/// let error = unreachable.ready(Duration::from_millis(50)).await.unwrap_err();
/// assert!(error.to_string().starts_with("cannot reach 127.0.0.1:1: "), "{error}");
/// assert!(!error.may_have_counted());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct EtcdStorageError {
    /// Shared, because all callers that wait for a connection get the same error.
    inner: Arc<Inner>,
    /// `false` for a call that cannot count a hit.
    counts: bool,
}

struct Inner {
    kind: Kind,
    member: Box<str>,
    source: Option<Source>,
}

enum Source {
    /// The status in the member's response.
    Status(Status),
    Other(BoxError),
}

impl EtcdStorageError {
    /// Creates the error of a call that was not sent because `member` is unreachable.
    pub(super) fn unreachable(member: &str, source: impl Into<BoxError>) -> Self {
        Self::new(Kind::Unreached, member, Some(Source::Other(source.into())))
    }

    /// Creates the error of a call that timed out after it was sent.
    pub(super) fn timed_out(member: &str) -> Self {
        Self::new(Kind::Late { sent: true }, member, None)
    }

    /// Creates the error of a connection that closed during a call. The call may have been sent.
    pub(super) fn connection_lost(member: &str, source: impl Into<BoxError>) -> Self {
        Self::new(Kind::Lost, member, Some(Source::Other(source.into())))
    }

    /// Converts the status of a call that was sent.
    pub(super) fn from_status(member: &str, status: Status) -> Self {
        let kind = match status.code() {
            // Only statuses that were created on this side have a source: for a broken stream, or
            // for a response that cannot be decoded.
            _ if status.source().is_some() => Kind::Lost,
            _ if means_not_executed(&status) => Kind::Refused,
            Code::DeadlineExceeded => Kind::Late { sent: true },
            _ => Kind::Unexpected,
        };
        Self::new(kind, member, Some(Source::Status(status)))
    }

    /// Creates the error of a malformed response. `detail` describes the response.
    pub(super) fn unexpected_response(member: &str, detail: impl Into<BoxError>) -> Self {
        Self::new(Kind::Unexpected, member, Some(Source::Other(detail.into())))
    }

    /// Converts an error of `Cas` on these members.
    pub(super) fn from_cas(members: &str, error: CasError) -> Self {
        if let Some(etcd_error) = error.source().and_then(<dyn Error>::downcast_ref::<Self>) {
            return etcd_error.clone();
        }
        let counts = error.may_have_counted();
        if error.is_timeout() {
            return Self { counts, ..Self::timed_out(members) };
        }
        Self::new(Kind::Undecided { sent: counts }, members, Some(Source::Other(error.into())))
    }

    fn new(kind: Kind, member: &str, source: Option<Source>) -> Self {
        Self { inner: Arc::new(Inner { kind, member: member.into(), source }), counts: true }
    }

    /// Converts an error of an attempt to connect. The caller's call was not sent.
    pub(super) fn while_connecting(self) -> Self {
        let member = self.inner.member.clone();
        Self::unreachable(&member, ConnectCause(self))
    }

    /// Marks the error as that of a call that cannot count a hit.
    pub(super) fn uncounted(self) -> Self {
        Self { counts: false, ..self }
    }

    /// Returns `true` if no member replied within the timeout.
    pub fn is_timeout(&self) -> bool {
        self.inner.kind.is_timeout()
    }

    /// Returns `true` if the hit may have been counted in spite of the error.
    ///
    /// That is the case if the call was sent and its outcome is unknown. The storage does not retry
    /// such a call, because the retry could count the hit twice.
    pub fn may_have_counted(&self) -> bool {
        self.counts && self.inner.kind.may_have_counted()
    }

    /// Returns `true` if the lease does not exist. Nothing was written.
    pub(super) fn is_lease_not_found(&self) -> bool {
        self.status().is_some_and(|status| status.code() == Code::NotFound)
    }

    /// Returns `true` if the member requires a login or rejects the token. Nothing was executed.
    pub(super) fn is_unauthenticated(&self) -> bool {
        self.status().is_some_and(|status| {
            let messages = ["user name is empty", "revision of auth store is old"];
            status.code() == Code::Unauthenticated || messages.iter().any(|text| status.message().contains(text))
        })
    }

    /// Returns `true` if authentication is disabled in etcd.
    pub(super) fn is_auth_disabled(&self) -> bool {
        self.status().is_some_and(|status| status.message().contains("authentication is not enabled"))
    }

    /// Returns `true` if the member has no leader. Nothing was executed. Other members may have one.
    pub(super) fn has_no_leader(&self) -> bool {
        self.status().is_some_and(means_no_leader)
    }

    /// Returns `true` if the member is temporarily unable to execute the call, for example because
    /// of `leader changed` or `request timed out`. Another member may succeed.
    pub(super) fn is_unavailable(&self) -> bool {
        self.status().is_some_and(|status| status.code() == Code::Unavailable)
    }

    /// Returns `true` if the member rejected the call. Nothing was executed.
    pub(super) fn is_refused(&self) -> bool {
        self.inner.kind == Kind::Refused
    }

    /// Returns `true` if the call was not sent.
    pub(super) fn is_unsent(&self) -> bool {
        matches!(self.inner.kind, Kind::Unreached | Kind::Late { sent: false })
    }

    /// Returns `true` if too many calls were in flight. Nothing was sent.
    pub(super) fn is_overloaded(&self) -> bool {
        matches!(self.inner.kind, Kind::Overloaded { .. })
    }

    /// Returns `true` if the connection is broken.
    pub(super) fn is_connection_lost(&self) -> bool {
        self.inner.kind == Kind::Lost
    }

    fn status(&self) -> Option<&Status> {
        match &self.inner.source {
            Some(Source::Status(status)) => Some(status),
            _ => None,
        }
    }
}

/// Returns `true` for statuses that a member returns before it executes a call.
///
/// After `request timed out` or `database space exceeded`, the call may have been executed.
fn means_not_executed(status: &Status) -> bool {
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

fn means_no_leader(status: &Status) -> bool {
    status.code() == Code::Unavailable && status.message().contains("no leader")
}

impl LinkError for EtcdStorageError {
    fn late(member: &str) -> Self {
        Self::new(Kind::Late { sent: false }, member, None)
    }

    fn overloaded(member: &str, in_flight: usize) -> Self {
        Self::new(Kind::Overloaded { in_flight }, member, None)
    }

    fn is_timeout(&self) -> bool {
        self.is_timeout()
    }
}

impl fmt::Display for EtcdStorageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.kind.write(&self.inner.member, f)?;
        self.inner.source.as_ref().map_or(Ok(()), |source| write!(f, ": {source}"))?;
        let needs_login = self.is_unauthenticated() && self.is_refused();
        if needs_login { f.write_str(" (write etcd://user:password@ in the URL)") } else { Ok(()) }
    }
}

impl fmt::Debug for EtcdStorageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("EtcdStorageError").field(&self.inner.kind).field(&self.to_string()).finish()
    }
}

impl Error for EtcdStorageError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self.inner.source.as_ref()? {
            Source::Status(status) => Some(status),
            Source::Other(error) => Some(&**error),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(status) => match status.source() {
                Some(source) => fmt::Display::fmt(source, f),
                None => f.write_str(status.message()),
            },
            Self::Other(error) => error.fmt(f),
        }
    }
}

/// The cause of a failed attempt to connect. It omits the member's name, which the outer error has.
struct ConnectCause(EtcdStorageError);

impl fmt::Display for ConnectCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0.inner.source {
            Some(source) => source.fmt(f),
            None => f.write_str("timed out"),
        }
    }
}

impl fmt::Debug for ConnectCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Error for ConnectCause {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}
