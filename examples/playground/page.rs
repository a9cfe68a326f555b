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
