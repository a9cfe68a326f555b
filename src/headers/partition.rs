//! The parameter `pk` of the IETF fields.

use crate::key::Key;

/// The secret of `Headers::partition_key`.
#[cfg(feature = "partition-key")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Secret(pub(super) [u8; 16]);

/// An uninhabited type, because no secret can be set without the feature.
#[cfg(not(feature = "partition-key"))]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Secret {}

impl Secret {
    /// Returns the parameter for `key`, starting with a semicolon. Its value is a pseudo-random
    /// function of the key. It is the same on every machine and cannot be computed without the
    /// secret.
    #[cfg(feature = "partition-key")]
    pub(super) fn parameter(self, key: &Key) -> String {
        use std::hash::Hasher;

        use base64::Engine;
        use base64::engine::general_purpose::STANDARD;
        use siphasher::sip128::{Hasher128, SipHasher24};

        let mut hasher = SipHasher24::new_with_key(&self.0);
        hasher.write(key.as_bytes());
        format!(";pk=:{}:", STANDARD.encode(hasher.finish128().as_bytes()))
    }

    #[cfg(not(feature = "partition-key"))]
    pub(super) fn parameter(self, _key: &Key) -> String {
        match self {}
    }
}
