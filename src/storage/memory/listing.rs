//! A page of the keys whose names are kept.

use super::inner::MemoryInner;
use super::kept_keys::Position;
use crate::key::Key;
use crate::policy::Op;
use crate::storage::keys::{cannot_list, is_in_use, unknown_page};
use crate::storage::{KeyPage, KeysRequest, StorageError, StorageErrorKind, StorageRequest, names};

/// Returns a page of keys.
pub(super) fn page(inner: &MemoryInner, request: &KeysRequest<'_>) -> Result<KeyPage, StorageError> {
    request.check()?;
    let Some(kept) = &inner.kept else {
        let message = "the memory storage keeps hashes of keys: build it by MemoryStorage::builder().keep_keys(true)";
        return Err(cannot_list().with_source(StorageError::new(StorageErrorKind::Unsupported, message)));
    };
    let after = request.after.map(|after| position(after).ok_or_else(unknown_page)).transpose()?;
    let policy = names::of_policy(request.policy);
    let (found, last) = kept.list(after, &format!("{policy}{}", request.prefix), request.limit());
    let seen = |key: Key| {
        let peek = inner.decide(&StorageRequest::new(request.policy, &key, Op::Peek, 1));
        is_in_use(&peek).then_some((key, peek))
    };
    let keys = found.iter().filter_map(|name| names::key(name.strip_prefix(&*policy)?)).filter_map(seen).collect();
    Ok(KeyPage::new(keys, last.map(|(number, (hash, rest))| format!("{number:x}-{hash:x}-{rest:x}"))))
}

fn position(text: &str) -> Option<Position> {
    let mut parts = text.split('-');
    let mut number = || u64::from_str_radix(parts.next()?, 16).ok();
    let position = (number()?.try_into().ok()?, (number()?, number()?.try_into().ok()?));
    parts.next().is_none().then_some(position)
}
