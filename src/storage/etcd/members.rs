//! The members of the cluster. Each of them can execute every call.
//!
//! Creating [`Members`] does no I/O. They connect on first use, and reconnect after a failure.
//!
//! A read is repeated at another member after half of its time, so a member that hangs fails only
//! the writes that it was executing. A swap is never sent again: if the first was executed, the
//! second would lose against it and count once more.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::time::{Instant, timeout_at};

use super::connection::{EtcdAccess, EtcdConnection, has_no_leader, is_unauthenticated, is_unavailable, is_unsent};
use super::wire::EtcdCall;
use crate::storage::net::{CONNECT_WITHIN, MOST, Reconnecting, WithCalls};
use crate::storage::url::Address;
use crate::storage::{StorageError, StorageErrorKind};

/// A handle to the connections to all members. Clones share the connections.
#[derive(Clone, Debug)]
pub(super) struct Members(Arc<MembersInner>);

#[derive(Debug)]
struct MembersInner {
    members: Box<[EtcdMember]>,
    /// The index of the member that is tried first.
    current: AtomicUsize,
}

impl Members {
    /// Creates the members. There must be at least one host.
    pub(super) fn new(addresses: Vec<Address>, access: EtcdAccess) -> Self {
        let access = Arc::new(access);
        let members: Box<[EtcdMember]> =
            addresses.into_iter().map(|address| EtcdMember::new(address, Arc::clone(&access))).collect();
        // Processes start with different members, which spreads the load.
        let start = RandomState::new().hash_one(0) % members.len().max(1) as u64;
        Self(Arc::new(MembersInner { members, current: AtomicUsize::new(usize::try_from(start).unwrap_or(0)) }))
    }

    /// Returns the same members with another login or other TLS settings, and new connections.
    pub(super) fn with_access(&self, access: EtcdAccess) -> Self {
        Self::new(self.0.members.iter().map(|member| member.address.clone()).collect(), access)
    }

    pub(super) fn access(&self) -> &EtcdAccess {
        &self.0.members[0].access
    }

    /// Sends a call to a member, and returns the response.
    ///
    /// Fails over to the next member if the call was not sent, or if the member has no leader. An
    /// idempotent call also fails over if the connection breaks, or if the member is unavailable or
    /// does not reply in time.
    ///
    /// The future can be dropped at any time. etcd may still execute the call. Other calls on the
    /// connection are not affected.
    ///
    /// # Errors
    ///
    /// Returns the last error if every member has been tried, or `deadline` has passed.
    pub(super) async fn call<C: EtcdCall>(&self, call: &C, deadline: Instant) -> Result<C::Response, StorageError> {
        let members = &self.0.members;
        let first = self.0.current.load(Ordering::Relaxed);
        let mut step = 0;
        loop {
            let at = (first + step) % members.len();
            step += 1;
            let failover_at = failover_at(deadline, step == members.len());
            let error = match members[at].call(call, failover_at, deadline).await {
                Ok(response) => return Ok(response),
                Err(error) => error,
            };
            if !matches!(error.kind(), StorageErrorKind::Refused | StorageErrorKind::Overloaded)
                || has_no_leader(&error)
            {
                self.prefer_after(at);
            }
            let fails_over = is_unsent(&error)
                || has_no_leader(&error)
                || C::IDEMPOTENT
                    && (error.kind() == StorageErrorKind::ConnectionLost
                        || error.is_timeout()
                        || is_unavailable(&error));
            if !fails_over || step == members.len() || Instant::now() >= deadline {
                return Err(error);
            }
        }
    }

    /// Waits until a member is connected, for at most the time of one attempt. Members that are not
    /// connected in their share of it are not preferred afterwards, except for the last one.
    pub(super) async fn first_connection(&self) {
        let (members, deadline) = (&self.0.members, Instant::now() + CONNECT_WITHIN);
        let first = self.0.current.load(Ordering::Relaxed);
        for step in 1..=members.len() {
            let at = (first + step - 1) % members.len();
            if members[at].open(failover_at(deadline, step == members.len())).await.is_ok() {
                return;
            }
            if step < members.len() {
                self.prefer_after(at);
            }
        }
    }

    /// Returns an error if too many keys are busy, or too many calls are in flight on the member
    /// that is tried first.
    pub(super) fn overload(&self, busy_keys: usize) -> Option<StorageError> {
        if busy_keys >= MOST {
            return Some(StorageError::overloaded(&self.names(), busy_keys));
        }
        self.0.members[self.0.current.load(Ordering::Relaxed) % self.0.members.len()].connection.overload()
    }

    /// Returns the addresses of all members, for error messages.
    pub(super) fn names(&self) -> String {
        let names: Vec<&str> = self.0.members.iter().map(|member| member.connection.name()).collect();
        names.join(",")
    }

    /// If later calls would try this member first, makes them try the next one first.
    fn prefer_after(&self, at: usize) {
        let next = (at + 1) % self.0.members.len();
        // If the exchange fails, another call has made the change.
        let _ = self.0.current.compare_exchange(at, next, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Returns the end of the time for one member. The last one gets all of the remaining time, and
/// each earlier one half of it.
fn failover_at(deadline: Instant, is_last: bool) -> Instant {
    let now = Instant::now();
    now + deadline.saturating_duration_since(now) / if is_last { 1 } else { 2 }
}

/// A member of the cluster.
struct EtcdMember {
    address: Address,
    access: Arc<EtcdAccess>,
    connection: Arc<Reconnecting<WithCalls<EtcdConnection>>>,
}

impl EtcdMember {
    fn new(address: Address, access: Arc<EtcdAccess>) -> Self {
        let connection = Reconnecting::new(&address.to_string());
        Self { address, access, connection }
    }

    /// Sends a call, and returns the response.
    ///
    /// - Waits for a connection until `failover_at`.
    /// - Waits for the response until `deadline`. If the call is idempotent, waits only until
    ///   `failover_at`, so that the caller can try another member.
    ///
    /// The call is retried once on a new connection if it was not sent, or if the member rejected
    /// the token. In both cases the member has not executed it.
    async fn call<C: EtcdCall>(
        &self,
        call: &C,
        failover_at: Instant,
        deadline: Instant,
    ) -> Result<C::Response, StorageError> {
        let mut is_first = true;
        loop {
            let open = self.open(failover_at).await?;
            let call_deadline = if C::IDEMPOTENT { failover_at } else { deadline };
            let call_in_flight = self.connection.begin(&open, call_deadline).await?;
            let Ok(response) = timeout_at(call_deadline, open.call(call)).await else {
                return Err(StorageError::timed_out(self.connection.name()));
            };
            call_in_flight.answered();
            let error = match response {
                Ok(response) => return Ok(response),
                Err(error) => error,
            };
            // The connection was closed, or its token is invalid. In both cases the member has not
            // executed the call, so a retry is safe.
            let retries = is_first && (is_unsent(&error) || is_unauthenticated(&error));
            if retries || is_unsent(&error) || error.kind() == StorageErrorKind::ConnectionLost {
                self.connection.give_up(&open, None);
            } else if is_unauthenticated(&error) {
                self.connection.give_up(&open, Some(&error));
            }
            if !retries {
                return Err(error);
            }
            is_first = false;
        }
    }

    /// Returns an open connection. Waits for one until `deadline`.
    async fn open(&self, deadline: Instant) -> Result<Arc<WithCalls<EtcdConnection>>, StorageError> {
        let connect = || {
            let (address, access) = (self.address.clone(), Arc::clone(&self.access));
            async move { EtcdConnection::open(&address, &access).await.map(WithCalls::new) }
        };
        self.connection.get(deadline, connect).await
    }
}

impl fmt::Debug for EtcdMember {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("EtcdMember").field(&self.connection).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::EtcdStorage;

    #[test]
    fn overload_names_the_members() {
        let storage = EtcdStorage::new("etcd://one,two").unwrap();
        let error = storage.0.store().members.overload(MOST).unwrap();
        let expected = "overloaded: 1024 calls to one:2379,two:2379 are in flight, this call was not sent";
        assert_eq!((error.to_string().as_str(), error.may_have_counted()), (expected, false));
    }
}
