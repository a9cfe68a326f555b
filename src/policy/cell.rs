//! A cell that holds the current policy of a live policy, and the layers and limiters that use it.
//!
//! A load of the current policy takes about ten instructions, no lock and no write to shared
//! memory. With `arc-swap` it takes 63, two of them locked, which is a tenth of a hit. Setting a
//! policy again reuses its slot. After 64 distinct policies, the current one is behind an `RwLock`,
//! so memory stays bounded.
//!
//! Two policies with equal texts are the same policy only if the text parses to it, because the
//! text does not contain the settings of a custom strategy.

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, RwLock, Weak};

use super::Policy;
use crate::error::ConfigError;
use crate::sync::unpoisoned;

/// The number of distinct policies that requests can read without a lock.
const SLOTS: usize = 64;

/// The minimum number of users at which those that were dropped are removed.
const MIN_PRUNED: usize = 16;

/// A policy that can be replaced, and the layers and limiters that use it.
pub(super) struct PolicyCell {
    /// The position of the current policy in `slots`, or `SLOTS` if it is in `overflow`.
    current: AtomicUsize,
    /// The distinct policies so far. A slot never changes after it is filled, so a reader can
    /// borrow its policy.
    slots: [OnceLock<Policy>; SLOTS],
    overflow: RwLock<Option<Policy>>,
    users: Mutex<PolicyUsers>,
}

/// The layers and limiters that use a policy, and some that were dropped.
#[derive(Default)]
struct PolicyUsers {
    all: Vec<Weak<PolicyUser>>,
    /// The number of users at which those that were dropped are removed. Twice as many as were left the
    /// last time, so that a user costs a constant time on average.
    prune_at: usize,
}

/// A layer or a limiter that uses a live policy, which has to support all later policies.
pub(super) struct PolicyUser {
    validate: Box<Validate>,
    /// `true` if the policy has changed since the user last took this.
    has_changed: AtomicBool,
}

type Validate = dyn Fn(&Policy, &PolicyChanges<'_>) -> Result<(), ConfigError> + Send + Sync;

/// The policies that change together, before they are published.
#[derive(Default)]
pub(crate) struct PolicyChanges<'a>(&'a [(&'a Arc<PolicyCell>, Policy)]);

/// Held while policies change. A layer compares the new policy of one of its keys with those of the
/// others, so two of them must not change at the same time.
static CHANGE: Mutex<()> = Mutex::new(());

impl PolicyChanges<'_> {
    /// Returns the new policy of a cell, if it changes.
    pub(super) fn of(&self, changed: &Arc<PolicyCell>) -> Option<&Policy> {
        self.0.iter().find(|(cell, _)| Arc::ptr_eq(cell, changed)).map(|(_, policy)| policy)
    }
}

impl PolicyUser {
    /// Returns `true` if the policy has changed since the last call of [`take_changed`](Self::take_changed).
    #[inline]
    pub(super) fn has_changed(&self) -> bool {
        self.has_changed.load(Ordering::Relaxed)
    }

    /// Returns `true` if the policy has changed since the last call.
    #[inline]
    pub(super) fn take_changed(&self) -> bool {
        self.has_changed() && self.has_changed.swap(false, Ordering::Relaxed)
    }
}

impl PolicyUsers {
    fn add(&mut self, user: &Arc<PolicyUser>) {
        if self.all.len() >= self.prune_at {
            self.all.retain(|user| user.strong_count() > 0);
            self.prune_at = (2 * self.all.len()).max(MIN_PRUNED);
        }
        self.all.push(Arc::downgrade(user));
    }
}

impl PolicyCell {
    pub(super) fn new(policy: &Policy) -> Self {
        let slots = [const { OnceLock::new() }; SLOTS];
        let overflow = RwLock::new(None);
        let cell = Self { current: AtomicUsize::new(0), slots, overflow, users: Mutex::default() };
        cell.publish(policy);
        cell
    }

    /// Replaces the policies of these cells, if all users support the new ones. Otherwise returns
    /// the policy that is not supported. The cells must be distinct and in the order of their
    /// addresses.
    pub(super) fn set_all<'a>(changes: &'a [(&Arc<Self>, Policy)]) -> Result<(), (&'a Policy, ConfigError)> {
        // Dropped after the locks are released, because a user may be the last owner of a storage.
        let mut present = Vec::new();
        let _change = unpoisoned(CHANGE.lock());
        // The locks are held until all policies are published, so a user that joins meanwhile
        // validates the new policy.
        let mut locked = Vec::new();
        for (cell, policy) in changes {
            let users = cell.users();
            let first = present.len();
            present.extend(users.all.iter().filter_map(Weak::upgrade));
            locked.push(users);
            let pending = PolicyChanges(changes);
            let validated = present[first..].iter().try_for_each(|user| (user.validate)(policy, &pending));
            validated.map_err(|error| (policy, error))?;
        }
        for (cell, policy) in changes {
            cell.publish(policy);
        }
        for user in &present {
            user.has_changed.store(true, Ordering::Relaxed);
        }
        drop(locked);
        Ok(())
    }

    /// Returns the current policy, borrowed if no lock is needed to read it.
    #[inline]
    pub(super) fn read(&self) -> Cow<'_, Policy> {
        self.in_slot().map_or_else(|| Cow::Owned(self.in_overflow()), Cow::Borrowed)
    }

    /// Returns the current policy if it is in a slot.
    #[inline]
    pub(super) fn in_slot(&self) -> Option<&Policy> {
        self.slots.get(self.current.load(Ordering::Acquire))?.get()
    }

    /// Returns the latest policy that found no free slot. Takes a lock.
    #[cold]
    pub(super) fn in_overflow(&self) -> Policy {
        let overflow = unpoisoned(self.overflow.read());
        overflow.clone().expect("filled before `current` points to it")
    }

    /// Adds a user, which has to support the current policy and all later ones, until the returned
    /// handle is dropped.
    pub(super) fn join(&self, validate: Box<Validate>) -> Result<Arc<PolicyUser>, ConfigError> {
        let mut users = self.users();
        validate(&self.read(), &PolicyChanges::default())?;
        let user = Arc::new(PolicyUser { validate, has_changed: AtomicBool::new(false) });
        users.add(&user);
        Ok(user)
    }

    fn publish(&self, policy: &Policy) {
        let Self { current, slots, overflow, .. } = self;
        let slot = slots.iter().position(|slot| match slot.get() {
            Some(earlier) => earlier.is_interchangeable_with(policy),
            None => slot.set(policy.clone()).is_ok(),
        });
        if slot.is_none() {
            *unpoisoned(overflow.write()) = Some(policy.clone());
        }
        current.store(slot.unwrap_or(SLOTS), Ordering::Release);
    }

    fn users(&self) -> MutexGuard<'_, PolicyUsers> {
        unpoisoned(self.users.lock())
    }
}
