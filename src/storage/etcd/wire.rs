//! The messages of etcd's v3 protocol that are needed, and of each the fields that are: what is not named here is skipped when it
//! is read. Numbers and types are those of `rpc.proto` and `kv.proto` in etcd's `api` folder.

use std::fmt;

use prost::{Message, Oneof};

/// What can be asked.
pub(super) trait Call: Message + Clone + 'static {
    const PATH: &'static str;
    /// Whether it may be executed twice without counting anything twice.
    const REPEATABLE: bool;
    type Answer: Message + Default + 'static;
}

impl Call for Range {
    const PATH: &'static str = "/etcdserverpb.KV/Range";
    const REPEATABLE: bool = true;
    type Answer = RangeAnswer;
}

/// A second deletion changes nothing.
impl Call for DeleteRange {
    const PATH: &'static str = "/etcdserverpb.KV/DeleteRange";
    const REPEATABLE: bool = true;
    type Answer = DeletedRange;
}

impl Call for Txn {
    const PATH: &'static str = "/etcdserverpb.KV/Txn";
    const REPEATABLE: bool = false;
    type Answer = TxnAnswer;
}

/// A lease that nobody uses only expires.
impl Call for LeaseGrant {
    const PATH: &'static str = "/etcdserverpb.Lease/LeaseGrant";
    const REPEATABLE: bool = true;
    type Answer = LeaseGranted;
}

impl Call for Authenticate {
    const PATH: &'static str = "/etcdserverpb.Auth/Authenticate";
    const REPEATABLE: bool = true;
    type Answer = Authenticated;
}

impl Call for Status {
    const PATH: &'static str = "/etcdserverpb.Maintenance/Status";
    const REPEATABLE: bool = true;
    type Answer = Nothing;
}

/// Reads one key.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Range {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RangeAnswer {
    #[prost(message, repeated, tag = "2")]
    pub(super) found: Vec<KeyValue>,
}

/// Deletes all keys from `key` up to, and without, `end`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct DeleteRange {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) end: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct DeletedRange {
    #[prost(int64, tag = "2")]
    pub(super) deleted: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct KeyValue {
    /// The revision of the last change: no other writing has the same.
    #[prost(int64, tag = "3")]
    pub(super) mod_revision: i64,
    #[prost(bytes = "vec", tag = "5")]
    pub(super) value: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Put {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) value: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(super) lease: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Delete {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
}

/// When everything compared is so, `then`, else `otherwise`: in one step.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Txn {
    #[prost(message, repeated, tag = "1")]
    pub(super) when: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    pub(super) then: Vec<Op>,
    #[prost(message, repeated, tag = "3")]
    pub(super) otherwise: Vec<Op>,
}

/// Whether what is there was last changed in this revision; 0 of what is not there.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Compare {
    /// 2: the revision of the last change. That it is to be equal is 0, which is not written.
    #[prost(int32, tag = "2")]
    pub(super) target: i32,
    #[prost(bytes = "vec", tag = "3")]
    pub(super) key: Vec<u8>,
    /// One of several things to compare with: so 0 is written too.
    #[prost(int64, optional, tag = "6")]
    pub(super) mod_revision: Option<i64>,
}

impl Compare {
    pub(super) fn last_changed_in(key: &[u8], revision: i64) -> Self {
        Self { target: 2, key: key.to_vec(), mod_revision: Some(revision) }
    }
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Op {
    #[prost(oneof = "Act", tags = "1, 2, 3")]
    pub(super) act: Option<Act>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Act {
    #[prost(message, tag = "1")]
    Range(Range),
    #[prost(message, tag = "2")]
    Put(Put),
    #[prost(message, tag = "3")]
    Delete(Delete),
}

impl From<Act> for Op {
    fn from(act: Act) -> Self {
        Self { act: Some(act) }
    }
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TxnAnswer {
    #[prost(bool, tag = "2")]
    pub(super) succeeded: bool,
    #[prost(message, repeated, tag = "3")]
    pub(super) answers: Vec<OpAnswer>,
}

/// Of what is done to a key, only what was read is of interest.
#[derive(Clone, PartialEq, Message)]
pub(super) struct OpAnswer {
    #[prost(message, optional, tag = "1")]
    pub(super) range: Option<RangeAnswer>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseGrant {
    /// In seconds.
    #[prost(int64, tag = "1")]
    pub(super) ttl: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseGranted {
    #[prost(int64, tag = "2")]
    pub(super) id: i64,
}

#[derive(Clone, PartialEq, Message)]
#[prost(skip_debug)]
pub(super) struct Authenticate {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) password: String,
}

#[derive(Clone, PartialEq, Message)]
#[prost(skip_debug)]
pub(super) struct Authenticated {
    #[prost(string, tag = "2")]
    pub(super) token: String,
}

impl fmt::Debug for Authenticate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authenticate").field("name", &self.name).finish_non_exhaustive()
    }
}

impl fmt::Debug for Authenticated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authenticated").finish_non_exhaustive()
    }
}

/// How a member is.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Status {}

/// An answer of which nothing matters but that it came.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Nothing {}
