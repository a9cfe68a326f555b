//! Pages of keys, by `SCAN`.
//!
//! `SCAN` visits all keys of a server, also those of other programs, a few hundred at a time. The server
//! runs other commands in between. It can return a key twice, and finds each key that exists all the
//! time. The next page begins at its cursor, so a page ends only where a scan ends.

use std::collections::HashSet;

use tokio::time::Instant;

use super::script::Scripts;
use super::{RedisStorage, key_names};
use crate::key::Key;
use crate::policy::Policy;
use crate::storage::keys::unknown_page;
use crate::storage::listing::in_use;
use crate::storage::{KeyPage, StorageError};

/// The number of keys that one `SCAN` visits. It doubles while scans find no key of the policy.
const VISITED: std::ops::RangeInclusive<usize> = 10..=500;

/// The largest number of scans of a page.
const SCANS: u32 = 50;

/// The position of a scan: the cursor, and the name of the server.
struct Position {
    cursor: String,
    server: Option<String>,
}

impl Position {
    /// Parses `CURSOR@SERVER`.
    fn parse(text: Option<&str>) -> Result<Self, StorageError> {
        let Some(text) = text else { return Ok(Self { cursor: "0".to_owned(), server: None }) };
        let (cursor, server) = text.split_once('@').ok_or_else(unknown_page)?;
        let is_number = !cursor.is_empty() && cursor.bytes().all(|byte| byte.is_ascii_digit());
        if !is_number {
            return Err(unknown_page());
        }
        Ok(Self { cursor: cursor.to_owned(), server: Some(server.to_owned()) })
    }
}

/// Returns a page of keys. `prefix` is the beginning of their texts.
pub(super) async fn page(
    storage: &RedisStorage,
    policy: &Policy,
    prefix: &str,
    after: Option<&str>,
    limit: usize,
) -> Result<KeyPage, StorageError> {
    let Position { mut cursor, server } = Position::parse(after)?;
    let nodes = storage.link.nodes(Instant::now() + storage.timeout).await;
    let mut nodes = nodes.map_err(StorageError::uncounted)?;
    nodes.sort_by(|one, other| one.name().cmp(other.name()));
    // The keys of a server that has left the cluster may be on one that was listed before.
    if server.as_deref().is_some_and(|last| nodes.iter().all(|node| node.name() != last)) {
        return Err(unknown_page());
    }
    let mut nodes = nodes.into_iter().skip_while(|node| server.as_deref().is_some_and(|last| node.name() < last));
    let Some(mut node) = nodes.next() else { return Ok(KeyPage::default()) };
    let names = key_names::KeyNames::new(&storage.prefix, policy, Scripts::support(policy));
    let mut visited = limit.clamp(*VISITED.start(), *VISITED.end());
    let mut found = HashSet::new();
    let mut next = None;
    for _ in 0..SCANS {
        let scanned = storage.scan(&node, &cursor, &names.pattern, visited).await;
        let (scanned_to, keys) = scanned.map_err(StorageError::uncounted)?;
        let (keys, before) = (keys.iter().filter_map(|name| names.key(name)), found.len());
        found.extend(keys.filter(|key: &Key| key.to_string().starts_with(prefix)));
        if found.len() == before {
            visited = (2 * visited).min(*VISITED.end());
        }
        cursor = scanned_to;
        if cursor == "0" {
            let Some(other) = nodes.next() else {
                next = None;
                break;
            };
            node = other;
        }
        next = Some(format!("{cursor}@{}", node.name()));
        if found.len() >= limit {
            break;
        }
    }
    Ok(KeyPage::new(in_use(storage, policy, found.into_iter().collect()).await?, next))
}
