//! Parses `sqlite:path?option=value`.

use std::path::PathBuf;
use std::time::Duration;

use super::Durability;
use crate::error::ConfigError;
use crate::storage::url::{Options, decoded};

const EXAMPLES: &str = "write sqlite:limits.db or sqlite:/var/lib/app/limits.db";

/// The settings of a URL.
#[derive(Debug)]
pub(super) struct SqliteUrl {
    pub(super) path: PathBuf,
    pub(super) prefix: Box<str>,
    pub(super) deadline: Duration,
    pub(super) durability: Durability,
}

impl SqliteUrl {
    pub(super) fn parse(url: &str) -> Result<Self, ConfigError> {
        let (before, query) = url.split_once('?').unwrap_or((url, ""));
        let wrong = |why: String| ConfigError::new(format!("cannot read the URL {before:?}: {why}"));
        let Some(path) = before.strip_prefix("sqlite:") else { return Err(wrong(EXAMPLES.to_owned())) };
        let path = decoded(path.strip_prefix("//").unwrap_or(path));
        let path = path.map_err(|why| wrong(why.to_owned()))?;
        checked(&path).map_err(wrong)?;
        let mut options = Options::parse(query, &wrong)?;
        let (prefix, deadline) = (options.prefix()?, options.timeout()?);
        let durability = options.choice(
            "durability",
            Durability::EverySecond,
            &[("every-second", Durability::EverySecond), ("every-commit", Durability::EveryCommit)],
        )?;
        options.end()?;
        Ok(Self { path: path.into(), prefix, deadline, durability })
    }
}

/// Returns an error message for the two paths that SQLite does not treat as the name of a file.
pub(super) fn checked(path: &str) -> Result<(), String> {
    match path {
        "" => Err(format!("the path is missing: {EXAMPLES}")),
        ":memory:" => Err("a database in memory is not shared and is not kept: use memory://".to_owned()),
        _ => Ok(()),
    }
}
