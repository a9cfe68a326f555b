//! A page that shows the effect of each strategy, and of a limit on requests in flight, on traffic,
//! and lets you try a limit.
//!
//! `cargo run --example playground` prints `listening on http://ADDRESS`. `--listen ADDRESS`
//! changes the address. `cargo run --example playground -- pictures FOLDER` draws the pictures of
//! the documentation instead, and `-- snippets` prints the Rust code that the page offers to copy.

#![allow(clippy::format_push_string, reason = "the texts are short")]

mod draw;
mod in_flight;
mod limits;
mod locks;
mod page;
mod pictures;
mod promise;
mod render;
mod series;
mod setup;
mod simulate;
mod snippet;
mod traffic;
mod trial;

/// The code that the page offers to copy, so that the compiler checks it.
#[cfg(test)]
#[rustfmt::skip] // as the page writes it
mod snippets;

use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;

use axum::Json;
use axum::Router;
use axum::extract::{DefaultBodyLimit, Form};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use setup::Setup;

/// The largest body of a request. It fits a list of clicks.
const MAX_BODY: usize = 64 * 1024;

#[tokio::main]
async fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match arguments[..] {
        [] => serve("127.0.0.1:3000").await,
        ["--listen", address] => serve(address).await,
        ["pictures", folder] => pictures::write(Path::new(folder)),
        ["snippets"] => {
            print!("{}", snippet::all());
            Ok(())
        }
        _ => Err("usage: playground [--listen ADDRESS | pictures FOLDER | snippets]".to_owned()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("playground: {error}");
            ExitCode::from(2)
        }
    }
}

async fn serve(address: &str) -> Result<(), String> {
    let listener = tokio::net::TcpListener::bind(address)
        .await
        .map_err(|error| format!("cannot listen on {address}: {error}; choose another address with --listen"))?;
    let address = listener.local_addr().map_err(|error| error.to_string())?;
    println!("listening on http://{address}");
    let service = app().into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, service).await.map_err(|error| error.to_string())
}

fn app() -> Router {
    let simulate = Router::new()
        .route("/simulate", post(simulate))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .layer(limits::of_simulations());
    let page = Router::new().route("/", get(page::file)).route("/{file}", get(page::file)).layer(limits::of_pages());
    page.merge(simulate).merge(trial::route())
}

/// Simulates a setup. The body is the query of the page's address.
async fn simulate(Form(setup): Form<Setup>) -> Response {
    match setup.checked() {
        Ok(checked) => Json(render::answer(&checked)).into_response(),
        Err(invalid) => (StatusCode::UNPROCESSABLE_ENTITY, Json(invalid)).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use axum::body::{Body, to_bytes};
    use axum::extract::ConnectInfo;
    use axum::http::{Request, StatusCode};
    use tower::ServiceExt;

    use super::*;

    async fn send(app: &Router, request: Request<Body>) -> (StatusCode, String) {
        let mut request = request;
        request.extensions_mut().insert(ConnectInfo(SocketAddr::from(([127, 0, 0, 1], 80))));
        let response = app.clone().oneshot(request).await.unwrap();
        let status = response.status();
        let body = to_bytes(response.into_body(), 10 << 20).await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    fn simulation(body: &str) -> Request<Body> {
        let request = Request::post("/simulate").header("content-type", "application/x-www-form-urlencoded");
        request.body(body.to_owned().into()).unwrap()
    }

    #[tokio::test]
    async fn simulation_returns_a_lane_per_strategy_and_one_for_requests_in_flight() {
        let (status, body) = send(&app(), simulation("policy=10/minute")).await;
        assert_eq!(status, StatusCode::OK, "{body}");
        let answer: serde_json::Value = serde_json::from_str(&body).unwrap();
        let titles: Vec<_> = answer["lanes"].as_array().unwrap().iter().map(|lane| &lane["title"]).collect();
        let all = [
            "Fixed window",
            "Sliding window counter",
            "Moving window",
            "Elastic window",
            "Lockout",
            "Token bucket",
            "Leaky bucket",
            "Requests in flight",
        ];
        assert_eq!(titles, all);

        let (status, body) =
            send(&app(), simulation("mode=policy&policy=5/second;%20100/hour&traffic=poisson&hits=20000")).await;
        assert_eq!(status, StatusCode::OK, "{body}");
        let answer: serde_json::Value = serde_json::from_str(&body).unwrap();
        assert_eq!(answer["lanes"].as_array().unwrap().len(), 1);
    }

    #[tokio::test]
    async fn invalid_setups_name_the_field() {
        for (body, field, part) in [
            ("policy=10/fortnight", "policy", "cannot read the unit \\\"fortnight\\\""),
            ("policy=1/s&hits=20001", "hits", "at most 20000"),
            ("policy=1/s&periods=0", "periods", "1 to 20"),
            ("policy=1/s&traffic=clicks&at=1,x", "at", "cannot read"),
            ("policy=1/s;2/s;3/s;4/s;5/s&mode=policy", "policy", "at most 4 limits"),
        ] {
            let (status, answer) = send(&app(), simulation(body)).await;
            assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{body}: {answer}");
            assert!(answer.contains(&format!("\"field\":\"{field}\"")) && answer.contains(part), "{body}: {answer}");
        }
        let long = format!("policy=1/s&at={}", "1,".repeat(MAX_BODY));
        assert_eq!(send(&app(), simulation(&long)).await.0, StatusCode::PAYLOAD_TOO_LARGE);
    }

    #[tokio::test]
    async fn endpoints_are_limited() {
        let app = app();
        let mut last = StatusCode::OK;
        // Invalid setups count, too, and take no time in which units return.
        for _ in 0..10_000 {
            last = send(&app, simulation("policy=none")).await.0;
            if last == StatusCode::TOO_MANY_REQUESTS {
                break;
            }
        }
        assert_eq!(last, StatusCode::TOO_MANY_REQUESTS, "simulations are limited");
        let (status, page) = send(&app, Request::get("/").body(Body::empty()).unwrap()).await;
        assert!(status == StatusCode::OK && page.contains("<title>"), "the page has a limit of its own");
    }

    #[tokio::test]
    async fn trial_route_enforces_the_policy_of_its_query() {
        let app = app();
        let trial = |query: &str| Request::get(format!("/try?{query}")).body(Body::empty()).unwrap();
        assert_eq!(send(&app, trial("policy=1/hour")).await.0, StatusCode::OK);
        let (status, body) = send(&app, trial("policy=1/hour")).await;
        assert_eq!(status, StatusCode::TOO_MANY_REQUESTS);
        let answer: serde_json::Value = serde_json::from_str(&body).unwrap();
        let wait = answer["retry_after_us"].as_u64().unwrap();
        assert!((3_500_000_000..=7_200_000_000).contains(&wait), "{wait}");
        assert_eq!(send(&app, trial("policy=2/hour")).await.0, StatusCode::OK, "each policy has its own states");
        assert_eq!(send(&app, trial("policy=nonsense")).await.0, StatusCode::UNPROCESSABLE_ENTITY);
        assert_eq!(send(&app, trial("")).await.0, StatusCode::BAD_REQUEST);
    }
}
