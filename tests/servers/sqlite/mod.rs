//! SQLite: decisions on files that several handles share, and files that cannot be used.

mod creation;
mod decisions;
mod faults;
mod files;
mod full_disk;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tower_ratelimit::storage::SqliteStorage;

/// A timeout that only a hanging test reaches.
const LONG: Duration = Duration::from_secs(60);

/// A folder that is removed when this is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("tower-ratelimit-sqlite-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    fn file(&self) -> PathBuf {
        self.0.join("limits.db")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A storage with a long timeout.
fn open(path: &Path) -> SqliteStorage {
    open_with(path, &format!("timeout={LONG:?}"))
}

fn open_with(path: &Path, options: &str) -> SqliteStorage {
    SqliteStorage::new(&format!("sqlite:{}?{options}", path.display())).unwrap_or_else(|error| panic!("{error}"))
}
