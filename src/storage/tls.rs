//! TLS: whom to trust, read when the storage is made.

#[cfg(any(feature = "redis-rustls", feature = "etcd-rustls"))]
pub(super) use self::enabled::Tls;
#[cfg(not(any(feature = "redis-rustls", feature = "etcd-rustls")))]
pub(super) use self::missing::Tls;

#[cfg(any(feature = "redis-rustls", feature = "etcd-rustls"))]
mod enabled {
    use std::fmt;
    use std::io;
    use std::sync::Arc;

    use tokio::net::TcpStream;
    use tokio_rustls::TlsConnector;
    use tokio_rustls::client::TlsStream;
    use tokio_rustls::rustls::crypto::ring;
    use tokio_rustls::rustls::pki_types::pem::PemObject;
    use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
    use tokio_rustls::rustls::{ClientConfig, RootCertStore};

    #[derive(Clone)]
    pub(in crate::storage) struct Tls(Arc<ClientConfig>);

    impl Tls {
        /// Trusts the certificates in the file `ca` and no others, or else the system's. `inside` is what is going to be
        /// spoken (ALPN), where a server wants to be told. The error is what is wrong.
        pub(in crate::storage) fn new(ca: Option<&str>, inside: Option<&[u8]>) -> Result<Self, String> {
            let mut roots = RootCertStore::empty();
            match ca {
                Some(path) => {
                    let why = |why: &dyn fmt::Display| {
                        format!(
                            "cannot read certificates from {path:?} ({why}): write the path of a PEM file, ca=/path/to/ca.pem"
                        )
                    };
                    for certificate in CertificateDer::pem_file_iter(path).map_err(|error| why(&error))? {
                        roots.add(certificate.map_err(|error| why(&error))?).map_err(|error| why(&error))?;
                    }
                }
                // As rustls advises: what it cannot read of the system's roots is left out.
                None => drop(roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs)),
            }
            if roots.is_empty() {
                return Err(format!(
                    "there is no certificate in {}: write ca=/path/to/ca.pem",
                    ca.unwrap_or("this system")
                ));
            }
            // The provider is named: rustls panics where none is installed, or where two crates' features bring two.
            let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
                .with_safe_default_protocol_versions()
                .map_err(|error| error.to_string())?;
            let mut config = builder.with_root_certificates(roots).with_no_client_auth();
            config.alpn_protocols.extend(inside.map(<[u8]>::to_vec));
            Ok(Self(Arc::new(config)))
        }

        pub(in crate::storage) async fn over(&self, stream: TcpStream, name: &str) -> io::Result<TlsStream<TcpStream>> {
            let name = ServerName::try_from(name.to_owned()).map_err(io::Error::other)?;
            TlsConnector::from(Arc::clone(&self.0)).connect(name, stream).await
        }
    }

    impl fmt::Debug for Tls {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("Tls")
        }
    }
}

#[cfg(not(any(feature = "redis-rustls", feature = "etcd-rustls")))]
mod missing {
    use std::io;

    use tokio::net::TcpStream;

    /// There is none: a URL that asks for it is refused.
    #[derive(Clone, Debug)]
    pub(in crate::storage) enum Tls {}

    impl Tls {
        pub(in crate::storage) fn new(_: Option<&str>, _: Option<&[u8]>) -> Result<Self, String> {
            Err("it needs a feature of tower-ratelimit whose name ends with \"-rustls\"".to_owned())
        }

        #[allow(clippy::unused_async, reason = "as with the feature")]
        pub(in crate::storage) async fn over(&self, _: TcpStream, _: &str) -> io::Result<TcpStream> {
            match *self {}
        }
    }
}
