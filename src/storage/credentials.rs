//! The login of a connection: fixed by the URL, or returned by a provider for each connection.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use super::url::Login;
use crate::error::BoxError;

/// A user and a password for a server. A provider returns them for each new connection: see
/// `RedisStorage::credentials` and `EtcdStorage::credentials`.
///
/// `Debug` hides the password.
#[derive(Clone, Debug)]
pub struct Credentials(Login);

impl Credentials {
    /// Creates credentials. For a Redis server that has only a password (`requirepass`), `user` is
    /// `default`.
    pub fn new(user: impl Into<String>, password: impl Into<String>) -> Self {
        Self(Login { user: Some(user.into()), password: Some(password.into()) })
    }
}

type ProviderFuture = Pin<Box<dyn Future<Output = Result<Credentials, BoxError>> + Send>>;

/// The source of the login for each new connection. `Debug` hides passwords.
#[derive(Clone)]
pub(super) enum LoginSource {
    Fixed(Login),
    Provider(Arc<dyn Fn() -> ProviderFuture + Send + Sync>),
}

impl LoginSource {
    pub(super) fn provider<F, Fut>(provider: F) -> Self
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Credentials, BoxError>> + Send + 'static,
    {
        Self::Provider(Arc::new(move || Box::pin(provider())))
    }

    /// Returns the login for a new connection.
    ///
    /// # Errors
    ///
    /// Returns an error if the provider fails.
    pub(super) async fn get(&self) -> Result<Login, BoxError> {
        match self {
            Self::Fixed(login) => Ok(login.clone()),
            Self::Provider(provider) => {
                let provided = provider().await;
                provided.map(|Credentials(login)| login).map_err(|error| ProviderError(error).into())
            }
        }
    }
}

impl Default for LoginSource {
    fn default() -> Self {
        Self::Fixed(Login::default())
    }
}

impl fmt::Debug for LoginSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(login) => login.fmt(f),
            Self::Provider(_) => f.write_str("Provider"),
        }
    }
}

/// The error of a credentials provider.
#[derive(Debug)]
struct ProviderError(BoxError);

impl fmt::Display for ProviderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the credentials provider failed")
    }
}

impl std::error::Error for ProviderError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&*self.0)
    }
}
