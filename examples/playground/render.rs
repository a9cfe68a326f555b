//! The response to the page: a picture, a summary and a table for each lane.

use std::time::Instant;

use serde_json::{Value, json};

use crate::draw::{self, Bands};
use crate::in_flight::{self, InFlightLane};
use crate::setup::{Checked, Mode};
use crate::simulate::{Decided, Hits, Lane, Verdict, lanes};
use crate::{promise, snippet};

pub(crate) fn answer(setup: &Checked) -> Value {
    let started = Instant::now();
    let lanes = lanes(setup);
    // A policy is shown alone.
    let in_flight = (setup.mode == Mode::All).then(|| in_flight::lane(setup));
    let micros = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
    let hits = lanes.iter().map(|lane| &lane.hits).chain(in_flight.iter().map(|lane| &lane.hits));
    let hits: usize = hits.map(|hits| hits.len()).sum();
    let shown = lanes.iter().map(|lane| of_policy(lane, setup));
    let shown: Vec<Value> = shown.chain(in_flight.iter().map(|lane| of_requests_in_flight(lane, setup))).collect();
    json!({ "hits": hits, "micros": micros, "lanes": shown })
}

fn of_policy(lane: &Lane, setup: &Checked) -> Value {
    let limits = lane.policy.limits();
    let shown = Shown {
        title: title(lane),
        strategy: limits[0].strategy().name(),
        idea: if let [limit] = limits { promise::of(limit).idea } else { "" },
        policy: lane.policy.to_string(),
        bands: draw::bands(lane, setup),
        summary: summary(lane),
        rust: snippet::of(&lane.policy),
    };
    shown.json(&lane.hits, setup)
}

fn of_requests_in_flight(lane: &InFlightLane, setup: &Checked) -> Value {
    let (slots, highest) = (lane.slots, lane.in_use.highest());
    let counts = counts(&lane.hits);
    let shown = Shown {
        title: "Requests in flight".to_owned(),
        strategy: "in-flight",
        idea: "Counts requests until they end, not how often they begin.",
        policy: format!("{slots} in flight, each for {}", draw::time(lane.lasting)),
        bands: draw::bands_in_flight(lane, setup),
        summary: format!(
            "{counts}. At most {highest} of a client were in flight, and the limit promises at most {slots}."
        ),
        rust: snippet::in_flight(slots),
    };
    shown.json(&lane.hits, setup)
}

/// A lane as the page shows it.
struct Shown {
    title: String,
    strategy: &'static str,
    idea: &'static str,
    /// The limit as text.
    policy: String,
    bands: Bands,
    summary: String,
    rust: String,
}

impl Shown {
    fn json(&self, hits: &Hits, setup: &Checked) -> Value {
        let Self { title, strategy, idea, policy, bands, summary, rust } = self;
        let label = draw::escaped(&format!("{title}: {summary}"));
        let (width, height) = (setup.width, bands.height);
        json!({
            "title": title,
            "strategy": strategy,
            "idea": idea,
            "policy": policy,
            "svg": format!(
                "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height:.0}\" role=\"img\" \
                 aria-label=\"{label}\" fill=\"currentColor\" font-size=\"11\">{}</svg>",
                bands.svg
            ),
            "admitted": hits.admitted(),
            "delayed": hits.delayed(),
            "refused": hits.refused(),
            "summary": summary,
            "rows": rows(hits, setup),
            "rust": rust,
        })
    }
}

pub(crate) fn title(lane: &Lane) -> String {
    let titles: Vec<&str> = lane.policy.limits().iter().map(|limit| promise::of(limit).title).collect();
    titles.join(" and ")
}

/// Describes the picture in a sentence or two.
pub(crate) fn summary(lane: &Lane) -> String {
    let (mut summary, delayed) = (counts(&lane.hits), lane.hits.delayed());
    if delayed > 0 {
        let longest = lane.hits.iter().filter_map(|it| Some(it.start()? - it.hit.at)).max().unwrap_or(0);
        summary += &format!(", {delayed} delayed by up to {} s", longest.div_ceil(1_000_000));
    }
    for (limit, curves) in lane.policy.limits().iter().zip(&lane.limits) {
        let (most, period) = (curves.trailing.highest(), draw::time(limit.quota().period_micros()));
        summary += &format!(". At most {most} started in any {period}");
        if let Some(promised) = promise::of(limit).most {
            summary += &format!(", and {limit} promises at most {promised}");
        }
    }
    summary + "."
}

fn counts(hits: &Hits) -> String {
    format!("{} of {} hits admitted, {} refused", hits.admitted(), hits.len(), hits.refused())
}

/// Counts the hits in each period.
fn rows(hits: &Hits, setup: &Checked) -> Vec<Value> {
    let row = |turn: u64| {
        let (from, until) = (turn * setup.period, (turn + 1) * setup.period);
        let inside: Vec<&Decided> = hits.iter().filter(|it| (from..until).contains(&it.hit.at)).collect();
        let count = |verdict: fn(Verdict) -> bool| inside.iter().filter(|it| verdict(it.verdict)).count();
        json!({
            "from": draw::time(from),
            "hits": inside.len(),
            "admitted": count(|verdict| verdict == Verdict::Admitted),
            "delayed": count(|verdict| matches!(verdict, Verdict::Delayed(_))),
            "refused": count(|verdict| verdict == Verdict::Refused),
        })
    };
    (0..setup.span / setup.period).map(row).collect()
}
