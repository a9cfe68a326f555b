//! A statement with its parameters.

use tokio_postgres::types::{ToSql, Type};

use super::table::Statement;

/// A statement to execute. It owns its parameters, because it outlives callers that leave.
#[derive(Debug)]
pub(super) struct Query {
    pub(super) statement: Statement,
    params: Vec<Param>,
}

#[derive(Debug)]
pub(super) enum Param {
    Text(String),
    Number(i64),
}

impl Query {
    pub(super) fn new<const N: usize>(statement: Statement, params: [Param; N]) -> Self {
        Self { statement, params: params.into() }
    }

    pub(super) fn params(&self) -> Vec<&(dyn ToSql + Sync)> {
        self.params.iter().map(Param::value).collect()
    }

    /// Returns the parameters with their types, for a statement that is not prepared.
    pub(super) fn typed_params(&self) -> Vec<(&(dyn ToSql + Sync), Type)> {
        self.params.iter().map(|param| (param.value(), param.kind())).collect()
    }
}

impl Param {
    fn value(&self) -> &(dyn ToSql + Sync) {
        match self {
            Self::Text(text) => text,
            Self::Number(number) => number,
        }
    }

    fn kind(&self) -> Type {
        match self {
            Self::Text(_) => Type::TEXT,
            Self::Number(_) => Type::INT8,
        }
    }
}

impl From<&str> for Param {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<i64> for Param {
    fn from(number: i64) -> Self {
        Self::Number(number)
    }
}
