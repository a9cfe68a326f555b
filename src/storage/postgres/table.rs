//! The table, and the statements on it.

use std::sync::Arc;

use tokio_postgres::types::{ToSql, Type};

use super::YES_OR_NO;
use crate::error::ConfigError;
use crate::storage::url::{Options, Wrong};

/// The default name of the table.
const TABLE: &str = "tower_ratelimit";

/// The SQL expression of the server's time, in microseconds since the epoch.
const NOW: &str = "(extract(epoch FROM clock_timestamp()) * 1000000)::int8";

/// The schema, the name and the kind (logged or unlogged) of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StatesTable {
    schema: Option<Arc<str>>,
    name: Arc<str>,
    unlogged: bool,
}

impl StatesTable {
    /// Reads the options `schema`, `table` and `unlogged`.
    pub(super) fn from_options(options: &mut Options<'_>, wrong: &Wrong<'_>) -> Result<Self, ConfigError> {
        let schema = options.take("schema").map(|schema| identifier(&schema, wrong)).transpose()?;
        let name = options.take("table").map_or_else(|| Ok(TABLE.into()), |name| identifier(&name, wrong))?;
        Ok(Self { schema, name, unlogged: options.choice("unlogged", false, &YES_OR_NO)? })
    }

    /// Returns the quoted name for a statement, with the schema if it is set.
    fn quoted(&self) -> String {
        let schema = self.schema.as_ref().map(|schema| format!("\"{schema}\".")).unwrap_or_default();
        format!("{schema}\"{}\"", self.name)
    }

    /// Returns the statement that creates the table.
    ///
    /// - Only `key` has an index, so an update changes no index (HOT). Half of each page is kept
    ///   free for new versions of its rows.
    /// - The order of `key` is that of its bytes, for `Statement::DeleteAll`.
    pub(super) fn definition(&self) -> String {
        let unlogged = if self.unlogged { "UNLOGGED " } else { "" };
        format!(
            "CREATE {unlogged}TABLE IF NOT EXISTS {} (\n    key text COLLATE \"C\" PRIMARY KEY,\n    \
             state text NOT NULL,\n    expires_at timestamptz NOT NULL\n\
             ) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);\n",
            self.quoted()
        )
    }

    /// Returns the statements of `migrate`, which run as one transaction. The first one takes a
    /// lock, so that other processes wait: `IF NOT EXISTS` alone fails if two processes create the
    /// table at the same time.
    pub(super) fn migration(&self) -> String {
        let schema = self.schema.as_ref().map(|schema| {
            // CREATE SCHEMA IF NOT EXISTS needs the right to create one even if it exists.
            format!(
                "DO $$ BEGIN IF to_regnamespace('\"{schema}\"') IS NULL THEN CREATE SCHEMA \"{schema}\"; END IF; END $$;\n"
            )
        });
        format!(
            "SELECT pg_advisory_xact_lock(hashtext('tower_ratelimit'));\n{}{}",
            schema.unwrap_or_default(),
            self.definition()
        )
    }

    /// Returns an SQL expression that is true if the table does not exist. It waits for no lock on
    /// the table.
    pub(super) fn is_missing(&self) -> String {
        format!("to_regclass('{}') IS NULL", self.quoted())
    }

    /// Returns the SQL of a statement.
    pub(super) fn sql(&self, statement: Statement) -> String {
        let table = self.quoted();
        let expires = |keep| format!("clock_timestamp() + {keep} * interval '1 microsecond'");
        // Loads the text as of the start of the statement, even if the statement changes it.
        let and_load =
            format!("SELECT (SELECT count(*) FROM written), (SELECT state FROM {table} WHERE key = $1), {NOW}");
        match statement {
            Statement::Load => format!("SELECT 0::int8, (SELECT state FROM {table} WHERE key = $1), {NOW}"),
            Statement::Insert => format!(
                "WITH written AS (INSERT INTO {table} AS written_to (key, state, expires_at) VALUES ($1, $2, {}) \
                 ON CONFLICT (key) DO UPDATE SET state = excluded.state, expires_at = excluded.expires_at \
                 WHERE written_to.state = '' RETURNING 1) {and_load}",
                expires("$3::int8")
            ),
            Statement::Update => format!(
                "WITH written AS (UPDATE {table} SET state = $2, expires_at = {} \
                 WHERE key = $1 AND state = $4 RETURNING 1) {and_load}",
                expires("$3::int8")
            ),
            Statement::Delete => {
                format!("WITH written AS (DELETE FROM {table} WHERE key = $1 AND state = $2 RETURNING 1) {and_load}")
            }
            Statement::LoadAll => format!(
                "SELECT 0::int8, ARRAY(SELECT coalesce((SELECT state FROM {table} WHERE key = name), '') \
                 FROM unnest($1::text[]) WITH ORDINALITY AS wanted (name, position) ORDER BY position), {NOW}"
            ),
            // First locks the rows that exist, in the order of their keys. Then adds those that do not,
            // in the same order, and waits only for statements that add rows, too. So hits have no
            // deadlock. With `clear_all` they can have one, which PostgreSQL ends. A statement cannot take back a row that it has added. So it adds the text only
            // if no other row is missing, and else adds empty texts, which the next swap replaces.
            Statement::SwapAll => format!(
                "WITH wanted AS MATERIALIZED (SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::int8[]) \
                 WITH ORDINALITY AS wanted (name, old, new, keep, position)), \
                 locked AS MATERIALIZED (SELECT key, state FROM {table} WHERE key = ANY ($1::text[]) \
                 ORDER BY key FOR NO KEY UPDATE), \
                 compared AS MATERIALIZED (SELECT wanted.*, coalesce(state, '') AS stored, \
                 key IS NULL AND new <> old AS is_missing FROM wanted LEFT JOIN locked ON key = name), \
                 counted AS MATERIALIZED (SELECT count(*) FILTER (WHERE is_missing) AS missing, \
                 bool_and(stored = old) AS is_current FROM compared), \
                 added AS (INSERT INTO {table} (key, state, expires_at) \
                 SELECT name, CASE WHEN missing = 1 THEN new ELSE '' END, {0} FROM compared, counted \
                 WHERE is_missing AND is_current ORDER BY name COLLATE \"C\" \
                 ON CONFLICT (key) DO NOTHING RETURNING 1), \
                 verdict AS MATERIALIZED (SELECT is_current AND missing < 2 \
                 AND missing = (SELECT count(*) FROM added) AS is_stored FROM counted), \
                 written AS (UPDATE {table} SET state = new, expires_at = {0} FROM compared \
                 WHERE key = ANY ($1::text[]) AND key = name AND new <> old AND NOT is_missing AND (SELECT is_stored FROM verdict) RETURNING 1) \
                 SELECT is_stored::int4::int8, (SELECT array_agg(stored ORDER BY position) FROM compared), {NOW} \
                 FROM verdict",
                expires("keep")
            ),
            // Changes the rows that no other statement holds, and adds those that do not exist, in the order of
            // their keys. It waits for no statement that changes a row, because it adds none that it sees. A
            // row that was added and changed since it began is the exception.
            Statement::SwapEach => format!(
                "WITH wanted AS MATERIALIZED (SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::int8[]) \
                 WITH ORDINALITY AS wanted (name, old, new, keep, position)), \
                 locked AS MATERIALIZED (SELECT key, state FROM {table} WHERE key = ANY ($1::text[]) \
                 FOR NO KEY UPDATE SKIP LOCKED), \
                 compared AS MATERIALIZED (SELECT wanted.*, key, state FROM wanted LEFT JOIN locked ON key = name), \
                 written AS (UPDATE {table} AS written_to SET state = new, expires_at = {0} FROM compared \
                 WHERE written_to.key = ANY ($1::text[]) AND written_to.key = name AND compared.state = old \
                 RETURNING name), \
                 added AS (INSERT INTO {table} (key, state, expires_at) \
                 SELECT name, new, {0} FROM compared WHERE key IS NULL AND old = '' \
                 AND (SELECT true FROM {table} AS seen WHERE seen.key = name) IS NULL ORDER BY name COLLATE \"C\" \
                 ON CONFLICT (key) DO NOTHING RETURNING key), \
                 stored AS (SELECT name FROM written UNION ALL SELECT key FROM added) \
                 SELECT 0::int8, array_agg(CASE WHEN stored.name IS NULL THEN coalesce(state, '') END \
                 ORDER BY position), {NOW} FROM compared LEFT JOIN stored ON stored.name = compared.name",
                expires("keep")
            ),
            Statement::List => format!(
                "SELECT 0::int8, ARRAY(SELECT key FROM {table} WHERE key >= $1 AND key > $2 AND key < $3 \
                 ORDER BY key LIMIT $4), {NOW}"
            ),
            Statement::Sweep => {
                let page = |offset| format!("('(' || $1::int8 % (SELECT pages FROM size) + {offset} || ',0)')::tid");
                let pages = format!("ctid >= {} AND ctid < {}", page("0::int8"), page("$2::int8"));
                // Reads pages of the table, without an index. Rows that other processes change
                // at the moment are skipped. Without the pages in the outer condition, the planner may
                // read the whole table to find the rows.
                format!(
                    "WITH size AS MATERIALIZED (SELECT greatest(pg_relation_size('{table}') / \
                     current_setting('block_size')::int8, 1) AS pages), \
                     deleted AS (DELETE FROM {table} WHERE {pages} AND ctid = ANY (ARRAY(SELECT ctid FROM {table} \
                     WHERE {pages} AND expires_at < clock_timestamp() FOR UPDATE SKIP LOCKED)) \
                     RETURNING 1) SELECT count(*), NULL::text, {NOW} FROM deleted"
                )
            }
            Statement::DeleteAll => format!(
                "WITH deleted AS (DELETE FROM {table} WHERE key = ANY (ARRAY(SELECT key FROM {table} \
                 WHERE key >= $1 AND key < $2 ORDER BY key FOR UPDATE)) RETURNING 1) \
                 SELECT count(*), NULL::text, {NOW} FROM deleted"
            ),
        }
    }
}

/// The statements. Each returns one row with three columns:
///
/// 1. the number of rows that were written or deleted, or 1 if [`SwapAll`](Self::SwapAll) has stored all
///    texts
/// 2. the text of the key before the statement, or `NULL` if there is none, or an array of the texts of
///    all keys, or of the keys themselves
/// 3. the server's time
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Statement {
    /// Loads the text of the key `$1`.
    Load,
    /// Stores the text `$2` of the key `$1` for `$3` microseconds, if the key does not exist. A row
    /// with an empty text counts as missing.
    Insert,
    /// Stores the text `$2` of the key `$1` for `$3` microseconds, if its text is still `$4`.
    Update,
    /// Deletes the key `$1` if its text is `$2`.
    Delete,
    /// Loads the texts of the keys `$1`. The text of a missing key is empty.
    LoadAll,
    /// Stores the texts `$3` of the keys `$1` for `$4` microseconds, if all of their texts are still
    /// `$2`. A row with an empty text counts as missing.
    SwapAll,
    /// Stores the texts `$3` of the keys `$1` for `$4` microseconds, each if its text is still `$2`. A
    /// row with an empty text counts as missing. Column 2 is an array with `NULL` for each text that was
    /// stored, and otherwise the text of the key. That is empty if the key is missing, and also if
    /// another statement holds its row.
    SwapEach,
    /// Deletes the expired rows of `$2` pages of the table. The first page is `$1` modulo the
    /// number of pages.
    Sweep,
    /// Lists up to `$4` keys from `$1` up to, but not including, `$3`, that are after `$2`.
    List,
    /// Deletes the keys from `$1` up to, but not including, `$2`.
    DeleteAll,
}

impl Statement {
    /// The number of statements.
    pub(super) const COUNT: usize = Self::DeleteAll as usize + 1;
}

/// Returns the name, or an error unless it is 1 to 63 of the characters a-z, 0-9 and _ and does not
/// begin with a digit.
fn identifier(name: &str, wrong: &Wrong<'_>) -> Result<Arc<str>, ConfigError> {
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    if (1..=63).contains(&name.len()) && name.chars().all(is_plain) && !name.starts_with(|c: char| c.is_ascii_digit()) {
        return Ok(name.into());
    }
    Err(wrong(format!(
        "invalid schema or table {name:?}: write 1 to 63 of the characters a-z, 0-9 and _, for example \"rate_limits\""
    )))
}

/// A statement to execute. It owns its parameters, because it outlives callers that leave.
#[derive(Debug)]
pub(super) struct Query {
    pub(super) statement: Statement,
    params: Vec<Param>,
}

/// A parameter and its type.
type Param = (Box<dyn ToSql + Send + Sync>, Type);

pub(super) fn text(text: &str) -> Param {
    (Box::new(text.to_owned()), Type::TEXT)
}

pub(super) fn number(number: i64) -> Param {
    (Box::new(number), Type::INT8)
}

pub(super) fn texts<'a>(texts: impl Iterator<Item = &'a str>) -> Param {
    (Box::new(texts.map(str::to_owned).collect::<Vec<_>>()), Type::TEXT_ARRAY)
}

pub(super) fn numbers(numbers: impl Iterator<Item = i64>) -> Param {
    (Box::new(numbers.collect::<Vec<_>>()), Type::INT8_ARRAY)
}

impl Query {
    pub(super) fn new<const N: usize>(statement: Statement, params: [Param; N]) -> Self {
        Self { statement, params: params.into() }
    }

    pub(super) fn params(&self) -> Vec<&(dyn ToSql + Sync)> {
        self.params.iter().map(|(value, _)| &**value as _).collect()
    }

    /// Returns the parameters with their types, for a statement that is not prepared.
    pub(super) fn typed_params(&self) -> Vec<(&(dyn ToSql + Sync), Type)> {
        self.params.iter().map(|(value, kind)| (&**value as _, kind.clone())).collect()
    }
}
