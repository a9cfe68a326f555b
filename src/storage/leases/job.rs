//! What has to be asked of the storage, and how its caller waits for that.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::error::LeaseError;
use super::lease_table::LeaseTable;
use crate::{Decision, Key, Op, Policy, Storage};

/// What a caller wants of a key.
#[derive(Debug)]
pub(super) enum Command {
    /// So many units of a window that leases are taken of.
    Hit(u32),
    /// Whatever the storage says: a look, or a hit by another rule.
    StorageRequest(Op, u32),
    Refund(Decision),
    Clear,
}

/// Nothing, of a change that is done, and of a hit that its caller has to ask the storage about.
pub(super) type Answer<St> = Result<Option<Reply<St>>, LeaseError>;

/// One caller's errand.
pub(super) struct Job<St: Storage> {
    pub(super) policy: Policy,
    pub(super) want: Command,
    reply: oneshot::Sender<Answer<St>>,
}

impl<St: Storage> Job<St> {
    pub(super) fn new(policy: &Policy, want: Command) -> (Self, oneshot::Receiver<Answer<St>>) {
        let (reply, answer) = oneshot::channel();
        (Self { policy: policy.clone(), want, reply }, answer)
    }

    /// What it costs, if it is a hit by this policy.
    pub(super) fn cost(&self, policy: &Policy) -> Option<u32> {
        match self.want {
            Command::Hit(cost) if self.policy == *policy => Some(cost),
            _ => None,
        }
    }

    /// Whether nobody waits for it, and it need not be done: the storage has not been asked for it.
    pub(super) fn is_given_up(&self) -> bool {
        matches!(self.want, Command::Hit(_) | Command::StorageRequest(..)) && self.reply.is_closed()
    }

    /// Tells the caller. No lock is to be held, as one that has left gives back what it was given.
    pub(super) fn tell(self, answer: Answer<St>) {
        drop(self.reply.send(answer));
    }
}

/// A decision on its way to its caller. If the caller has left, what it was given is given back.
pub(super) struct Reply<St: Storage> {
    decision: Option<Decision>,
    whose: Option<(Arc<LeaseTable<St>>, Policy, Key)>,
}

impl<St: Storage> Reply<St> {
    /// A decision on a hit; if it was admitted, it has taken units.
    pub(super) fn of(decision: Decision, shared: &Arc<LeaseTable<St>>, policy: &Policy, key: &Key) -> Self {
        let whose = decision.is_admitted().then(|| (Arc::clone(shared), policy.clone(), key.clone()));
        Self { decision: Some(decision), whose }
    }

    /// A decision that has taken nothing from here.
    pub(super) fn word(decision: Decision) -> Self {
        Self { decision: Some(decision), whose: None }
    }

    /// The decision, for the caller who is there.
    pub(super) fn claim(mut self) -> Option<Decision> {
        self.decision.take()
    }
}

impl<St: Storage> Drop for Reply<St> {
    fn drop(&mut self) {
        if let (Some(decision), Some((shared, policy, key))) = (self.decision.take(), self.whose.take()) {
            shared.take_back(&policy, &key, &decision);
        }
    }
}
