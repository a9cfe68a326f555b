//! The leases of all keys, and who waits for one.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::task::{Context, Waker};

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::entry::{Busy, LeaseEntry, NoRoom, make_room};
use super::job::{Answer, Command, Job};
use super::lease::Lease;
use super::outage::Outage;
use super::worker::LeaseWorker;
use crate::storage::counters::Counters;
use crate::storage::key_table::{Bucket, Table, TableKey};
use crate::storage::{Clock, StorageRequest};
use crate::{Decision, Key, Op, Policy, Storage};

/// What the handles share.
pub(super) struct LeaseTable<St: Storage> {
    pub(super) inner: St,
    pub(super) table: Table<LeaseEntry<St>>,
    pub(super) counters: Counters,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) slice: u32,
    pub(super) max_keys: usize,
    pub(super) outage: Outage,
    /// No slice is taken any more.
    pub(super) closed: AtomicBool,
}

/// What becomes of a question.
pub(super) enum Route<St: Storage> {
    Here(Decision),
    Wait(oneshot::Receiver<Answer<St>>),
    /// Nothing here has to do with it.
    Inside,
}

impl<St: Storage> LeaseTable<St> {
    pub(super) fn new(inner: St, slice: u32, max_keys: usize, clock: Arc<dyn Clock>) -> Self {
        let (table, counters) = (Table::new(max_keys), Counters::new("ratelimit_leases_total"));
        Self {
            inner,
            table,
            counters,
            clock,
            slice,
            max_keys,
            outage: Outage::default(),
            closed: AtomicBool::new(false),
        }
    }

    /// Policies of one name whose first limits share their states share a lease too.
    fn place(&self, policy: &Policy, key: &Key) -> TableKey {
        self.table.place(policy, policy.limit_digests().first().copied().unwrap_or_default(), key)
    }

    /// How many keys have a lease whose window is open.
    pub(super) fn len(&self) -> usize {
        let now = self.clock.now();
        self.table.count(|of_key| of_key.lease.as_ref().is_some_and(|lease| lease.is_live(now)))
    }

    /// A hit that is spent here, if there is enough.
    pub(super) fn take(&self, ask: &StorageRequest<'_>) -> Option<Decision> {
        let (place, now) = (self.place(ask.policy, ask.key), self.clock.now());
        let decision = self.table.lock(place).find()?.take(ask, now)?;
        self.counters.here(ask.policy);
        Some(decision)
    }

    /// Whether anything is known of the key, so that others must not be asked past it.
    pub(super) fn knows(&self, policy: &Policy, key: &Key) -> bool {
        self.table.lock(self.place(policy, key)).find().is_some()
    }

    /// Decides here, or has the storage asked by who asks for this key.
    pub(super) fn decide(self: &Arc<Self>, ask: &StorageRequest<'_>, is_leased: bool) -> Route<St> {
        let (place, now) = (self.place(ask.policy, ask.key), self.clock.now());
        let mut bucket = self.table.lock(place);
        let spends = is_leased && ask.op == Op::Hit && ask.cost > 0;
        if spends && let Some(decision) = bucket.find().and_then(|of_key| of_key.take(ask, now)) {
            drop(bucket);
            self.counters.here(ask.policy);
            return Route::Here(decision);
        }
        if self.is_closed() || !spends && bucket.find().is_none() {
            return Route::Inside;
        }
        let want = if spends { Command::Hit(ask.cost) } else { Command::StorageRequest(ask.op, ask.cost) };
        self.enlist(bucket, place, ask.policy, ask.key, want)
    }

    /// Has something done by who asks for this key, after what was asked before.
    pub(super) fn have_done(self: &Arc<Self>, policy: &Policy, key: &Key, want: Command) -> Route<St> {
        let place = self.place(policy, key);
        let mut bucket = self.table.lock(place);
        if let Command::Clear = want
            && let Some(of_key) = bucket.find()
        {
            of_key.forget();
        }
        if self.is_closed() {
            return Route::Inside;
        }
        self.enlist(bucket, place, policy, key, want)
    }

    fn enlist(
        self: &Arc<Self>,
        mut bucket: Bucket<'_, LeaseEntry<St>>,
        place: TableKey,
        policy: &Policy,
        key: &Key,
        want: Command,
    ) -> Route<St> {
        let (now, runtime) = (self.clock.now(), Handle::try_current().ok());
        let mut given_up = None;
        if bucket.find().is_none() {
            match make_room(&mut bucket, now) {
                Ok(evicted) => given_up = evicted,
                Err(NoRoom) => return Route::Inside,
            }
        }
        let of_key = bucket.find_or_insert(|| LeaseEntry::new(key.clone(), now));
        of_key.used = now;
        let here = Busy::In(runtime.as_ref().map(Handle::id));
        let begins = of_key.busy == Busy::No;
        if !begins && of_key.busy != here {
            return Route::Inside;
        }
        let (job, answer) = Job::new(policy, want);
        of_key.waiting.push(job);
        of_key.busy = here;
        drop(bucket);
        if let Some((key, lease)) = given_up {
            self.give_back(&key, &lease);
        }
        if begins {
            let mut errand = Box::pin(LeaseWorker::new(Arc::clone(self), place, key.clone()).run());
            // Most often nobody has to wait for long, and in memory not at all.
            if errand.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending()
                && let Some(runtime) = runtime
            {
                runtime.spawn(errand);
            }
        }
        Route::Wait(answer)
    }

    /// Puts back what a hit took, if it was of the window that is leased. Otherwise it is the storage's.
    pub(super) fn put_back(self: &Arc<Self>, policy: &Policy, key: &Key, decision: &Decision) -> Option<Route<St>> {
        if decision.is_from_fallback() {
            return None;
        }
        let place = self.place(policy, key);
        let mut bucket = self.table.lock(place);
        let of_key = bucket.find()?;
        let lease = of_key.lease.as_mut().filter(|lease| lease.is_live(self.clock.now()))?;
        if !lease.put_back(decision) {
            return None;
        }
        if lease.is_all() && of_key.busy == Busy::No {
            // As if there had been no hit: the next one begins a window of its own.
            let hit = lease.as_hit()?;
            let policy = lease.policy.clone();
            of_key.lease = None;
            return Some(self.enlist(bucket, place, &policy, key, Command::Refund(hit)));
        }
        Some(Route::Here(decision.clone()))
    }

    /// As [`put_back`](Self::put_back), with nobody waiting for it.
    pub(super) fn take_back(self: &Arc<Self>, policy: &Policy, key: &Key, decision: &Decision) {
        match self.put_back(policy, key, decision) {
            Some(Route::Here(_) | Route::Wait(_)) => {}
            Some(Route::Inside) | None => in_background(self.inner.refund(policy, key, decision)),
        }
    }

    /// Gives back what is left of a lease that is given up.
    fn give_back(&self, key: &Key, lease: &Lease) {
        if let Some(hit) = lease.as_hit() {
            in_background(self.inner.refund(&lease.policy, key, &hit));
        }
    }

    /// The worker was cancelled. Its callers get an error, because their jobs are dropped here. If
    /// it was `asking` for units, the storage may have counted them.
    pub(super) fn abandon(&self, place: TableKey, asking: bool) {
        if asking {
            self.outage.failed();
        }
        let mut bucket = self.table.lock(place);
        let waiting = bucket.find().map(|of_key| {
            of_key.in_doubt |= asking;
            of_key.end_worker();
            std::mem::take(&mut of_key.waiting)
        });
        drop(bucket);
        drop(waiting);
    }
}

/// While a clear is under way beside who asks for the key: nobody knows when it happens, so what is leased when it ends goes too.
pub(super) struct InvalidateOnDrop<St: Storage> {
    shared: Arc<LeaseTable<St>>,
    place: TableKey,
}

impl<St: Storage> InvalidateOnDrop<St> {
    pub(super) fn new(shared: &Arc<LeaseTable<St>>, policy: &Policy, key: &Key) -> Self {
        Self { shared: Arc::clone(shared), place: shared.place(policy, key) }
    }
}

impl<St: Storage> Drop for InvalidateOnDrop<St> {
    fn drop(&mut self) {
        if let Some(of_key) = self.shared.table.lock(self.place).find() {
            of_key.forget();
        }
    }
}

/// Has something done that nobody waits for: now, if that can be, else in a task.
fn in_background<F: Future + Send + Unpin + 'static>(mut done: F)
where
    F::Output: Send,
{
    let polled = Pin::new(&mut done).poll(&mut Context::from_waker(Waker::noop()));
    if polled.is_pending()
        && let Ok(runtime) = Handle::try_current()
    {
        runtime.spawn(async move { drop(done.await) });
    }
}
