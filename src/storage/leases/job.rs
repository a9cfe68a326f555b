//! The jobs of a worker, and the replies to their callers.

use std::sync::Arc;

use tokio::sync::oneshot;

use crate::decision::Decision;
use crate::key::Key;
use crate::policy::{Op, Policy};
use crate::storage::StorageError;

/// The action that a caller requests for a key.
#[derive(Debug)]
pub(super) enum Command {
    /// A hit of this cost on a window that is leased.
    Hit(u32),
    /// A request that the storage decides, such as a peek, a charge, or a hit by a policy that is
    /// not leased.
    Forward(Op, u32),
    /// A settlement: the decision on a hit, and the actual cost of the hit.
    Settle(Decision, u32),
    Clear,
}

/// The reply to a job. `None` means that a change is done, or that the caller must send its hit to
/// the storage itself.
pub(super) type LeaseResult = Result<Option<Reply>, StorageError>;

/// The job of one caller.
pub(super) struct Job {
    pub(super) policy: Policy,
    pub(super) command: Command,
    reply: oneshot::Sender<LeaseResult>,
}

impl Job {
    pub(super) fn new(policy: &Policy, command: Command) -> (Self, oneshot::Receiver<LeaseResult>) {
        let (reply, answer) = oneshot::channel();
        (Self { policy: policy.clone(), command, reply }, answer)
    }

    /// Returns the cost, if the job is a hit by this policy.
    pub(super) fn cost(&self, policy: &Policy) -> Option<u32> {
        match self.command {
            Command::Hit(cost) if self.policy == *policy => Some(cost),
            _ => None,
        }
    }

    /// Returns `true` if the job is a hit or a peek whose caller has gone, so that it can be
    /// skipped. Charges, settlements and clears are never skipped.
    pub(super) fn is_abandoned(&self) -> bool {
        matches!(self.command, Command::Hit(_) | Command::Forward(Op::Hit | Op::Peek, _)) && self.reply.is_closed()
    }

    /// Sends the reply. The caller of this method must not hold a lock of the lease table: if the
    /// receiver is gone, dropping the reply refunds its units, which takes such a lock.
    pub(super) fn send(self, answer: LeaseResult) {
        drop(self.reply.send(answer));
    }
}

/// Takes back the units of an admitted hit whose caller has gone. [`LeaseTable`] implements this
/// trait, so that jobs do not depend on the type of the storage.
///
/// [`LeaseTable`]: super::shared::LeaseTable
pub(super) trait TakeBack: Send + Sync {
    fn take_back(self: Arc<Self>, policy: &Policy, key: &Key, decision: &Decision);
}

/// A decision on its way to its caller. If the caller is gone, its units are refunded.
pub(super) struct Reply {
    decision: Option<Decision>,
    refund_to: Option<(Arc<dyn TakeBack>, Policy, Key)>,
}

impl Reply {
    /// Creates a reply with a decision on a hit. If the hit was admitted, dropping the reply
    /// refunds it.
    pub(super) fn of(decision: Decision, leases: Arc<dyn TakeBack>, policy: &Policy, key: &Key) -> Self {
        let refund_to = decision.is_admitted().then(|| (leases, policy.clone(), key.clone()));
        Self { decision: Some(decision), refund_to }
    }

    /// Creates a reply with a decision that is not refunded if the caller has gone: a refusal, or a
    /// decision that the storage made for this caller.
    pub(super) fn without_units(decision: Decision) -> Self {
        Self { decision: Some(decision), refund_to: None }
    }

    /// Returns the decision. The caller owns its units from now on.
    pub(super) fn claim(mut self) -> Option<Decision> {
        self.decision.take()
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let (Some(decision), Some((leases, policy, key))) = (self.decision.take(), self.refund_to.take()) {
            leases.take_back(&policy, &key, &decision);
        }
    }
}
