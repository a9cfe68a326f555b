//! The common parts of the limit on a rate and of the limit on requests in flight: the state behind a
//! layer, its options and its service.

use std::ops::Deref;
use std::sync::Arc;

/// The state that all services of a layer share. Only the rejection knows the type of the responses.
pub(crate) struct Shared<T, R> {
    state: T,
    pub(crate) rejection: Arc<R>,
}

impl<T, R> Shared<T, R> {
    pub(crate) fn new(state: T, rejection: Arc<R>) -> Arc<Self> {
        Arc::new(Self { state, rejection })
    }
}

impl<T, R> Deref for Shared<T, R> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.state
    }
}

/// Defines the options that the layers have in common. `example` is a layer in the examples, and
/// `imports` names its parts.
macro_rules! common_options {
    ($layer:ident, $imports:literal, $example:literal) => {
        /// Requests that are not limited.
        impl<R> $layer<R> {
            /// Skips the requests for which `skip` returns `true`. A skipped request goes to the inner
            /// service. It is not counted and not reported to the observer, and its response gets no
            /// header fields.
            ///
            /// Each call of this method adds a condition. A request is skipped if at least one of them,
            /// or an [allow list](Self::allow_list), selects it. Defaults to none.
            ///
            /// ```
            /// use http::Method;
            #[doc = concat!("use tower_ratelimit::{", $imports, "};")]
            ///
            #[doc = concat!("let layer = ", $example)]
            ///     .skip(|head| head.uri().path() == "/health" || head.method == Method::OPTIONS);
            /// ```
            pub fn skip<F>(self, skip: F) -> Self
            where
                F: Fn(&Head<'_>) -> bool + Send + Sync + 'static,
            {
                self.with_config(|config| config.skip.push(Arc::new(skip)))
            }

            /// Skips the requests of the clients in `list`, like [`skip`](Self::skip). Each call of this
            /// method adds a list. Defaults to none.
            ///
            /// ```
            /// use tower_ratelimit::extract::AllowList;
            #[doc = concat!("use tower_ratelimit::{", $imports, "};")]
            ///
            #[doc = concat!("let layer = ", $example)]
            ///     .allow_list(AllowList::new(PeerIp::new()).except("10.9.0.0/16").allow("10.0.0.0/8"));
            /// ```
            pub fn allow_list(self, list: AllowList) -> Self {
                self.with_config(|config| config.allow_lists.push(list))
            }
        }

        /// Responses and observation.
        impl<R> $layer<R> {
            /// Sets a closure as the [`Rejection`](crate::Rejection), which builds the response to
            /// each request that the layer does not forward. [`RejectReason`](crate::RejectReason)
            /// lists the reasons. The closure has to set the status. The layer then adds its header
            /// fields.
            ///
            /// ```
            /// use http::Response;
            #[doc = concat!("use tower_ratelimit::{", $imports, "};")]
            ///
            #[doc = concat!("let layer = ", $example, ".rejection_by(|refused, head| {")]
            ///     let mut response = Response::new(format!("not now: {}", head.uri().path()));
            ///     *response.status_mut() = refused.status();
            ///     response
            /// });
            /// ```
            pub fn rejection_by<F, B>(self, reject: F) -> $layer<F>
            where
                F: Fn(RejectReason<'_>, &Head<'_>) -> Response<B> + Send + Sync + 'static,
            {
                self.rejection(reject)
            }

            /// Sets the header fields that report the limit. Defaults to [`Headers::x_rate_limit`].
            /// [`Headers::and`] combines several families of fields.
            ///
            /// If a response has the fields of several layers, `X-RateLimit-*` and those of draft 6
            /// report the limit with the fewest remaining units. A limit on the rate takes
            /// precedence over one on the requests in flight. The [IETF fields](Headers::draft11)
            /// list all limits.
            pub fn headers(self, headers: Headers) -> Self {
                self.with_config(|config| config.headers = headers)
            }

            /// Sets the observer, which receives every [`Event`](crate::Event) of this layer, such
            /// as decisions, failures of the storage or of a lookup, missing keys and settlements.
            /// Defaults to none.
            ///
            /// The middleware calls the observer while it handles a request, so the observer must not
            /// block. `metrics_observer` (feature `metrics`) returns one that counts the events. The
            /// observer replaces an earlier one.
            ///
            /// If a handler panics, the middleware settles its request and reports the events while the
            /// thread unwinds. A panic of the observer is then caught, because it would abort the process.
            ///
            /// ```
            /// use std::sync::Arc;
            /// use std::sync::atomic::{AtomicU64, Ordering};
            #[doc = concat!("use tower_ratelimit::{", $imports, "};")]
            ///
            /// let refused = Arc::new(AtomicU64::new(0));
            /// let counter = Arc::clone(&refused);
            #[doc = concat!("let layer = ", $example, ".observer(move |event| {")]
            ///     if event.outcome() == "refused" {
            ///         counter.fetch_add(1, Ordering::Relaxed);
            ///     }
            /// });
            /// ```
            pub fn observer<F>(self, observer: F) -> Self
            where
                F: Fn(&Event<'_>) + Send + Sync + 'static,
            {
                self.with_config(|config| config.reporter.observer = Some(Arc::new(observer)))
            }

            /// Sets a closure that receives each [`Lint`](crate::Lint), a probable mistake in the
            /// layer's configuration. The closure is called at most once for each layer and lint.
            /// Defaults to none.
            ///
            /// ```
            #[doc = concat!("use tower_ratelimit::{", $imports, "};")]
            ///
            #[doc = concat!("let layer = ", $example)]
            ///     .on_lint(|lint| eprintln!("{}: {lint}", lint.code()));
            /// ```
            pub fn on_lint<F>(self, on_lint: F) -> Self
            where
                F: Fn(Lint) + Send + Sync + 'static,
            {
                self.with_config(|config| config.reporter.on_lint = Some(Arc::new(on_lint)))
            }

            /// Adds the keys of clients to log events (feature `tracing`). Defaults to off, because keys
            /// can be addresses or secrets.
            ///
            /// A key is written as its [bytes](crate::Key::as_bytes): one byte for its kind, then its
            /// content. The text `alice` is written as `talice`, and the address 127.0.0.1 as
            /// `4\x7f\x00\x00\x01`. Quotes, backslashes and bytes that are not printable ASCII are escaped.
            /// A key is cut off after 256 bytes.
            pub fn log_keys(self) -> Self {
                self.with_config(|config| config.reporter.logs_keys = true)
            }
        }

        impl<R> Clone for $layer<R> {
            fn clone(&self) -> Self {
                Self { shared: Arc::clone(&self.shared) }
            }
        }
    };
}
pub(crate) use common_options;

/// Defines how a service is created by its layer, and the access to its inner service.
macro_rules! inner_service {
    ($service:ident, $state:ty) => {
        impl<S, R> $service<S, R> {
            pub(crate) fn new(inner: S, shared: Arc<Shared<$state, R>>) -> Self {
                Self { inner, shared }
            }

            /// Returns a reference to the inner service.
            pub fn get_ref(&self) -> &S {
                &self.inner
            }

            /// Returns a mutable reference to the inner service. Calls made to it directly are not limited.
            pub fn get_mut(&mut self) -> &mut S {
                &mut self.inner
            }

            /// Returns the inner service.
            pub fn into_inner(self) -> S {
                self.inner
            }
        }

        impl<S: Clone, R> Clone for $service<S, R> {
            fn clone(&self) -> Self {
                Self { inner: self.inner.clone(), shared: Arc::clone(&self.shared) }
            }
        }
    };
}
pub(crate) use inner_service;
