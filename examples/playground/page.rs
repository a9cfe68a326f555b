//! The files of the page, which are compiled in.

use axum::http::{HeaderName, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JS: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

const FILES: [(&str, &str, &str); 10] = [
    ("/", HTML, include_str!("page/index.html")),
    ("/style.css", CSS, include_str!("page/style.css")),
    ("/controls.css", CSS, include_str!("page/controls.css")),
    ("/icon.svg", SVG, include_str!("page/icon.svg")),
    ("/main.js", JS, include_str!("page/main.js")),
    ("/dom.js", JS, include_str!("page/dom.js")),
    ("/setup.js", JS, include_str!("page/setup.js")),
    ("/compare.js", JS, include_str!("page/compare.js")),
    ("/try.js", JS, include_str!("page/try.js")),
    ("/copy.js", JS, include_str!("page/copy.js")),
];

/// The content security policy: the page loads nothing from other servers.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

pub(crate) async fn file(uri: Uri) -> Response {
    let Some((_, kind, text)) = FILES.iter().find(|(path, ..)| *path == uri.path()) else {
        return (StatusCode::NOT_FOUND, "no such page\n").into_response();
    };
    let fields: [(HeaderName, &str); 4] = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (fields, *text).into_response()
}

#[cfg(test)]
mod tests {
    use tower_ratelimit::Policy;

    /// The first table of the guide: what a user wants, and a policy for it.
    fn choices() -> Vec<(&'static str, Policy)> {
        let guide = include_str!("../../src/guide/choosing_a_strategy.md");
        let table = guide.lines().skip_while(|line| !line.starts_with("| you want |"));
        let rows = table.take_while(|line| line.starts_with('|')).skip(2);
        let row = |row: &'static str| {
            let [_, want, _, text, _] = row.split('|').collect::<Vec<_>>().try_into().expect("three columns");
            (want.trim(), text.trim().trim_matches('`').parse().expect("a policy"))
        };
        rows.map(row).collect()
    }

    #[test]
    fn recommendations_agree_with_the_guide() {
        let page = include_str!("page/index.html");
        let choices = choices();
        let mut needs = 0;
        for need in page.split("name=\"need\" value=\"").skip(1) {
            let (strategy, rest) = need.split_once('"').unwrap();
            let want = rest.split_once("data-want=\"").unwrap().1.split('"').next().unwrap();
            let (_, policy) = choices.iter().find(|(row, _)| *row == want).expect(want);
            let name = policy.limits()[0].strategy().name();
            assert!(name.starts_with(strategy), "the guide recommends {policy} for {want}");
            needs += 1;
        }
        assert_eq!(needs, 5);
    }
}
