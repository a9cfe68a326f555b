//! The example playground in Chromium, and streams of events. `scripts/playground-test` runs these
//! tests and writes the screenshots to `target/playground`.

mod streams;
mod visit;

use visit::Visit;

/// The number of lanes in the page.
const LANES: &str = "document.querySelectorAll('#lanes svg').length";

/// The opacity of the lanes, which are dimmed while the setup is invalid.
const OPACITY: &str = "Number(getComputedStyle(document.getElementById('lanes')).opacity)";

/// The titles of the lanes of all strategies, and of requests in flight.
const TITLES: [&str; 8] = [
    "Fixed window",
    "Sliding window counter",
    "Moving window",
    "Elastic window",
    "Lockout",
    "Token bucket",
    "Leaky bucket",
    "Requests in flight",
];

/// Waits until all lanes are shown.
async fn until_all(visit: &Visit) {
    visit.until(&format!("{LANES} === {}", TITLES.len())).await;
}

#[tokio::test]
async fn valid_policy_shows_lanes_and_invalid_policy_shows_an_error() {
    let visit = Visit::start("").await;
    until_all(&visit).await;
    let titles: Vec<String> =
        visit.value("[...document.querySelectorAll('.lane h2')].map(title => title.textContent)").await;
    assert_eq!(titles, TITLES);

    visit.fill("#policy", "10/fortnight").await;
    visit.until("!document.getElementById('policy-error').hidden").await;
    let error = visit.text("#policy-error").await;
    assert!(error.contains("cannot read the unit \"fortnight\""), "{error}");
    visit.until("document.getElementById('policy').ariaInvalid === 'true'").await;
    // The lanes of the last valid policy stay, dimmed.
    until_all(&visit).await;
    visit.until(&format!("{OPACITY} < 0.5")).await;
    visit.screenshot("error", 1280, false).await;

    visit.fill("#policy", "token-bucket 5/second burst 8; 20/minute").await;
    visit.until(&format!("{LANES} === 8 && document.getElementById('policy-error').hidden")).await;
    visit.until(&format!("{OPACITY} === 1")).await;
    visit.click("input[value=policy] + span").await;
    visit.until(&format!("{LANES} === 1")).await;
    assert_eq!(visit.text(".lane h2").await, "Token bucket and Sliding window counter");
    visit.screenshot("policy", 1600, false).await;

    visit.fill("#hits", "20001").await;
    visit.until("document.getElementById('hits-error').textContent.includes('at most 20000')").await;
    visit.end().await;
}

#[tokio::test]
async fn each_kind_of_traffic_shows_lanes() {
    let visit = Visit::start("").await;
    for traffic in ["steady", "bursts", "greedy", "poisson", "zipf", "retry", "mixed"] {
        until_all(&visit).await;
        visit.choose("#traffic", traffic).await;
        // The address changes before the request for new lanes.
        visit.until(&format!("'{traffic}' === (new URLSearchParams(location.search).get('traffic') ?? 'mixed')")).await;
        visit.until("document.getElementById('lanes').getAttribute('aria-busy') === 'false'").await;
        until_all(&visit).await;
        visit.screenshot(&format!("traffic-{traffic}"), 1600, false).await;
    }
    visit.fill("#hits", "10000").await;
    visit.until("document.getElementById('status').textContent.startsWith('80000')").await;
    visit.screenshot("many-hits", 1600, false).await;
    visit.end().await;
}

#[tokio::test]
async fn pages_fit_narrow_and_wide_screens_in_light_and_dark() {
    let visit = Visit::start("?policy=10/minute").await;
    until_all(&visit).await;
    for tab in ["compare", "try", "copy"] {
        visit.click(&format!("#tab-{tab}")).await;
        if tab == "try" {
            visit.click("[data-send='25']").await;
            visit.until("document.querySelectorAll('#responses li').length === 25").await;
        }
        for (width, dark) in [(360, false), (360, true), (1280, false), (1280, true)] {
            let light = if dark { "dark" } else { "light" };
            let wide = visit.screenshot(&format!("{tab}-{width}-{light}"), width, dark).await;
            assert!(wide <= width, "{tab} is {wide} pixels wide on a screen of {width}");
            let cut: u32 = visit
                .value("[...document.querySelectorAll('pre')].filter(it => it.scrollWidth > it.clientWidth).length")
                .await;
            assert_eq!(cut, 0, "the code is wider than its box on a screen of {width}");
        }
    }
    // Each picture, field and button has an accessible name.
    let unnamed: u32 = visit
        .value(
            "document.querySelectorAll('#lanes svg:not([role=img][aria-label*=admitted])').length
             + [...document.querySelectorAll('input, select')].filter(it => it.labels.length === 0).length
             + [...document.querySelectorAll('button')].filter(it => !it.textContent.trim()).length",
        )
        .await;
    assert_eq!(unnamed, 0);
    visit.end().await;
}

#[tokio::test]
async fn each_need_has_a_recommended_strategy() {
    let visit = Visit::start("?policy=7/second&need=lockout").await;
    visit.until("document.querySelector('.recommended h2')?.textContent === 'Lockout'").await;
    for (need, title) in [
        ("lockout", "Lockout"),
        ("moving-window", "Moving window"),
        ("token-bucket", "Token bucket"),
        ("leaky-bucket", "Leaky bucket"),
        ("fixed-window", "Fixed window"),
    ] {
        visit.click(&format!("[name=need][value={need}] + span")).await;
        visit.until(&format!("document.querySelector('.recommended h2')?.textContent === '{title}'")).await;
        let text = visit.text("#recommended").await;
        assert!(text.contains(&format!("use {title}, {need} 7/second")), "{text}");
        for width in [360, 1280] {
            visit.screenshot(&format!("need-{need}-{width}"), width, false).await;
        }
    }
    visit.click("#recommended button").await;
    visit.until(&format!("{LANES} === 1 && document.getElementById('policy').value === 'fixed-window 7/second'")).await;
    visit.until("document.querySelector('#recommended button').hidden").await;
    visit.click("[name=need][value=token-bucket] + span").await;
    until_all(&visit).await;
    visit.end().await;
}

#[tokio::test]
async fn policy_field_shows_long_policies() {
    let visit = Visit::start("").await;
    for (width, policy) in [
        (360, "lockout 5/10m for 15m x2 up to 1d"),
        (1280, "token-bucket 10/second burst 20; 1000/day; lockout 100 refusals/m for 1h x2 up to 1d"),
    ] {
        visit.resize(width).await;
        visit.fill("#policy", policy).await;
        let fits = "(field => field.scrollWidth <= field.clientWidth)(document.getElementById('policy'))";
        assert!(visit.value::<bool>(fits).await, "{policy} is wider than its field on a screen of {width}");
    }
    visit.end().await;
}

#[tokio::test]
async fn two_lanes_are_in_view_together_on_a_phone() {
    let visit = Visit::start("").await;
    until_all(&visit).await;
    visit.resize(360).await;
    let heights: Vec<f64> = visit
        .value(
            "[...document.querySelectorAll('.lane')].map(lane => lane.getBoundingClientRect())
             .slice(1).map((lane, at) => lane.bottom - document.querySelectorAll('.lane')[at].getBoundingClientRect().top)",
        )
        .await;
    // `innerHeight` is larger if the page is wider than the screen.
    let screen = f64::from(visit::PHONE_HEIGHT);
    assert!(heights.len() == 7 && heights.iter().all(|height| *height <= screen), "{heights:?}");
    visit.end().await;
}

#[tokio::test]
async fn refused_client_is_admitted_when_the_countdown_ends() {
    let visit = Visit::start("?tab=try&mode=policy&policy=moving-window%203/4s").await;
    visit.until("document.querySelectorAll('#trial option').length === 1").await;
    for count in 1.. {
        visit.click("[data-send='1']").await;
        visit.until(&format!("document.querySelectorAll('#responses li').length === {count}")).await;
        visit.until("!document.querySelector('[data-send=\"1\"]').disabled").await;
        let newest = visit.text("#responses li:first-child strong").await;
        if newest == "429" {
            break;
        }
        assert!(newest == "200" && count < 20, "request {count}: {newest}");
    }
    let fields = visit.text("#fields").await;
    for field in ["x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset", "ratelimit-policy", "retry-after"]
    {
        assert!(fields.contains(field), "{field} is missing: {fields}");
    }
    visit.screenshot("countdown", 1600, false).await;
    visit.until("document.getElementById('countdown').classList.contains('ready')").await;
    let before: u32 = visit.value("document.querySelectorAll('#responses li').length").await;
    visit.click("[data-send='1']").await;
    visit.until(&format!("document.querySelectorAll('#responses li').length === {}", before + 1)).await;
    assert_eq!(visit.text("#responses li:first-child strong").await, "200");
    visit.end().await;
}

#[tokio::test]
async fn link_shows_the_same_picture() {
    let lanes = "document.getElementById('lanes').innerHTML";
    let visit = Visit::start("").await;
    until_all(&visit).await;
    visit.fill("#policy", "7/second burst 3").await;
    visit.choose("#traffic", "zipf").await;
    visit.fill("#periods", "3").await;
    visit.until("location.search.includes('periods=3') && document.querySelectorAll('#lanes [aria-label*=\"Token bucket\"]').length").await;
    visit.until("document.getElementById('lanes').getAttribute('aria-busy') === 'false'").await;
    let (link, before): (String, String) = (visit.value("location.search").await, visit.value(lanes).await);

    let other = Visit::start(&link).await;
    until_all(&other).await;
    let after: String = other.value(lanes).await;
    assert!(before == after, "{link} shows another picture");
    other.end().await;
    visit.end().await;
}

#[tokio::test]
async fn keyboard_reaches_tabs_and_the_time_line() {
    let visit = Visit::start("?traffic=clicks&policy=2/minute").await;
    until_all(&visit).await;
    visit.focus("#timeline").await;
    for key in ["Home", "Enter", "ArrowRight", "Enter", "ArrowRight", "Enter", "PageUp", "Enter"] {
        visit.press("#timeline", key).await;
    }
    visit.until("new URLSearchParams(location.search).get('at') === '0,100,200,1200'").await;
    visit.until("document.querySelector('#lanes svg').ariaLabel.includes('of 4 hits')").await;
    visit.press("#timeline", "Backspace").await;
    visit.until("document.querySelector('#lanes svg').ariaLabel.includes('of 3 hits')").await;

    visit.focus("#tab-compare").await;
    visit.press("#tab-compare", "ArrowRight").await;
    visit.until("!document.getElementById('try').hidden && document.activeElement.id === 'tab-try'").await;
    visit.press("#tab-try", "ArrowRight").await;
    visit.until("!document.getElementById('copy').hidden && location.search.includes('tab=copy')").await;
    let code = visit.text("#snippets pre").await;
    assert!(code.contains("Policy::new(FixedWindow::new(), Quota::per_minute(2))"), "{code}");
    visit.click("#snippets button").await;
    visit.until("document.querySelector('#snippets button').textContent === 'Copied'").await;
    visit.end().await;
}
