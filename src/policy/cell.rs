//! The current policy of a live policy, and the layers and limiters that use it.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, RwLock, Weak};

use super::Policy;
use crate::error::ConfigError;
use crate::sync::unpoisoned;

/// The number of distinct policies that requests can read without a lock.
const SLOTS: usize = 64;

/// A policy that can be replaced, and the layers and limiters that use it.
pub(super) struct PolicyCell {
    /// The position of the current policy in `slots`, or `SLOTS` if it is in `overflow`.
    current: AtomicUsize,
    /// The distinct policies so far. A slot never changes after it is filled, so a reader can
    /// borrow its policy.
    slots: [OnceLock<Policy>; SLOTS],
    overflow: RwLock<Option<Policy>>,
    users: Mutex<Users>,
}

/// The layers and limiters that use a live policy. A user removes itself when it is dropped.
#[derive(Default)]
struct Users {
    by_number: BTreeMap<u64, Weak<PolicyUser>>,
    next: u64,
}

/// A layer or a limiter that uses a live policy.
pub(super) struct PolicyUser {
    cell: Arc<PolicyCell>,
    number: u64,
    validate: Box<Validate>,
    /// `true` if the policy has changed since the user last read this field.
    pub(super) has_changed: AtomicBool,
}

pub(super) type Validate = dyn Fn(&Policy) -> Result<(), ConfigError> + Send + Sync;

impl PolicyCell {
    pub(super) fn new(policy: &Policy) -> Self {
        let slots = [const { OnceLock::new() }; SLOTS];
        let overflow = RwLock::new(None);
        let cell = Self { current: AtomicUsize::new(0), slots, overflow, users: Mutex::default() };
        cell.publish(policy);
        cell
    }

    /// Replaces the policy, if all users support the new one.
    pub(super) fn set(&self, policy: &Policy) -> Result<(), ConfigError> {
        // Dropped after the lock is released, because a user that is dropped takes the lock.
        let mut present = Vec::new();
        // The lock is held until the policy is published, so a user that joins meanwhile validates
        // the new policy.
        let users = self.users();
        present.extend(users.by_number.values().filter_map(Weak::upgrade));
        present.iter().try_for_each(|user| (user.validate)(policy))?;
        self.publish(policy);
        for user in &present {
            user.has_changed.store(true, Ordering::Relaxed);
        }
        drop(users);
        Ok(())
    }

    /// Returns the current policy, borrowed if no lock is needed to read it.
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

    /// Adds a user, which has to support the current policy and all later ones. Dropping the
    /// returned handle removes the user.
    pub(super) fn join(self: &Arc<Self>, validate: Box<Validate>) -> Result<Arc<PolicyUser>, ConfigError> {
        let mut users = self.users();
        validate(&self.read())?;
        let (cell, number) = (Arc::clone(self), users.next);
        let user = Arc::new(PolicyUser { cell, number, validate, has_changed: AtomicBool::new(false) });
        users.by_number.insert(number, Arc::downgrade(&user));
        users.next += 1;
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

    fn users(&self) -> MutexGuard<'_, Users> {
        unpoisoned(self.users.lock())
    }
}

impl Drop for PolicyUser {
    fn drop(&mut self) {
        self.cell.users().by_number.remove(&self.number);
    }
}

impl Policy {
    /// Returns `true` if the two policies always make the same decisions.
    ///
    /// Equality compares texts, which do not contain the settings of custom strategies. So two
    /// policies with custom strategies are interchangeable only if one is a clone of the other.
    fn is_interchangeable_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self == other && self.to_string().parse().as_ref() == Ok(self)
    }
}
