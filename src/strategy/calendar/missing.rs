//! Replaces time zones without the feature `calendar`.

use std::ops::Range;

use super::{Start, Unit, UnknownZone};
use crate::time::Timestamp;

/// A time zone, which does not exist without the feature.
#[derive(Clone, Debug)]
pub(in super::super) enum Zone {}

impl Zone {
    /// Returns `None` for UTC, and an error for any other name.
    pub(in super::super) fn find(name: &str) -> Result<Option<Self>, UnknownZone> {
        if name.eq_ignore_ascii_case("UTC") {
            return Ok(None);
        }
        let why = "time zones need the feature `calendar` of tower-ratelimit: enable it in Cargo.toml, or use UTC";
        Err(UnknownZone { why, nearest: None })
    }

    pub(in super::super) fn name(&self) -> &str {
        match *self {}
    }

    /// Returns `None`, because only days and weeks of UTC need no date library.
    pub(super) fn window(_: Option<&Self>, _: Unit, _: Option<Start>, _: Timestamp) -> Option<Range<Timestamp>> {
        None
    }
}
