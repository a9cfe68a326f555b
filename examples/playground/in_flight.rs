//! The lane of requests in flight: the real layer, whose requests end after a part of a period.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::time::Duration;

use axum::http::header::RETRY_AFTER;
use axum::http::{Request, Response, StatusCode};
use futures_util::FutureExt;
use tower::{Layer, Service, service_fn};
use tower_ratelimit::extract::Extension;
use tower_ratelimit::{InFlightBody, InFlightLayer, Key};

use crate::series::Series;
use crate::setup::Checked;
use crate::simulate::{Decided, Hits, Verdict, send};

/// The share of a period that a request takes.
const PART: u32 = 5;

pub(crate) struct InFlightLane {
    /// The slots of each client.
    pub(crate) slots: u32,
    /// The time that a request takes, in microseconds.
    pub(crate) lasting: u64,
    pub(crate) hits: Hits,
    /// The requests in flight of the first client.
    pub(crate) in_use: Series,
}

/// Lets the traffic take slots. There are as many as requests that arrive at the rate of the quota
/// need.
pub(crate) fn lane(setup: &Checked) -> InFlightLane {
    let slots = setup.policies[0].limits()[0].quota().amount().div_ceil(PART);
    let lasting = setup.period / u64::from(PART);
    let key = Extension::new(|client: &Client| Key::from(u64::from(client.0)));
    let layer = InFlightLayer::new(slots, key).retry_after(Duration::from_micros(lasting));
    let mut service = layer.layer(service_fn(stream));
    let mut lane = InFlightLane { slots, lasting, hits: Hits::default(), in_use: Series::default() };
    lane.in_use.push(0, 0);
    let mut running = VecDeque::new();
    send(&setup.traffic.hits(setup), setup, |hit| {
        lane.end_until(hit.at, &mut running);
        let mut request = Request::new(());
        request.extensions_mut().insert(Client(hit.client));
        let response = service.call(request).now_or_never().expect("no request waits");
        let response = response.unwrap_or_else(|never| match never {});
        let is_admitted = response.status() == StatusCode::OK;
        let seconds = response.headers().get(RETRY_AFTER).and_then(|wait| wait.to_str().ok()?.parse::<u64>().ok());
        if is_admitted {
            running.push_back(Running { end: hit.at.saturating_add(lasting), client: hit.client, _response: response });
        }
        lane.record(hit.at, &running);
        let verdict = if is_admitted { Verdict::Admitted } else { Verdict::Refused };
        lane.hits.push(Decided { hit, verdict });
        seconds.map(|seconds| seconds.saturating_mul(1_000_000))
    });
    lane.end_until(setup.span, &mut running);
    lane
}

/// The client of a request.
#[derive(Clone, Copy)]
struct Client(u8);

/// A request in flight. Its slot is free when the response is dropped.
struct Running {
    end: u64,
    client: u8,
    _response: Response<InFlightBody<String>>,
}

fn stream(_: Request<()>) -> Ready<Result<Response<String>, Infallible>> {
    ready(Ok(Response::new("a stream".to_owned())))
}

impl InFlightLane {
    /// Ends the requests whose time is over.
    fn end_until(&mut self, now: u64, running: &mut VecDeque<Running>) {
        while let Some(end) = running.front().map(|first| first.end).filter(|end| *end <= now) {
            running.pop_front();
            self.record(end, running);
        }
    }

    fn record(&mut self, at: u64, running: &VecDeque<Running>) {
        let count = running.iter().filter(|running| running.client == 0).count();
        self.in_use.push(at, u32::try_from(count).unwrap_or(u32::MAX));
    }
}

#[cfg(test)]
mod tests {
    use super::lane;
    use crate::setup::Setup;
    use crate::traffic::Traffic::{self, Bursts, Greedy, Mixed, Poisson, Retry, Steady, Zipf};

    fn run(traffic: Traffic, policy: &str) -> super::InFlightLane {
        let setup = Setup { traffic, policy: policy.to_owned(), hits: Some(500), ..Setup::default() };
        lane(&setup.checked().unwrap())
    }

    #[test]
    fn clients_have_at_most_their_slots_in_flight_and_reach_them() {
        for traffic in [Mixed, Steady, Bursts, Greedy, Poisson, Zipf, Retry] {
            for (policy, slots) in [("10/minute", 2), ("11/minute", 3), ("1/day", 1)] {
                let lane = run(traffic, policy);
                assert_eq!((lane.slots, lane.in_use.highest()), (slots, slots), "{traffic:?} {policy}");
                assert_eq!(lane.in_use.points().last().map(|point| point.1 <= slots), Some(true));
                assert_eq!(lane.hits.admitted() + lane.hits.refused(), lane.hits.len());
            }
        }
    }

    #[test]
    fn requests_that_arrive_at_the_rate_of_the_quota_are_admitted() {
        let setup = Setup { traffic: Steady, hits: Some(50), ..Setup::default() };
        let lane = lane(&setup.checked().unwrap());
        assert_eq!((lane.hits.admitted(), lane.hits.refused()), (50, 0));
        // Two requests of 12 seconds, one every 6 seconds.
        let points = [(0, 0), (0, 1), (6_000_000, 2), (12_000_000, 1), (12_000_000, 2)];
        assert_eq!(lane.in_use.points()[..5], points);
    }

    #[test]
    fn clients_have_slots_of_their_own() {
        let lane = run(Zipf, "10/minute");
        let admitted = |client: u8| lane.hits.iter().any(|it| it.hit.client == client && it.start().is_some());
        assert!((0..10).all(admitted));
    }
}
