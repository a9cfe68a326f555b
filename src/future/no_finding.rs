use std::convert::Infallible;
use std::marker::PhantomData;
use std::task::{Context, Poll};

use http::Request;
use tower_service::Service;

use super::AfterWaiting;
use crate::Storage;

/// The state of a look-up without the feature `lookup`. It has no values.
pub(super) struct Finding<S, B, St, R>(Infallible, PhantomData<(S, B, St, R)>);

impl<S: Service<Request<B>>, B, St: Storage, R> Finding<S, B, St, R> {
    pub(super) fn poll(&mut self, _: &mut Context<'_>) -> Poll<AfterWaiting<S, B, St, R>> {
        match self.0 {}
    }
}
