//! All members, any of which will do: they answer for each other.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::time::Instant;

use super::super::error::EtcdStorageError;
use super::super::url::Access;
use super::super::wire::Call;
use super::member::Member;
use crate::storage::net::{LinkError, MOST};
use crate::storage::url::Host;

/// A handle on connections that are shared with its clones.
#[derive(Clone, Debug)]
pub(in super::super) struct Members(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    members: Box<[Member]>,
    /// Who is asked first.
    current: AtomicUsize,
}

impl Members {
    /// At least one.
    pub(in super::super) fn new(hosts: Vec<Host>, access: Access) -> Self {
        let access = Arc::new(access);
        let members: Box<[Member]> = hosts.into_iter().map(|host| Member::new(host, Arc::clone(&access))).collect();
        // Of many programs not all begin with the same one.
        let any = RandomState::new().hash_one(0) % members.len().max(1) as u64;
        Self(Arc::new(Shared { members, current: AtomicUsize::new(usize::try_from(any).unwrap_or(0)) }))
    }

    /// The answer to a call, in time: neither connecting nor a member's silence takes longer than until `deadline`.
    ///
    /// What was not sent, or not executed, goes to the next member, and so does what may be executed twice. What else was sent is
    /// not sent again.
    ///
    /// The future may be dropped at any time; the call may have been executed then. Others are not disturbed.
    pub(in super::super) async fn ask<C: Call>(
        &self,
        call: &C,
        deadline: Instant,
    ) -> Result<C::Answer, EtcdStorageError> {
        let members = &self.0.members;
        let first = self.0.current.load(Ordering::Relaxed);
        let mut step = 0;
        loop {
            let at = (first + step) % members.len();
            step += 1;
            // While there are others left to ask, half of the time is left for them.
            let now = Instant::now();
            let patience = now + deadline.saturating_duration_since(now) / if step < members.len() { 2 } else { 1 };
            let error = match members[at].ask(call, patience, deadline).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            if !(error.is_refused() || error.is_overloaded()) || error.is_without_leader() {
                self.leave(at);
            }
            let elsewhere = error.is_unsent()
                || error.is_without_leader()
                || C::REPEATABLE && (error.is_lost() || error.is_timeout() || error.is_unavailable());
            if !elsewhere || step == members.len() || Instant::now() >= deadline {
                return Err(error);
            }
        }
    }

    /// Returns the error of a call that does not fit while so many keys are busy, on the member that is asked first.
    pub(in super::super) fn overload(&self, busy: usize) -> Option<EtcdStorageError> {
        if busy >= MOST {
            return Some(EtcdStorageError::overloaded("etcd", busy));
        }
        self.0.members[self.0.current.load(Ordering::Relaxed) % self.0.members.len()].overload()
    }

    /// Where they all are: what to call them in errors.
    pub(in super::super) fn names(&self) -> String {
        let names: Vec<&str> = self.0.members.iter().map(Member::name).collect();
        names.join(",")
    }

    /// Who asks next begins with another member.
    fn leave(&self, at: usize) {
        let next = (at + 1) % self.0.members.len();
        // It does not matter who is first to say so.
        let _ = self.0.current.compare_exchange(at, next, Ordering::Relaxed, Ordering::Relaxed);
    }
}
