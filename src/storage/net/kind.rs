//! The kinds of errors of a call to a server.

use std::fmt;

/// Shared by the errors of all server storages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::storage) enum Kind {
    /// The connection could not be opened. The call was not sent.
    Unreached,
    /// Too many calls are in flight. The call was not sent.
    Overloaded { in_flight: usize },
    /// The call timed out.
    Late { sent: bool },
    /// The connection broke after the command was sent, or the reply could not be parsed.
    Lost,
    /// The server refused the command, and has not executed it.
    Refused,
    /// The reply is not one of the replies to the command.
    Unexpected,
    /// The server works, but there is no decision, for example because other processes won every
    /// race.
    #[cfg_attr(not(feature = "redis"), allow(dead_code, reason = "the other storages return a `CasError`"))]
    Undecided { sent: bool },
}

impl Kind {
    pub(in crate::storage) fn is_timeout(self) -> bool {
        matches!(self, Self::Late { .. })
    }

    /// Returns `true` if the server may have executed the call.
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

    /// Writes the message of this kind of error, without its cause.
    pub(in crate::storage) fn write(self, server: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreached => write!(f, "cannot reach {server}"),
            Self::Overloaded { in_flight } => {
                write!(f, "overloaded: {in_flight} calls to {server} are in flight, this call was not sent")
            }
            Self::Late { sent: true } => write!(f, "{server} did not answer within the deadline"),
            Self::Late { sent: false } => write!(f, "no connection to {server} within the deadline"),
            Self::Lost => write!(f, "connection to {server} lost"),
            Self::Refused => write!(f, "{server} refused the command"),
            Self::Unexpected => write!(f, "unexpected reply from {server}"),
            Self::Undecided { .. } => f.write_str("no decision was made"),
        }
    }
}
