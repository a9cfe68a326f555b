use std::convert::Infallible;
use std::marker::PhantomData;
use std::task::{Context, Poll};

use http::Request;
use tower_service::Service;

use super::AfterWaiting;

/// The state of a lookup without the feature `lookup`. It has no values.
pub(super) struct Finding<S, B, R>(Infallible, PhantomData<(S, B, R)>);

impl<S: Service<Request<B>>, B, R> Finding<S, B, R> {
    pub(super) fn poll(&mut self, _: &mut Context<'_>) -> Poll<AfterWaiting<S, B, R>> {
        match self.0 {}
    }
}
