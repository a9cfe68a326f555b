//! The response to the page: a picture, a summary and a table for each lane.

use std::time::Instant;

use serde_json::{Value, json};

use crate::setup::Checked;
use crate::simulate::{Decided, Lane, Verdict, lanes};
use crate::{draw, promise, snippet};

pub(crate) fn answer(setup: &Checked) -> Value {
    let started = Instant::now();
    let lanes = lanes(setup);
    let micros = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
    json!({
        "hits": lanes.iter().map(|lane| lane.hits.len()).sum::<usize>(),
        "micros": micros,
        "lanes": lanes.iter().map(|lane| of_lane(lane, setup)).collect::<Vec<_>>(),
    })
}

fn of_lane(lane: &Lane, setup: &Checked) -> Value {
    let bands = draw::bands(lane, setup);
    let summary = summary(lane);
    let label = draw::escaped(&format!("{}: {summary}", title(lane)));
    let (width, height) = (setup.width, bands.height);
    let idea = if lane.policy.limits().len() == 1 { promise::of(&lane.policy.limits()[0]).idea } else { "" };
    json!({
        "title": title(lane),
        "strategy": lane.policy.limits()[0].strategy().name(),
        "idea": idea,
        "policy": lane.policy.to_string(),
        "svg": format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height:.0}\" role=\"img\" \
             aria-label=\"{label}\" fill=\"currentColor\" font-size=\"11\">{}</svg>",
            bands.svg
        ),
        "admitted": lane.admitted(),
        "delayed": lane.delayed(),
        "refused": lane.refused(),
        "summary": summary,
        "rows": rows(lane, setup),
        "rust": snippet::of(&lane.policy),
    })
}

pub(crate) fn title(lane: &Lane) -> String {
    let titles: Vec<&str> = lane.policy.limits().iter().map(|limit| promise::of(limit).title).collect();
    titles.join(" and ")
}

/// Describes the picture in a sentence or two.
pub(crate) fn summary(lane: &Lane) -> String {
    let (all, admitted, refused, delayed) = (lane.hits.len(), lane.admitted(), lane.refused(), lane.delayed());
    let mut summary = format!("{admitted} of {all} hits admitted, {refused} refused");
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

/// Counts the hits in each period.
fn rows(lane: &Lane, setup: &Checked) -> Vec<Value> {
    let row = |turn: u64| {
        let (from, until) = (turn * setup.period, (turn + 1) * setup.period);
        let inside: Vec<&Decided> = lane.hits.iter().filter(|it| (from..until).contains(&it.hit.at)).collect();
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
