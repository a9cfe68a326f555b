//! What is done about a request beside passing it on: keeping its place while it waits, trying limits out, and charging it
//! or not when its response is there.

use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use http::Response;

use crate::headers::{More, Numbers};
use crate::middleware::options::{ChargeFn, ResponseHead};
use crate::observe::{Event, EventKind, Reporter};
use crate::storage::StorageRequest;
use crate::{Decision, Headers, Key, Op, Policy, Storage, headers};

/// Whose quota a decision is about.
#[derive(Clone)]
pub(crate) struct ChargeContext<St> {
    pub(crate) storage: St,
    pub(crate) policy: Policy,
    pub(crate) key: Key,
    pub(crate) reporter: Reporter,
    pub(crate) shadow: bool,
}

impl<St: Storage> ChargeContext<St> {
    pub(crate) fn ask(&self, op: Op, cost: u32) -> StorageRequest<'_> {
        StorageRequest::new(&self.policy, &self.key, op, cost)
    }

    /// Gives a hit back: now, if the storage can (then the answer is `true`), else in a task of the runtime.
    pub(crate) fn refund(&self, decision: &Decision) -> bool {
        let (account, refunded) = (self.clone(), decision.clone());
        let seen_to = run_or_spawn(self.storage.refund(&self.policy, &self.key, decision), move |done| match done {
            Ok(()) => account.report(EventKind::Refunded(&refunded)),
            Err(error) => account.report(EventKind::NotRefunded(&error.into())),
        });
        if seen_to == RunOutcome::Dropped {
            self.report(EventKind::NotRefunded(
                &"the storage makes one wait, and there is no runtime to wait in".into(),
            ));
        }
        seen_to == RunOutcome::Done
    }

    /// What the storage says of the key, if it says so at once.
    pub(crate) fn look(&self) -> Option<Decision> {
        match poll_once(&mut self.storage.decide(self.ask(Op::Peek, 1))) {
            Poll::Ready(decided) => decided.ok(),
            Poll::Pending => None,
        }
    }

    fn failed(&self, error: St::Error) {
        self.report(EventKind::Failed { error: &error.into(), admitted: true });
    }

    fn report(&self, kind: EventKind<'_>) {
        if std::thread::panicking() {
            // An observer that panics too would be the end of the program.
            return;
        }
        let Self { policy, key, shadow, .. } = self;
        self.reporter.report(&Event { kind, policy, key: Some(key), shadow: *shadow });
    }
}

/// What a request's response waits for, besides being passed on.
pub(crate) struct PostResponse<St: Storage> {
    pub(crate) headers: Headers,
    pub(crate) more: Option<More>,
    /// Says whether the request is charged in the end.
    pub(crate) charge: Option<Arc<ChargeFn>>,
    /// What was spent, if it may have to be given back.
    pub(crate) spent: Option<(ChargeContext<St>, Decision)>,
    pub(crate) trials: Vec<ShadowCheck<St>>,
}

impl<St: Storage> PostResponse<St> {
    /// Goes on trying out what is tried out.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) {
        for trial in &mut self.trials {
            trial.poll(cx);
        }
    }

    /// The response is there.
    pub(crate) fn settle<B>(self, response: &mut Response<B>, mut numbers: Option<Numbers>) {
        let Self { headers, mut more, charge, spent, trials } = self;
        let charged = charge.is_none_or(|charge| charge(&ResponseHead::of(response)));
        for mut trial in trials {
            trial.settle(charged);
        }
        if let Some((account, decision)) = spent.filter(|_| !charged) {
            (numbers, more) = (numbers.map(Numbers::without_wait), more.map(More::without_wait));
            if account.refund(&decision)
                && (headers.tell_numbers() || headers.tell_more())
                && let Some(now) = account.look()
            {
                numbers = headers.numbers_of(&now);
                more = headers.more_of(&now, &account.policy, &account.key);
            }
        }
        headers::write_admitted(response, numbers, more);
    }
}

/// A hit that is decided beside a request, which goes on whatever comes of it.
pub(crate) struct ShadowCheck<St: Storage> {
    account: ChargeContext<St>,
    progress: Progress<St::DecideFuture>,
}

enum Progress<D> {
    Deciding(D),
    Admitted(Decision),
    Over,
}

impl<St: Storage> ShadowCheck<St> {
    pub(crate) fn begin(account: ChargeContext<St>, cost: u32) -> Self {
        let deciding = account.storage.decide(account.ask(Op::Hit, cost));
        let mut trial = Self { account, progress: Progress::Deciding(deciding) };
        trial.poll(&mut Context::from_waker(Waker::noop()));
        trial
    }

    /// What was decided, if it was admitted.
    pub(crate) fn decision(&self) -> Option<&Decision> {
        match &self.progress {
            Progress::Admitted(decision) => Some(decision),
            Progress::Deciding(_) | Progress::Over => None,
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) {
        if let Progress::Deciding(deciding) = &mut self.progress
            && let Poll::Ready(decided) = Pin::new(deciding).poll(cx)
        {
            self.progress = match noted(&self.account, decided) {
                Some(decision) => Progress::Admitted(decision),
                None => Progress::Over,
            };
        }
    }

    /// It is known whether the request is charged. If the hit is not decided by now, nobody waits for it.
    fn settle(&mut self, charged: bool) {
        match mem::replace(&mut self.progress, Progress::Over) {
            Progress::Admitted(decision) if !charged => {
                self.account.refund(&decision);
            }
            Progress::Deciding(deciding) => {
                let account = self.account.clone();
                run_or_spawn(deciding, move |decided| {
                    if let Some(decision) = noted(&account, decided).filter(|_| !charged) {
                        account.refund(&decision);
                    }
                });
            }
            Progress::Admitted(_) | Progress::Over => {}
        }
    }
}

/// Without a response a request is charged.
impl<St: Storage> Drop for ShadowCheck<St> {
    fn drop(&mut self) {
        self.settle(true);
    }
}

/// Who is waiting; a place in a leaky bucket's queue is given back when it is dropped before its turn.
pub(crate) struct QueueSlot<St: Storage> {
    account: ChargeContext<St>,
    cost: u32,
    /// Its decision, while it waits for its turn.
    pub(crate) taken: Option<Box<Decision>>,
}

impl<St: Storage> QueueSlot<St> {
    /// `taken` is the decision, if it is there.
    pub(crate) fn new(account: ChargeContext<St>, cost: u32, taken: Option<Box<Decision>>) -> Self {
        Self { account, cost, taken }
    }

    pub(crate) fn ask(&self) -> StorageRequest<'_> {
        let op = if self.cost == 0 { Op::Peek } else { Op::Hit };
        self.account.ask(op, self.cost)
    }

    /// How things stand when its turn has come, if the storage says so at once.
    pub(crate) fn look(&self) -> Option<Decision> {
        self.account.look()
    }
}

impl<St: Storage> Drop for QueueSlot<St> {
    fn drop(&mut self) {
        if let Some(decision) = self.taken.take() {
            self.account.refund(&decision);
        }
    }
}

/// Tells what came of a trial; what was spent, if anything was.
fn noted<St: Storage>(account: &ChargeContext<St>, decided: Result<Decision, St::Error>) -> Option<Decision> {
    match decided {
        Ok(decision) => {
            account.report(EventKind::Decided(&decision));
            Some(decision).filter(Decision::is_admitted)
        }
        Err(error) => {
            account.failed(error);
            None
        }
    }
}

/// Polls by hand, for an answer that is there at once.
pub(crate) fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// How something was seen to that nobody waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RunOutcome {
    Done,
    /// In a task.
    Later,
    /// There is no runtime that could.
    Dropped,
}

/// Sees to something: now, if it can be done at once, else in a task of the runtime, if there is one.
fn run_or_spawn<F>(mut future: F, then: impl FnOnce(F::Output) + Send + 'static) -> RunOutcome
where
    F: Future + Unpin + Send + 'static,
{
    if let Poll::Ready(output) = poll_once(&mut future) {
        then(output);
        return RunOutcome::Done;
    }
    match tokio::runtime::Handle::try_current() {
        Ok(runtime) => {
            runtime.spawn(async move { then(future.await) });
            RunOutcome::Later
        }
        Err(_) => RunOutcome::Dropped,
    }
}
