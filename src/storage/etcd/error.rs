use std::error::Error;
use std::fmt;
use std::sync::Arc;

use tonic::{Code, Status};

use crate::BoxError;
use crate::storage::CasError;
use crate::storage::net::{Kind, LinkError};

/// Why etcd could not be asked, or what it answered instead of a decision.
///
/// It names the member, and never a password. What caused it is its [`source`](Error::source).
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::storage::EtcdStorage;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_ratelimit::ConfigError> {
/// let nobody = EtcdStorage::new("etcd://root:secret@127.0.0.1:1")?;
/// let error = nobody.ready(Duration::from_millis(50)).await.unwrap_err();
/// assert!(error.to_string().starts_with("cannot reach 127.0.0.1:1: "), "{error}");
/// assert!(!error.may_have_counted());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct EtcdStorageError {
    /// Many may be told the same.
    told: Arc<Told>,
    /// Whether it was about something that counts, if it was sent.
    counts: bool,
}

struct Told {
    kind: Kind,
    member: Box<str>,
    source: Option<Source>,
}

enum Source {
    /// What the member says.
    Status(Status),
    Other(BoxError),
}

impl EtcdStorageError {
    /// Nothing was sent, since `member` could not be reached.
    pub(super) fn unreached(member: &str, source: impl Into<BoxError>) -> Self {
        Self::new(Kind::Unreached, member, Some(Source::Other(source.into())))
    }

    /// The deadline passed after the call was sent.
    pub(super) fn silent(member: &str) -> Self {
        Self::new(Kind::Late { sent: true }, member, None)
    }

    /// The connection was closed under a call that may have been sent.
    pub(super) fn lost(member: &str, source: impl Into<BoxError>) -> Self {
        Self::new(Kind::Lost, member, Some(Source::Other(source.into())))
    }

    /// What came back in place of an answer, after the call was sent.
    pub(super) fn answered(member: &str, status: Status) -> Self {
        let kind = match status.code() {
            // A cause is our own: the stream broke, or what came is no answer. A member's words come without.
            _ if status.source().is_some() => Kind::Lost,
            _ if is_not_executed(&status) => Kind::Refused,
            Code::DeadlineExceeded => Kind::Late { sent: true },
            _ => Kind::Unexpected,
        };
        Self::new(kind, member, Some(Source::Status(status)))
    }

    /// An answer that is not what was asked for.
    pub(super) fn unexpected(member: &str, what: impl Into<BoxError>) -> Self {
        Self::new(Kind::Unexpected, member, Some(Source::Other(what.into())))
    }

    /// What deciding on `members` failed with, in the words of this storage.
    pub(super) fn of_deciding(members: &str, error: CasError) -> Self {
        if let Some(own) = error.source().and_then(<dyn Error>::downcast_ref::<Self>) {
            return own.clone();
        }
        let counts = error.may_have_counted();
        if error.is_timeout() {
            return Self { counts, ..Self::silent(members) };
        }
        Self::new(Kind::Undecided { sent: counts }, members, Some(Source::Other(error.into())))
    }

    fn new(kind: Kind, member: &str, source: Option<Source>) -> Self {
        Self { told: Arc::new(Told { kind, member: member.into(), source }), counts: true }
    }

    /// The same, of an attempt to connect: what was asked for has not been sent.
    pub(super) fn while_connecting(self) -> Self {
        let member = self.told.member.clone();
        Self::unreached(&member, Cause(self))
    }

    /// The same, of a call that only reads, or prepares what is to be sent.
    pub(super) fn that_counts_nothing(self) -> Self {
        Self { counts: false, ..self }
    }

    /// Whether there was no answer within the deadline.
    pub fn is_timeout(&self) -> bool {
        self.told.kind.is_timeout()
    }

    /// Whether a hit may have been counted all the same: it was sent, and whether it was executed is not known. It is never
    /// sent again, since then it might be counted twice.
    pub fn may_have_counted(&self) -> bool {
        self.counts && self.told.kind.may_have_counted()
    }

    /// Whether the lease is no more: nothing was written.
    pub(super) fn is_of_the_lease(&self) -> bool {
        self.status().is_some_and(|status| status.code() == Code::NotFound)
    }

    /// Whether the member does not know any more who we are: nothing was executed.
    pub(super) fn is_of_the_login(&self) -> bool {
        self.status().is_some_and(|status| {
            let words = ["user name is empty", "revision of auth store is old"];
            status.code() == Code::Unauthenticated || words.iter().any(|words| status.message().contains(words))
        })
    }

    /// Whether there is nobody to log in at: logins are switched off.
    pub(super) fn is_without_logins(&self) -> bool {
        self.status().is_some_and(|status| status.message().contains("authentication is not enabled"))
    }

    /// Whether the member knows of no leader: nothing was executed, and another member may know of one.
    pub(super) fn is_without_leader(&self) -> bool {
        self.status().is_some_and(without_leader)
    }

    /// Whether the member could not do it just now (`leader changed`, `request timed out`), and another one perhaps can.
    pub(super) fn is_unavailable(&self) -> bool {
        self.status().is_some_and(|status| status.code() == Code::Unavailable)
    }

    /// Whether the member has said no, and nothing was executed.
    pub(super) fn is_refused(&self) -> bool {
        self.told.kind == Kind::Refused
    }

    /// Whether nothing was sent.
    pub(super) fn is_unsent(&self) -> bool {
        matches!(self.told.kind, Kind::Unreached | Kind::Late { sent: false })
    }

    /// Returns `true` if too many calls were in flight. Nothing was sent.
    pub(super) fn is_overloaded(&self) -> bool {
        matches!(self.told.kind, Kind::Overloaded { .. })
    }

    /// Whether the connection is of no more use.
    pub(super) fn is_lost(&self) -> bool {
        self.told.kind == Kind::Lost
    }

    fn status(&self) -> Option<&Status> {
        match &self.told.source {
            Some(Source::Status(status)) => Some(status),
            _ => None,
        }
    }
}

/// Whether a member says that before it has done anything. Of what it says of time and space (`request timed out`,
/// `database space exceeded`) that is not known.
fn is_not_executed(status: &Status) -> bool {
    match status.code() {
        Code::InvalidArgument
        | Code::NotFound
        | Code::PermissionDenied
        | Code::FailedPrecondition
        | Code::Unimplemented
        | Code::Unauthenticated => true,
        Code::ResourceExhausted => status.message().contains("too many requests"),
        _ => without_leader(status),
    }
}

fn without_leader(status: &Status) -> bool {
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
        self.told.kind.write(&self.told.member, f)?;
        self.told.source.as_ref().map_or(Ok(()), |source| write!(f, ": {source}"))?;
        let login = self.is_of_the_login() && self.is_refused();
        if login { f.write_str(" (write etcd://user:password@ in its URL)") } else { Ok(()) }
    }
}

impl fmt::Debug for EtcdStorageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("EtcdStorageError").field(&self.told.kind).field(&self.to_string()).finish()
    }
}

impl Error for EtcdStorageError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self.told.source.as_ref()? {
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

/// What went wrong while connecting, without the member's name: it is said once.
struct Cause(EtcdStorageError);

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0.told.source {
            Some(source) => source.fmt(f),
            None => f.write_str("it did not answer in time"),
        }
    }
}

impl fmt::Debug for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Error for Cause {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}
