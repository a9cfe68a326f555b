//! The options of a URL for TLS, and the encryption of a connection.

#[cfg(feature = "postgres-rustls")]
use std::io;

#[cfg(feature = "postgres-rustls")]
use tokio_postgres::tls::MakeTlsConnect;
#[cfg(feature = "postgres-rustls")]
use tokio_postgres_rustls::MakeRustlsConnect;

#[cfg(feature = "postgres-rustls")]
use super::socket::Socket;
use crate::error::ConfigError;
use crate::storage::tls::Tls;
use crate::storage::url::{Options, Wrong};

/// The options of libpq for files, and ours.
const LIBPQ: [(&str, &str); 3] = [("sslrootcert", "ca"), ("sslcert", "cert"), ("sslkey", "key")];

/// The options that have no effect without TLS.
const NEED_TLS: [&str; 4] = ["ca", "cert", "key", "sslnegotiation"];

/// The encryption of a connection.
#[derive(Clone)]
pub(super) enum Security {
    None,
    /// TLS with a server of this name.
    #[cfg(feature = "postgres-rustls")]
    Tls(Tls, Box<str>),
}

/// Returns the TLS connector for a server of this name.
#[cfg(feature = "postgres-rustls")]
pub(super) fn connector(
    tls: &Tls,
    name: &str,
) -> io::Result<<MakeRustlsConnect as MakeTlsConnect<Socket>>::TlsConnect> {
    let connector = MakeTlsConnect::<Socket>::make_tls_connect(&mut MakeRustlsConnect::new(tls.rustls()), name);
    connector.map_err(io::Error::other)
}

/// Reads `sslmode` and the certificates. Returns `None` if connections have no TLS.
///
/// The mode `prefer` of `tokio-postgres` is rejected, because an attacker on the network can turn off
/// TLS in this mode.
pub(super) fn from_options(options: &mut Options<'_>, wrong: &Wrong<'_>) -> Result<Option<Tls>, ConfigError> {
    for (theirs, ours) in LIBPQ {
        if options.take(theirs).is_some() {
            return Err(wrong(format!("unknown option {theirs:?}: write {ours}=/path/to/{ours}.pem")));
        }
    }
    match options.take("sslmode").as_deref() {
        None | Some("disable") => match NEED_TLS.into_iter().find(|name| options.take(name).is_some()) {
            Some(name) => Err(wrong(format!("{name} needs TLS: add sslmode=require"))),
            None => Ok(None),
        },
        Some("require" | "verify-full") if !cfg!(feature = "postgres-rustls") => {
            Err(wrong("TLS needs the feature \"postgres-rustls\" of tower-ratelimit".to_owned()))
        }
        Some("require" | "verify-full") => Tls::from_options(options, Some(b"postgresql"), wrong).map(Some),
        Some(other) => {
            Err(wrong(format!("invalid sslmode {other:?}; write sslmode=require for TLS, or sslmode=disable")))
        }
    }
}
