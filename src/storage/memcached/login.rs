//! The first exchange on a connection: checks that the server replies, and logs in.
//!
//! A server without logins would store the user and the password as an item that every client can
//! read. So they are sent only to a server that has asked for them.

use std::io::{self, ErrorKind};

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader};

use super::meta;
use crate::error::ConfigError;
use crate::storage::StorageError;
use crate::storage::tls::Tls;
use crate::storage::url::{Login, Wrong};

/// A request without effect. A server that expects TLS rejects it, but would wait for a fifth byte
/// of [`NOOP`](super::meta::NOOP). A second request before the reply would not help, because
/// memcached does not reply to it before the login.
const HELLO: &[u8] = b"version\r\n";

/// The reply to every request before the login.
const LOGIN_REQUIRED: &str = "CLIENT_ERROR unauthenticated";

/// The login and TLS settings of a connection.
#[derive(Clone, Debug, Default)]
pub(super) struct MemcachedAccess {
    /// A user and a password, or neither.
    pub(super) login: Login,
    pub(super) tls: Option<Tls>,
}

/// Returns an error if the login of a URL cannot be sent. The error does not quote it.
pub(super) fn check(login: &Login, wrong: &Wrong<'_>) -> Result<(), ConfigError> {
    if login.password.is_some() && login.user.is_none() {
        return Err(wrong("the password has no user: write user:password@".to_owned()));
    }
    let is_split = |part: &Option<String>| {
        part.as_ref().is_some_and(|part| part.contains(|c: char| c.is_ascii_whitespace() || c.is_control()))
    };
    if is_split(&login.user) || is_split(&login.password) {
        return Err(wrong(
            "memcached separates user and password by a space; choose ones without spaces and control characters"
                .to_owned(),
        ));
    }
    Ok(())
}

impl MemcachedAccess {
    /// Waits for a reply of `server` on `stream`, and logs in if the URL contains a login.
    ///
    /// # Errors
    ///
    /// Returns an error if the server does not reply, if it is not memcached, if it rejects the login
    /// or requires one, or if it has no logins.
    pub(super) async fn begin(
        &self,
        server: &str,
        stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    ) -> Result<(), StorageError> {
        let failed = |error| StorageError::unreachable(server, self.explained(&error));
        let cannot_log_in = |why: &str| Err(StorageError::cannot_log_in(server, why));
        let mut stream = BufReader::new(stream);
        send(&mut stream, HELLO).await.map_err(failed)?;
        let line = meta::read_line(&mut stream).await.map_err(failed)?;
        let reply = meta::text_of(&line).map_err(failed)?;
        let is_open = match reply.split(' ').next() {
            // Some proxies do not know the request.
            Some("VERSION") => true,
            _ if reply == "ERROR" => true,
            _ if reply == LOGIN_REQUIRED => false,
            Some("ERROR" | "CLIENT_ERROR" | "SERVER_ERROR") => {
                return Err(StorageError::unreachable(
                    server,
                    format!("unexpected reply {reply:?} to a new connection"),
                ));
            }
            _ => return Err(failed(meta::invalid_reply())),
        };
        match (is_open, &self.login) {
            (true, Login { password: None, .. }) => Ok(()),
            (true, _) => cannot_log_in(
                "the server has no logins (leave out the text before @ in the URL, or start the server with -Y)",
            ),
            (false, Login { user: Some(user), password: Some(password) }) => {
                send(&mut stream, &command(user, password)).await.map_err(failed)?;
                // Other replies are not shown, because they may quote the password.
                match meta::read_line(&mut stream).await.map_err(failed)?.as_slice() {
                    b"STORED\r\n" => Ok(()),
                    line if line.starts_with(b"CLIENT_ERROR") => cannot_log_in(
                        "the server rejects the user or the password (check both in the URL and in the file of -Y)",
                    ),
                    _ => Err(StorageError::unreachable(server, "unexpected reply to the login")),
                }
            }
            (false, _) => {
                cannot_log_in("the server requires a login (put it into the URL: write user:password@ before the host)")
            }
        }
    }

    /// Adds the probable cause to the error of a server that closes a new connection without a reply.
    fn explained(&self, error: &io::Error) -> String {
        use ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
        let is_closed = matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof);
        if is_closed && self.tls.is_none() {
            return format!("{error}; if this port speaks TLS, write memcacheds:// instead of memcached://");
        }
        error.to_string()
    }
}

/// Returns the request to log in. A server ignores the key.
fn command(user: &str, password: &str) -> Vec<u8> {
    let size = user.len() + 1 + password.len();
    format!("set auth 0 0 {size}\r\n{user} {password}\r\n").into_bytes()
}

async fn send(stream: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> io::Result<()> {
    stream.write_all(bytes).await?;
    stream.flush().await
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, DuplexStream, duplex};

    use super::*;

    fn access() -> MemcachedAccess {
        let login = Login { user: Some("app".to_owned()), password: Some("secret".to_owned()) };
        MemcachedAccess { login, tls: None }
    }

    async fn expect(server: &mut DuplexStream, request: &[u8]) {
        let mut bytes = vec![0; request.len()];
        server.read_exact(&mut bytes).await.unwrap();
        assert_eq!(bytes, request);
    }

    #[tokio::test]
    async fn password_is_sent_only_if_the_server_requires_a_login() {
        let (mut here, mut there) = duplex(1_024);
        let server = async {
            expect(&mut there, HELLO).await;
            there.write_all(b"VERSION 1.6.18\r\n").await.unwrap();
        };
        let access = access();
        let (result, ()) = tokio::join!(access.begin("it", &mut here), server);
        assert!(result.unwrap_err().to_string().starts_with("cannot log in to it"));
        drop(here);
        let mut rest = Vec::new();
        there.read_to_end(&mut rest).await.unwrap();
        assert_eq!(rest, b"", "nothing else was sent");
    }

    #[tokio::test]
    async fn error_does_not_quote_a_reply_to_the_login() {
        for reply in ["ERROR app secret\r\n", "CLIENT_ERROR app secret\r\n"] {
            let (mut here, mut there) = duplex(1_024);
            let server = async {
                expect(&mut there, HELLO).await;
                there.write_all(format!("{LOGIN_REQUIRED}\r\n").as_bytes()).await.unwrap();
                expect(&mut there, b"set auth 0 0 10\r\napp secret\r\n").await;
                there.write_all(reply.as_bytes()).await.unwrap();
            };
            let access = access();
            let (result, ()) = tokio::join!(access.begin("it", &mut here), server);
            let error = result.unwrap_err();
            assert!(!format!("{error:#} {error:?} {access:?}").contains("secret"), "{error:#}");
        }
    }
}
