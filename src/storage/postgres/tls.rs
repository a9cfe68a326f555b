//! The options of a URL for TLS.

use crate::ConfigError;
use crate::storage::tls::Tls;
use crate::storage::url::{Options, Wrong};

/// The options of libpq for files, and ours.
const LIBPQ: [(&str, &str); 3] = [("sslrootcert", "ca"), ("sslcert", "cert"), ("sslkey", "key")];

/// The options that have no effect without TLS.
const NEED_TLS: [&str; 4] = ["ca", "cert", "key", "sslnegotiation"];

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
