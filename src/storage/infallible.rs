use std::convert::Infallible;

use super::Storage;

/// A [`Storage`] that cannot fail, because its error is [`Infallible`]. Implemented for every such
/// storage, for example [`MemoryStorage`](crate::MemoryStorage).
///
/// [`RateLimitLayer::with_storage`](crate::RateLimitLayer::with_storage) requires it. For any other
/// storage, [`RateLimitLayer::storage`](crate::RateLimitLayer::storage) takes an
/// [`OnError`](crate::OnError).
#[diagnostic::on_unimplemented(
    message = "the storage `{Self}` can fail",
    label = "`with_storage` needs a storage that cannot fail, such as `MemoryStorage`",
    note = "choose an `OnError`: `RateLimitLayer::new(policy, key).storage(storage, OnError::Refuse)`"
)]
pub trait InfallibleStorage: Storage {}

#[diagnostic::do_not_recommend]
impl<S: Storage<Error = Infallible>> InfallibleStorage for S {}
