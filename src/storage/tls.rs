//! TLS connections. The trusted certificates are loaded when the storage is created.

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
        /// Trusts only the certificates in the file `ca`, or without one the certificates of the
        /// system. `alpn` is the protocol to negotiate, for servers that need one.
        ///
        /// # Errors
        ///
        /// Returns a message if there is no certificate or the file cannot be read.
        pub(in crate::storage) fn new(ca: Option<&str>, alpn: Option<&[u8]>) -> Result<Self, String> {
            let mut roots = RootCertStore::empty();
            match ca {
                Some(path) => {
                    let failed = |error: &dyn fmt::Display| {
                        format!(
                            "cannot read certificates from {path:?}: {error}; write the path of a PEM file, ca=/path/to/ca.pem"
                        )
                    };
                    for certificate in CertificateDer::pem_file_iter(path).map_err(|error| failed(&error))? {
                        roots.add(certificate.map_err(|error| failed(&error))?).map_err(|error| failed(&error))?;
                    }
                }
                // Certificates of the system that cannot be parsed are skipped, as the rustls docs
                // recommend.
                None => drop(roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs)),
            }
            if roots.is_empty() {
                return Err(format!(
                    "no certificate in {}; write ca=/path/to/ca.pem",
                    ca.unwrap_or("the system's certificate store")
                ));
            }
            // Without an explicit provider, rustls panics if none is installed, or if crates enable
            // two of them.
            let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
                .with_safe_default_protocol_versions()
                .map_err(|error| error.to_string())?;
            let mut config = builder.with_root_certificates(roots).with_no_client_auth();
            config.alpn_protocols.extend(alpn.map(<[u8]>::to_vec));
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

    /// Cannot be created without TLS features: a URL that needs TLS is rejected.
    #[derive(Clone, Debug)]
    pub(in crate::storage) enum Tls {}

    impl Tls {
        pub(in crate::storage) fn new(_: Option<&str>, _: Option<&[u8]>) -> Result<Self, String> {
            Err("TLS needs the feature \"redis-rustls\" or \"etcd-rustls\" of tower-ratelimit".to_owned())
        }

        #[allow(clippy::unused_async, reason = "the same signature as with TLS")]
        pub(in crate::storage) async fn over(&self, _: TcpStream, _: &str) -> io::Result<TcpStream> {
            match *self {}
        }
    }
}
