//! Configuration types as strings, for serde.

use std::borrow::Cow;

use serde_core::de::{Deserialize, Deserializer, Error as _};
use serde_core::ser::{Error as _, Serialize, Serializer};

use crate::headers::Headers;
use crate::middleware::OnError;
use crate::policy::Policy;
use crate::quota::Quota;
use crate::storage::StorageUrl;

/// Implements `Deserialize` with `FromStr`. Returns the error of the parser for an invalid text.
macro_rules! deserialize_by_parsing {
    ($($type:ty),*) => {$(
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                Cow::<'de, str>::deserialize(deserializer)?.parse().map_err(D::Error::custom)
            }
        }
    )*};
}

deserialize_by_parsing!(Quota, Policy, Headers, OnError, StorageUrl);

/// Implements `Serialize` with the text of the value, if it parses to an equal value.
macro_rules! serialize_as_text {
    ($($(#[$doc:meta])* $type:ty;)*) => {$(
        $(#[$doc])*
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let text = self.to_string();
                if text.parse().is_ok_and(|read: Self| read == *self) {
                    return serializer.serialize_str(&text);
                }
                Err(S::Error::custom(format!("cannot write {text:?} as text: parsing the text returns another value")))
            }
        }
    )*};
}

serialize_as_text! {
    /// Writes the text of the quota. Fails if the text form does not support the quota, for example
    /// a period that is not in whole milliseconds.
    Quota;
    /// Writes the text of the policy. Fails if the text form does not support the policy, for
    /// example a custom strategy.
    Policy;
    /// Writes the text of the fields, such as `x, draft11`. Fails if there is a partition key,
    /// because its secret must not appear in a text.
    Headers;
    OnError;
}

/// Writes the whole URL, including its password.
impl Serialize for StorageUrl {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}
