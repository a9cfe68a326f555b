use super::{Head, KeyError, KeyExtractor};
use crate::key::Key;
use crate::lint::Lint;

/// An extractor that falls back to a second one if the first returns an error. Created by
/// [`KeyExtractor::or`].
///
/// If the first returns `None`, the request is not limited.
#[derive(Clone, Copy, Debug)]
pub struct Or<A, B> {
    first: A,
    second: B,
}

impl<A, B> Or<A, B> {
    pub(super) fn new(first: A, second: B) -> Self {
        Self { first, second }
    }
}

impl<A: KeyExtractor, B: KeyExtractor> KeyExtractor for Or<A, B> {
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, KeyError> {
        self.first.extract(head).or_else(|_| self.second.extract(head))
    }

    fn lints(&self, head: Option<&Head<'_>>) -> Vec<Lint> {
        [self.first.lints(head), self.second.lints(head)].concat()
    }

    fn reads_forwarding(&self) -> bool {
        self.first.reads_forwarding() || self.second.reads_forwarding()
    }
}

/// An extractor that joins the keys of two others. Created by [`KeyExtractor::and`].
///
/// If either of them returns an error, it returns this error, or the first one if both do.
/// Otherwise, if either of them returns `None`, the request is not limited.
#[derive(Clone, Copy, Debug)]
pub struct And<A, B> {
    first: A,
    second: B,
}

impl<A, B> And<A, B> {
    pub(super) fn new(first: A, second: B) -> Self {
        Self { first, second }
    }
}

impl<A: KeyExtractor, B: KeyExtractor> KeyExtractor for And<A, B> {
    fn extract(&self, head: &Head<'_>) -> Result<Option<Key>, KeyError> {
        let keys = (self.first.extract(head)?, self.second.extract(head)?);
        Ok(match keys {
            (Some(first), Some(second)) => Some(Key::join([&first, &second])),
            _ => None,
        })
    }

    fn lints(&self, head: Option<&Head<'_>>) -> Vec<Lint> {
        [self.first.lints(head), self.second.lints(head)].concat()
    }

    fn reads_forwarding(&self) -> bool {
        self.first.reads_forwarding() || self.second.reads_forwarding()
    }
}
