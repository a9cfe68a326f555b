//! A custom storage: a `SQLite` file that survives restarts and that the processes of a machine
//! share.
//!
//! `cargo run --example custom_storage -- alice` admits alice five times a day.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, TransactionBehavior, params};
use tower_ratelimit::storage::{Cas, CasStorage, Loaded, Swapped};
use tower_ratelimit::{BoxError, Key, Policy, RateLimiter, Timestamp};

/// A table of texts. Each write has a unique number, which is the version of its text.
#[derive(Clone, Debug)]
struct Sqlite(Arc<Mutex<Connection>>);

impl Sqlite {
    fn open(file: &Path) -> Result<Self, rusqlite::Error> {
        let connection = Connection::open(file)?;
        // Waits while another process writes.
        connection.busy_timeout(Duration::from_secs(1))?;
        // Faster than the default. A power failure loses only the last few counts.
        connection.pragma_update(None, "journal_mode", "wal")?;
        connection.pragma_update(None, "synchronous", "normal")?;
        connection.execute_batch(
            "CREATE TABLE IF NOT EXISTS states (key TEXT PRIMARY KEY, text TEXT, version INTEGER, gone_at INTEGER) WITHOUT ROWID;
             CREATE INDEX IF NOT EXISTS gone ON states (gone_at);
             CREATE TABLE IF NOT EXISTS writings (number INTEGER);
             INSERT INTO writings SELECT 0 WHERE NOT EXISTS (SELECT * FROM writings);",
        )?;
        Ok(Self(Arc::new(Mutex::new(connection))))
    }

    /// Runs `work` on a blocking thread, because `SQLite` blocks its caller.
    async fn with<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Connection) -> Result<T, rusqlite::Error> + Send + 'static,
    ) -> Result<T, BoxError> {
        let connection = Arc::clone(&self.0);
        let done =
            tokio::task::spawn_blocking(move || work(&mut connection.lock().unwrap_or_else(PoisonError::into_inner)));
        Ok(done.await??)
    }
}

impl CasStorage for Sqlite {
    type Error = BoxError;
    type Version = i64;

    async fn load(&self, key: &str) -> Result<Loaded<i64>, BoxError> {
        let key = key.to_owned();
        self.with(move |connection| load(connection, &key)).await
    }

    async fn swap(&self, key: &str, version: &i64, text: &str, keep: Duration) -> Result<Swapped<i64>, BoxError> {
        let (key, version, text) = (key.to_owned(), *version, text.to_owned());
        let now = i64::try_from(Timestamp::wall_clock().as_secs_ceil())?;
        let gone_at = now.saturating_add(i64::try_from(keep.as_secs() + 1)?);
        let swap = move |connection: &mut Connection| {
            // `Immediate`, so that no other connection writes between the comparison and the write.
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let current = load(&transaction, &key)?;
            if current.version != version {
                return Ok(Swapped::Lost(Some(current)));
            }
            transaction.execute("UPDATE writings SET number = number + 1", [])?;
            if text.is_empty() {
                transaction.execute("DELETE FROM states WHERE key = ?1", [&key])?;
            } else {
                let write = "INSERT OR REPLACE INTO states SELECT ?1, ?2, number, ?3 FROM writings";
                transaction.execute(write, params![key, text, gone_at])?;
            }
            // Each write removes a few expired texts, so the file does not grow.
            let sweep = "DELETE FROM states WHERE key IN (SELECT key FROM states WHERE gone_at < ?1 LIMIT 4)";
            transaction.execute(sweep, [now])?;
            transaction.commit()?;
            Ok(Swapped::Stored)
        };
        self.with(swap).await
    }
}

fn load(connection: &Connection, key: &str) -> Result<Loaded<i64>, rusqlite::Error> {
    let mut select = connection.prepare_cached("SELECT text, version FROM states WHERE key = ?1")?;
    let row = select.query_row([key], |row| Ok((row.get(0)?, row.get(1)?))).optional()?;
    let (text, version) = row.unwrap_or((String::new(), 0));
    Ok(Loaded { text, version, now: None })
}

fn limiter(file: &Path) -> Result<RateLimiter<Cas<Sqlite>>, BoxError> {
    let storage = Cas::new(Sqlite::open(file)?).deadline(Duration::from_secs(2));
    Ok(RateLimiter::with_storage("5/day".parse::<Policy>()?, storage))
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let client = std::env::args().nth(1).unwrap_or_else(|| "anonymous".to_owned());
    let decision = limiter(&std::env::temp_dir().join("limits.sqlite"))?.hit(&Key::from(&client)).await?;
    match decision.retry_after() {
        None => println!("{client} is admitted, {} left", decision.remaining()),
        Some(wait) => println!("{client} is refused, for {} minutes", wait.as_secs().div_ceil(60)),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use tower_ratelimit::storage::ManualClock;
    use tower_ratelimit::testing::{CasLaws, StorageLaws};

    use super::*;

    /// Opens a new database in memory, because the laws need hundreds of them.
    fn empty() -> Sqlite {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::SeqCst);
        Sqlite::open(Path::new(&format!("file:laws{number}?mode=memory&cache=shared"))).unwrap()
    }

    #[test]
    fn store_compares_and_swaps() {
        CasLaws::new(empty).check();
        // On a disk, with a second connection as in another process.
        let folder = std::env::temp_dir().join(format!("tower-ratelimit-sqlite-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (count, file) = (AtomicU32::new(0), folder.clone());
        CasLaws::new(move || {
            let number = count.fetch_add(1, Ordering::SeqCst);
            Sqlite::open(&file.join(number.to_string())).unwrap()
        })
        .second_handle(|store| Sqlite::open(Path::new(store.0.lock().unwrap().path().unwrap())).unwrap())
        .check();
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn storage_obeys_the_laws() {
        let over = |store, clock: ManualClock| Cas::new(store).deadline(Duration::from_secs(20)).clock(clock);
        StorageLaws::new(move |clock| over(empty(), clock))
            .second_handle(move |storage| over(storage.store().clone(), ManualClock::default()))
            .scripts(64)
            .check();
    }

    #[tokio::test]
    async fn counts_survive_a_restart_and_are_shared_by_two_handles() {
        let file = std::env::temp_dir().join(format!("tower-ratelimit-{}.sqlite", std::process::id()));
        let alice = Key::from("alice");
        let [first, second] = [(); 2].map(|()| limiter(&file).unwrap());
        assert_eq!(first.hit(&alice).await.unwrap().remaining(), 4);
        assert_eq!(second.hit(&alice).await.unwrap().remaining(), 3);
        drop((first, second));
        let again = limiter(&file).unwrap();
        assert_eq!(again.hit(&alice).await.unwrap().remaining(), 2);
        again.clear(&alice).await.unwrap();
        assert_eq!(again.peek(&alice).await.unwrap().remaining(), 5);
        for suffix in ["", "-wal", "-shm"] {
            let _ = std::fs::remove_file(format!("{}{suffix}", file.display()));
        }
    }
}
