//! The error replies of Redis.
//!
//! Removes the command arguments that servers quote in their errors.
//!
//! Arguments contain the keys of clients, for example IP addresses.

use std::error::Error;
use std::fmt;

use redis::{ErrorKind, RedisError, ServerErrorKind, make_extension_error};

use crate::storage::{StorageError, StorageErrorKind};
use crate::time::Timestamp;

/// An error of the `redis` crate, as the source of a [`StorageError`].
#[derive(Debug)]
struct RedisCause(RedisError);

/// The code of the error of a script on a value of an unknown format.
const FOREIGN: &str = "FOREIGN";

/// The redirection in a reply of a cluster node. The node did not execute the command.
#[cfg(feature = "redis-cluster")]
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Redirect<'a> {
    /// The slot has moved to this address.
    Moved(&'a str),
    /// The slot is being migrated. The key is at this address already.
    Ask(&'a str),
    /// The slot is being migrated. The same node can execute the command later.
    TryAgain,
}

/// The begin of the texts after `ERR` with which twemproxy reports that its server did not answer.
/// They are those of `strerror`, in glibc and musl.
const NO_ANSWER: [&str; 7] = [
    "Broken pipe",
    "Connection ",
    "Host is ",
    "Network ",
    "No route to host",
    "Operation timed out",
    "Resource temporarily unavailable",
];

/// The whole texts of twemproxy if the server has closed the connection, or has failed another
/// command on it. Errors of Redis begin with the same words.
const NO_REASON: [&str; 2] = ["unknown", "Invalid argument"];

/// Converts an error of the `redis` crate. An error reply of `server` means that it refused the
/// command, unless a proxy wrote it, which may have forwarded the command. Any other error means that
/// the connection was lost after the command was sent.
pub(super) fn from_redis(server: &str, error: RedisError) -> StorageError {
    let cause = RedisCause(without_arguments(error));
    match cause.0.kind() {
        _ if cause.0.code() == Some(FOREIGN) => {
            StorageError::new(StorageErrorKind::Unsupported, format!("{server} refused the command")).with_source(cause)
        }
        ErrorKind::Server(_) | ErrorKind::Extension if is_of_proxy(&cause.0) => {
            StorageError::unexpected_reply(server, cause)
        }
        ErrorKind::Server(_) | ErrorKind::Extension => StorageError::refused(server, cause),
        _ => StorageError::connection_lost(server, cause),
    }
}

/// Returns `true` if the reply is not one of Redis, whose codes are upper case. Envoy writes, for
/// example, `upstream failure`.
fn is_of_proxy(reply: &RedisError) -> bool {
    let is_code = |code: &str| !code.bytes().any(|byte| byte.is_ascii_lowercase());
    match (reply.code(), reply.detail()) {
        (Some("ERR"), Some(text)) => NO_REASON.contains(&text) || NO_ANSWER.iter().any(|known| text.starts_with(known)),
        (code, _) => !code.is_some_and(is_code),
    }
}

/// Converts the error of an attempt to connect to `server`.
pub(super) fn while_connecting(server: &str, error: RedisError) -> StorageError {
    let is_login =
        error.kind() == ErrorKind::AuthenticationFailed || matches!(error.code(), Some("NOAUTH" | "WRONGPASS"));
    if is_login {
        return StorageError::cannot_log_in(server, RedisCause(without_arguments(error)));
    }
    from_redis(server, error).while_connecting(server)
}

/// Returns `true` if the server has not cached the script. Then it has executed nothing.
pub(super) fn is_script_missing(error: &StorageError) -> bool {
    is_server_error(error, ServerErrorKind::NoScript)
}

/// Returns `true` if the server belongs to a cluster and the keys of the command are in several slots.
pub(super) fn is_cross_slot(error: &StorageError) -> bool {
    is_server_error(error, ServerErrorKind::CrossSlot)
}

/// Returns `true` if the user has no right to run the command.
pub(super) fn is_permission_denied(error: &StorageError) -> bool {
    is_server_error(error, ServerErrorKind::NoPerm)
}

/// Returns `true` if the server has become a replica, or requires another login. A new connection
/// can succeed.
pub(super) fn needs_new_connection(error: &StorageError) -> bool {
    error_reply(error).is_some_and(|reply| {
        // Before version 7, Redis quotes the error of a command in that of its script.
        let is_quoted = || reply.detail().is_some_and(|text| text.contains("-READONLY "));
        matches!(reply.code(), Some("READONLY" | "NOAUTH" | "WRONGPASS")) || is_quoted()
    })
}

/// Returns the redirection, if the error is one.
#[cfg(feature = "redis-cluster")]
pub(super) fn redirect(error: &StorageError) -> Option<Redirect<'_>> {
    let reply = error_reply(error)?;
    let target = reply.redirect_node().map(|(address, _)| address);
    match reply.kind() {
        ErrorKind::Server(ServerErrorKind::Moved) => target.map(Redirect::Moved),
        ErrorKind::Server(ServerErrorKind::Ask) => target.map(Redirect::Ask),
        ErrorKind::Server(ServerErrorKind::TryAgain) => Some(Redirect::TryAgain),
        _ => None,
    }
}

/// Returns `true` if another node may hold the slot by now.
#[cfg(feature = "redis-cluster")]
pub(super) fn needs_new_slot_map(error: &StorageError) -> bool {
    let down = [ServerErrorKind::ClusterDown, ServerErrorKind::MasterDown];
    !matches!(error.kind(), StorageErrorKind::Refused | StorageErrorKind::Unsupported)
        || down.into_iter().any(|kind| is_server_error(error, kind))
        || needs_new_connection(error)
}

/// Returns the server's time if the arguments of a strategy do not cover it. Then the script has
/// written nothing.
pub(super) fn unprepared_time(error: &StorageError) -> Option<Timestamp> {
    let (_, time) = error_reply(error)?.detail()?.split_once("not prepared for ")?;
    let digits = time.split(|c: char| !c.is_ascii_digit()).next()?;
    digits.parse().ok().map(Timestamp::from_micros)
}

fn is_server_error(error: &StorageError, kind: ServerErrorKind) -> bool {
    error_reply(error).is_some_and(|reply| reply.kind() == ErrorKind::Server(kind))
}

/// Returns the server's error reply to the command, or `None` if the error has another cause.
fn error_reply(error: &StorageError) -> Option<&RedisError> {
    let source = error.source().filter(|_| error.kind() == StorageErrorKind::Refused)?;
    source.downcast_ref().map(|RedisCause(reply)| reply)
}

impl fmt::Display for RedisCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(error) = self;
        match (error.code(), error.detail()) {
            (Some(code), Some(detail)) => write!(f, "{code} {detail}")?,
            _ => error.fmt(f)?,
        }
        f.write_str(match (error.kind(), error.code()) {
            (ErrorKind::Server(ServerErrorKind::Moved), _) => {
                " (the server belongs to a cluster: write redis+cluster:// in the URL)"
            }
            (_, Some("NOAUTH")) => {
                " (put the password into the URL: write redis://:password@ or redis://user:password@)"
            }
            (ErrorKind::AuthenticationFailed, _) | (_, Some("WRONGPASS")) => {
                " (check the user and the password; a server without a password rejects one)"
            }
            _ => "",
        })
    }
}

impl Error for RedisCause {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        // The message of a `RedisError` includes its source, so the chain continues after the
        // source.
        self.0.source().and_then(Error::source)
    }
}

/// Returns the error without the quoted arguments.
pub(super) fn without_arguments(error: RedisError) -> RedisError {
    let Some(text) = error.detail() else { return error };
    let plain = redact(text);
    match (error.kind(), error.code()) {
        _ if plain == text => error,
        (kind @ ErrorKind::Server(_), _) => (kind, "the server refused", plain).into(),
        (ErrorKind::Extension, Some(code)) => make_extension_error(code.to_owned(), Some(plain)),
        _ => error,
    }
}

/// Removes a list of arguments from the end of the text, and replaces each word that contains a
/// brace by `(a key)`. Every key of this storage contains braces.
fn redact(text: &str) -> String {
    let text = text.split_once("with args").map_or(text, |(before, _)| before.trim_end_matches([' ', ',']));
    let words = text.split(' ').map(|word| if word.contains(['{', '}']) { "(a key)" } else { word });
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use redis::{ServerErrorKind, Value, parse_redis_value};

    use super::*;

    #[test]
    fn error_reply_of_a_proxy_may_have_counted() {
        let error = |reply: &str| {
            let reply = parse_redis_value(format!("-{reply}\r\n").as_bytes()).and_then(Value::extract_error);
            from_redis("it", reply.unwrap_err())
        };
        for reply in [
            "ERR Connection timed out",
            "ERR Broken pipe",
            "ERR unknown",
            "ERR Invalid argument",
            "upstream failure",
            "no upstream host",
        ] {
            let error = error(reply);
            assert!(error.kind() == StorageErrorKind::UnexpectedReply && error.may_have_counted(), "{error:#}");
        }
        for reply in ["ERR unknown command", "OOM command not allowed", "NOSCRIPT No script", "READONLY", "X1 no"] {
            let error = error(reply);
            assert!(error.kind() == StorageErrorKind::Refused && !error.may_have_counted(), "{error:#}");
        }
    }

    #[test]
    fn quoted_arguments_are_removed() {
        for (text, plain) in [
            (
                "unknown command 'EVALSHA', with args beginning with: 'ab' '1' 'rl:{p|t:k}' ",
                "unknown command 'EVALSHA'",
            ),
            ("unknown command `EVALSHA`, with args beginning with: `ab`, `1`, `rl:{p|", "unknown command `EVALSHA`"),
            (
                "User app has no permissions to access the 'rl:{p|t:k}' key",
                "User app has no permissions to access the (a key) key",
            ),
            ("The user can't run this", "The user can't run this"),
        ] {
            assert_eq!(redact(text), plain);
            let error = without_arguments((ErrorKind::Server(ServerErrorKind::NoPerm), "", text.to_owned()).into());
            assert_eq!((error.detail(), error.code()), (Some(plain), Some("NOPERM")));
            let error = without_arguments(make_extension_error("DENIED".to_owned(), Some(text.to_owned())));
            assert_eq!((error.detail(), error.code()), (Some(plain), Some("DENIED")));
        }
    }
}
