//! What may go wrong between us and a server, and what that means for a hit.

use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::storage) enum Kind {
    /// There was no connection: nothing was sent.
    Unreached,
    /// Too many calls are in flight: nothing was sent.
    Overloaded { in_flight: usize },
    /// The deadline passed.
    Late { sent: bool },
    /// The connection broke after the command was sent, or what came back is no reply.
    Lost,
    /// The server says no.
    Refused,
    /// A reply that is not what the command answers.
    Unexpected,
    /// There was nothing wrong with the server.
    #[cfg_attr(not(feature = "redis"), allow(dead_code, reason = "others say so with `CasError`"))]
    Undecided { sent: bool },
}

impl Kind {
    pub(in crate::storage) fn is_timeout(self) -> bool {
        matches!(self, Self::Late { .. })
    }

    /// Whether what was sent may have been done all the same.
    pub(in crate::storage) fn may_have_counted(self) -> bool {
        !matches!(
            self,
            Self::Unreached
                | Self::Overloaded { .. }
                | Self::Late { sent: false }
                | Self::Refused
                | Self::Undecided { sent: false }
        )
    }

    /// What went wrong with `server`, without why.
    pub(in crate::storage) fn write(self, server: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreached => write!(f, "cannot reach {server}"),
            Self::Overloaded { in_flight } => {
                write!(f, "overloaded: {in_flight} calls to {server} are in flight, and this one was not sent")
            }
            Self::Late { sent: true } => write!(f, "{server} did not answer within the deadline"),
            Self::Late { sent: false } => write!(f, "there was no connection to {server} within the deadline"),
            Self::Lost => write!(f, "lost the connection to {server}"),
            Self::Refused => write!(f, "{server} refused"),
            Self::Unexpected => write!(f, "{server} answered something else"),
            Self::Undecided { .. } => f.write_str("nothing was decided"),
        }
    }
}
