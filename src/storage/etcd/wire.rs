//! The messages of etcd's v3 protocol that the storage uses.
//!
//! Fields that the storage does not use are omitted, and the decoder skips them. Field numbers and
//! types are those of `rpc.proto` and `kv.proto` in etcd's `api` directory.
//!
//! The messages are written by hand, so no build needs `protoc`. tonic's client runs on a hyper
//! connection of our own, because tonic's `Channel` hides whether a call was sent, and connects
//! when it chooses.

use std::fmt;

use prost::{Message, Oneof};

/// A request of a gRPC method.
pub(super) trait EtcdCall: Message + Clone + 'static {
    const PATH: &'static str;
    /// `true` if the call can be retried. A retry of any other call could count a hit twice.
    const IDEMPOTENT: bool;
    type Response: Message + Default + 'static;
}

macro_rules! calls {
    ($($request:ident $path:literal $idempotent:literal $response:ident;)*) => {
        $(impl EtcdCall for $request {
            const PATH: &'static str = $path;
            const IDEMPOTENT: bool = $idempotent;
            type Response = $response;
        })*
    };
}

calls! {
    RangeRequest "/etcdserverpb.KV/Range" true RangeResponse;
    ListRequest "/etcdserverpb.KV/Range" true ListResponse;
    // A second deletion removes nothing that must be kept.
    DeleteRangeRequest "/etcdserverpb.KV/DeleteRange" true DeleteRangeResponse;
    TxnRequest "/etcdserverpb.KV/Txn" false TxnResponse;
    ReadTxnRequest "/etcdserverpb.KV/Txn" true TxnResponse;
    // An unused lease expires without effect.
    LeaseGrantRequest "/etcdserverpb.Lease/LeaseGrant" true LeaseGrantResponse;
    AuthenticateRequest "/etcdserverpb.Auth/Authenticate" true AuthenticateResponse;
    StatusRequest "/etcdserverpb.Maintenance/Status" true StatusResponse;
}

/// Reads one key.
#[derive(Clone, PartialEq, Message)]
pub(super) struct RangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RangeResponse {
    #[prost(message, repeated, tag = "2")]
    pub(super) found: Vec<KeyValue>,
}

/// Lists the first `limit` keys from `key`, inclusive, to `end`, exclusive, in their order.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ListRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) end: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(super) limit: i64,
    /// `true`, because the values are not used.
    #[prost(bool, tag = "8")]
    pub(super) keys_only: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ListResponse {
    #[prost(message, repeated, tag = "2")]
    pub(super) found: Vec<ListedKey>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ListedKey {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
}

/// Deletes all keys from `key`, inclusive, to `end`, exclusive.
#[derive(Clone, PartialEq, Message)]
pub(super) struct DeleteRangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) end: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct DeleteRangeResponse {
    #[prost(int64, tag = "2")]
    pub(super) deleted: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct KeyValue {
    /// The revision of the last change. Every write has a different revision.
    #[prost(int64, tag = "3")]
    pub(super) mod_revision: i64,
    #[prost(bytes = "vec", tag = "5")]
    pub(super) value: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PutRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) value: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(super) lease: i64,
}

/// A transaction. Executes `then` if all comparisons in `when` succeed, else `otherwise`. Each of these can
/// contain transactions.
#[derive(Clone, PartialEq, Message)]
pub(super) struct TxnRequest {
    #[prost(message, repeated, tag = "1")]
    pub(super) when: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    pub(super) then: Vec<RequestOp>,
    #[prost(message, repeated, tag = "3")]
    pub(super) otherwise: Vec<RequestOp>,
}

/// A transaction that only reads.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ReadTxnRequest {
    #[prost(message, repeated, tag = "2")]
    pub(super) reads: Vec<RequestOp>,
}

/// Compares the revision of a key's last change. It is 0 for a missing key.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Compare {
    /// 2 is `MOD`, the revision of the last change. The omitted field `result` defaults to `EQUAL`.
    #[prost(int32, tag = "2")]
    pub(super) target: i32,
    #[prost(bytes = "vec", tag = "3")]
    pub(super) key: Vec<u8>,
    /// Optional, because it is a member of a `oneof`. So 0 is encoded too.
    #[prost(int64, optional, tag = "6")]
    pub(super) mod_revision: Option<i64>,
}

impl Compare {
    pub(super) fn last_changed_in(key: &[u8], revision: i64) -> Self {
        Self { target: 2, key: key.to_vec(), mod_revision: Some(revision) }
    }
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RequestOp {
    #[prost(oneof = "OpKind", tags = "1, 2, 3, 4")]
    pub(super) kind: Option<OpKind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum OpKind {
    #[prost(message, tag = "1")]
    Range(RangeRequest),
    #[prost(message, tag = "2")]
    Put(PutRequest),
    #[prost(message, tag = "3")]
    Delete(DeleteRangeRequest),
    #[prost(message, tag = "4")]
    Txn(TxnRequest),
}

impl From<OpKind> for RequestOp {
    fn from(kind: OpKind) -> Self {
        Self { kind: Some(kind) }
    }
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct Header {
    /// The revision of the store. It is the version of each key that a transaction has written.
    #[prost(int64, tag = "3")]
    pub(super) revision: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TxnResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    #[prost(bool, tag = "2")]
    pub(super) succeeded: bool,
    #[prost(message, repeated, tag = "3")]
    pub(super) responses: Vec<ResponseOp>,
}

/// The response to one operation of a transaction. Those to writes are not used.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ResponseOp {
    #[prost(message, optional, tag = "1")]
    pub(super) range: Option<RangeResponse>,
    #[prost(message, optional, tag = "4")]
    pub(super) txn: Option<TxnResponse>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseGrantRequest {
    /// The time to live, in seconds.
    #[prost(int64, tag = "1")]
    pub(super) ttl: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LeaseGrantResponse {
    #[prost(int64, tag = "2")]
    pub(super) id: i64,
}

#[derive(Clone, PartialEq, Message)]
#[prost(skip_debug)]
pub(super) struct AuthenticateRequest {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) password: String,
}

#[derive(Clone, PartialEq, Message)]
#[prost(skip_debug)]
pub(super) struct AuthenticateResponse {
    #[prost(string, tag = "2")]
    pub(super) token: String,
}

impl fmt::Debug for AuthenticateRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authenticate").field("name", &self.name).finish_non_exhaustive()
    }
}

impl fmt::Debug for AuthenticateResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AuthenticateResponse").finish_non_exhaustive()
    }
}

/// Requests the status of a member.
#[derive(Clone, PartialEq, Message)]
pub(super) struct StatusRequest {}

/// An empty message, because no field is used.
#[derive(Clone, PartialEq, Message)]
pub(super) struct StatusResponse {}
