//! Creates files that only their owner can read, because the keys in them may be secrets.

#[cfg(unix)]
pub(super) use self::unix::create;

/// Does nothing: SQLite creates the file with the permissions of its directory.
#[cfg(not(unix))]
pub(super) fn create(_: &std::path::Path) {}

#[cfg(unix)]
mod unix {
    use std::fs::{OpenOptions, read_link};
    use std::io::ErrorKind;
    use std::os::unix::fs::OpenOptionsExt;
    use std::path::Path;
    use std::sync::Mutex;

    /// The maximum number of symbolic links to follow, as on Linux.
    const MAX_LINKS: usize = 40;

    /// Creates the file with mode 600 unless it exists. SQLite gives `-wal` and `-shm` the same
    /// mode. Errors are ignored, because SQLite reports them when it opens the file.
    pub(in super::super) fn create(path: &Path) {
        // A process that closes a file loses all locks that it has on it. So no other thread may
        // open the file before it is closed here. A file that exists is not opened.
        static CREATING: Mutex<()> = Mutex::new(());
        let _creating = crate::sync::unpoisoned(CREATING.lock());
        let mut path = path.to_owned();
        for _ in 0..MAX_LINKS {
            match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                _ => return,
            }
            // The path may be a symbolic link to a file that does not exist.
            match (read_link(&path), path.parent()) {
                (Ok(target), Some(folder)) => path = folder.join(target),
                _ => return,
            }
        }
    }
}
