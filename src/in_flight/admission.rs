//! The admission of a request: it takes its slots, waits for them, or is refused.

use std::pin::Pin;
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use super::claims::Claims;
use super::permit::Permit;
use super::renewing::Renewals;
use super::slots::number_of_slots;
use super::table::{SlotTable, StartClaims, Take, Taken};
use crate::decision::Decision;
use crate::key::Key;
use crate::middleware::config::LayerConfig;
use crate::middleware::exchange::Exchange;
use crate::middleware::lints::Lints;
use crate::middleware::post_response::{PostResponse, ResponsePlan};
use crate::middleware::step::Step;
use crate::observe::EventKind;
use crate::policy::{Op, Policy, SharedPolicy};
use crate::storage::{SlotStore, StorageError, StorageRequest};
use crate::strategy::Status;
use crate::time::{Timestamp, micros};
use crate::waiting::Seats;

/// The `Retry-After` of a refusal, unless it is set. The end of a request in flight is not known, so a
/// client has to try again.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The default time to live of shared slots. A stream is renewed every ten seconds.
const TIME_TO_LIVE: Duration = Duration::from_secs(30);

/// The state that all services of a layer share, except for its rejection.
pub(crate) struct SlotState {
    pub(super) options: SlotOptions,
    lints: Lints,
    /// `None` if the layer refuses without waiting.
    seats: Option<Arc<Seats>>,
}

/// The layer's configuration, except for its rejection.
#[derive(Clone)]
pub(super) struct SlotOptions {
    pub(super) config: LayerConfig,
    pub(super) retry_after: Duration,
    time_to_live: Duration,
    /// The store that other processes share, if there is one.
    store: Option<Arc<dyn SlotStore>>,
    /// The claims on the store, if there is one.
    renewals: Option<Arc<Renewals>>,
    pub(super) table: Arc<SlotTable>,
}

/// A request that waits for its slots.
pub(super) struct SlotWait {
    policy: Policy,
    key: Key,
    cost: u32,
    /// Returns the policy by which the request was decided, if live slots may have changed it.
    pub(super) take: Pin<Box<dyn Future<Output = (Take, Option<Policy>)> + Send>>,
    /// `true` if the request keeps a ready inner service, because it only waits for the storage.
    pub(super) keeps_service_ready: bool,
}

/// A request for slots.
#[derive(Clone, Copy)]
struct Hit<'a> {
    policy: &'a Policy,
    key: &'a Key,
    cost: u32,
    /// `true` if the store was asked.
    asked_store: bool,
}

impl<'a> Hit<'a> {
    /// Creates a request that has not asked the store yet.
    fn new(policy: &'a Policy, key: &'a Key, cost: u32) -> Self {
        Self { policy, key, cost, asked_store: false }
    }
}

impl SlotOptions {
    pub(super) fn new(config: LayerConfig) -> Self {
        let table = SlotTable::new(None);
        Self { config, retry_after: RETRY_AFTER, time_to_live: TIME_TO_LIVE, store: None, renewals: None, table }
    }

    /// Shares the slots through `store`. The counts begin anew.
    pub(super) fn share(&mut self, store: Option<Arc<dyn SlotStore>>) {
        self.store = store;
        self.live_for(self.time_to_live);
    }

    /// Sets the time to live of shared slots. The counts begin anew.
    pub(super) fn live_for(&mut self, time_to_live: Duration) {
        self.time_to_live = time_to_live;
        self.renewals = self.store.clone().map(|store| Renewals::new(Claims::new(store, time_to_live)));
        let renewals = self.renewals.clone();
        self.table = SlotTable::new(
            renewals.map(|renewals| -> StartClaims { Box::new(move |table, row| renewals.start(table, row)) }),
        );
    }

    /// Gives the slots of all keys back to the store, if there is one.
    pub(super) fn close(&self) -> impl Future<Output = Result<(), StorageError>> + Send + use<> {
        let (renewals, table) = (self.renewals.clone(), Arc::clone(&self.table));
        async move {
            match renewals {
                Some(renewals) => renewals.close(&table).await,
                None => Ok(()),
            }
        }
    }
}

impl SlotState {
    pub(super) fn new(options: SlotOptions) -> Self {
        let seats = options.config.wait.map(|bounds| Seats::new(bounds.max_waiting));
        Self { options, lints: Lints::default(), seats }
    }

    /// Reports the lints that need no request.
    pub(super) fn start(&self) {
        self.lints.start(&self.options.config, None);
    }

    /// Lets a request take its slots. Sets `permit` if the request holds any.
    #[inline]
    pub(super) fn admit(&self, exchange: &mut impl Exchange, permit: &mut Option<Permit>) -> Step<SlotWait> {
        let SlotOptions { config, table, .. } = &self.options;
        let plain = config.plain.as_ref().and_then(SharedPolicy::plain);
        let Some(policy) = plain else { return self.admit_by_options(exchange, permit) };
        let extracted = config.first.key.extract(&exchange.head());
        let Ok(Some(key)) = &extracted else { return config.forward_or_reject(extracted, policy, exchange) };
        if self.lints.is_inspecting() {
            self.lints.inspect(config, None, exchange, [(&config.first, policy)]);
        }
        let Some(taken) = table.try_take(policy, key, 1) else {
            return self.take(Hit::new(policy, key, 1), exchange, permit);
        };
        *permit = Some(Permit::insert(Some(taken.slot), exchange.extensions_mut()));
        Step::Forward(ResponsePlan::only(config.headers.numbers_in_flight(number_of_slots(policy), taken.remaining)))
    }

    /// Like [`admit`](Self::admit), for a layer that is not plain (see `LayerConfig::plain`).
    #[inline(never)]
    fn admit_by_options(&self, exchange: &mut dyn Exchange, permit: &mut Option<Permit>) -> Step<SlotWait> {
        let (SlotOptions { config, table, .. }, head) = (&self.options, exchange.head());
        if config.skips(&head) {
            return Step::Forward(ResponsePlan::NOTHING);
        }
        let Some(policy) = config.first.policies.of(&head) else { return Step::Forward(ResponsePlan::NOTHING) };
        let extracted = config.first.key.extract(&head);
        let Ok(Some(key)) = &extracted else { return config.forward_or_reject(extracted, &policy, exchange) };
        let cost = match config.cost_of(&head) {
            Ok(cost) => cost,
            Err(missing) => return config.reject_without_key(&missing, &policy, exchange),
        };
        if self.lints.is_inspecting() {
            self.lints.inspect(config, None, exchange, [(&config.first, &*policy)]);
        }
        let hit = Hit::new(&policy, key, cost);
        if cost == 0 {
            return Step::Forward(self.forward(table.free(&policy, key), hit, exchange));
        }
        self.take(hit, exchange, permit)
    }

    /// Lets a request with a cost take its slots, wait for them, or be refused.
    #[inline(never)]
    fn take(&self, hit: Hit<'_>, exchange: &mut dyn Exchange, permit: &mut Option<Permit>) -> Step<SlotWait> {
        let (SlotOptions { config, table, .. }, Hit { policy, key, cost, .. }) = (&self.options, hit);
        let seats = self.seats.as_ref().filter(|_| !config.shadow);
        let take = table.take(policy, key, cost, seats, || config.first.policy_of_later_hits(policy));
        self.apply(take, hit, exchange, permit)
    }

    /// Applies the end of a request's wait.
    pub(super) fn admit_after_wait(
        &self,
        (take, decided_by): (Take, Option<Policy>),
        SlotWait { policy, key, cost, .. }: &SlotWait,
        exchange: &mut dyn Exchange,
        permit: &mut Option<Permit>,
    ) -> Step<SlotWait> {
        let policy = decided_by.as_ref().unwrap_or(policy);
        self.apply(take, Hit { policy, key, cost: *cost, asked_store: true }, exchange, permit)
    }

    fn apply(
        &self,
        take: Take,
        hit: Hit<'_>,
        exchange: &mut dyn Exchange,
        permit: &mut Option<Permit>,
    ) -> Step<SlotWait> {
        let Hit { policy, key, cost, .. } = hit;
        match take {
            Take::Taken(taken) => Step::Forward(self.admitted(taken, hit, exchange, permit)),
            Take::Full(remaining) => self.refuse(remaining, hit, exchange),
            Take::Failed(error) => {
                drop(Permit::insert(None, exchange.extensions_mut()));
                let storage_request = StorageRequest::new(policy, key, Op::Hit, cost);
                self.options.config.on_failure(&error, &[storage_request], exchange)
            }
            Take::Waits(place) => {
                let max_wait = self.options.config.wait.map_or(Duration::ZERO, |bounds| bounds.max_wait);
                let keeps_service_ready = !place.is_seated;
                let take = Box::pin(place.take(max_wait, self.options.time_to_live));
                Step::Wait(SlotWait { policy: policy.clone(), key: key.clone(), cost, take, keeps_service_ready })
            }
        }
    }

    fn admitted(
        &self,
        taken: Taken,
        hit: Hit<'_>,
        exchange: &mut dyn Exchange,
        permit: &mut Option<Permit>,
    ) -> ResponsePlan {
        *permit = Some(Permit::insert(Some(taken.slot), exchange.extensions_mut()));
        self.plan(taken.remaining, hit)
    }

    /// Inserts a permit that holds nothing, for handlers, and returns the plan for the response.
    fn forward(&self, remaining: u32, hit: Hit<'_>, exchange: &mut dyn Exchange) -> ResponsePlan {
        drop(Permit::insert(None, exchange.extensions_mut()));
        self.plan(remaining, hit)
    }

    /// Reports an admission, and returns the plan for its response.
    fn plan(&self, remaining: u32, hit: Hit<'_>) -> ResponsePlan {
        let (config, Hit { policy, key, cost, asked_store }) = (&self.options.config, hit);
        let headers = config.headers;
        let numbers = headers.numbers_in_flight(number_of_slots(policy), remaining).filter(|_| !config.shadow);
        // The log reports when a store that has failed succeeds again.
        let is_from_store = asked_store && self.options.table.is_shared();
        if !(config.wants_decisions || is_from_store) {
            return ResponsePlan::only(numbers);
        }
        let decision = self.decision(policy, remaining, cost, true);
        self.report(&decision, hit);
        let request = StorageRequest::new(policy, key, Op::Hit, cost);
        let other_fields = headers.other_fields_of(slice::from_ref(&decision), &[request]).filter(|_| !config.shadow);
        ResponsePlan { numbers, after: other_fields.map(|fields| Box::new(PostResponse::of_fields(headers, fields))) }
    }

    fn refuse(&self, remaining: u32, hit: Hit<'_>, exchange: &mut dyn Exchange) -> Step<SlotWait> {
        let (config, Hit { policy, key, cost, .. }) = (&self.options.config, hit);
        // More can be free: requests that wait have them, or the store has not answered.
        let remaining = remaining.min(cost.saturating_sub(1));
        let decision = self.decision(policy, remaining, cost, false);
        self.report(&decision, hit);
        if config.shadow {
            drop(Permit::insert(None, exchange.extensions_mut()));
            return Step::Forward(ResponsePlan::NOTHING);
        }
        config.respond_to_refused(&[decision], &[StorageRequest::new(policy, key, Op::Hit, cost)], exchange);
        Step::Respond
    }

    fn report(&self, decision: &Decision, Hit { policy, key, asked_store, .. }: Hit<'_>) {
        let config = &self.options.config;
        if asked_store {
            config.report(EventKind::Decided(decision), policy, Some(key));
        } else {
            config.report_without_storage(decision, policy, key);
        }
    }

    /// Returns the decision on a request after which `remaining` slots are free.
    fn decision(&self, policy: &Policy, remaining: u32, cost: u32, is_admitted: bool) -> Decision {
        let (slots, wait) = (number_of_slots(policy), micros(self.options.retry_after).max(1));
        let reset = if remaining < slots { wait } else { 0 };
        let status = if is_admitted {
            Status::admitted(slots, remaining, reset)
        } else {
            Status::refused(slots, remaining, reset, (cost <= slots).then_some(wait))
        };
        Decision::new(Timestamp::wall_clock(), cost, status)
    }
}
