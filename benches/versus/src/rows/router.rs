//! The cost that a layer adds to a router, without the cost of an empty layer, because axum boxes
//! each layer.

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use tower_layer::Identity;
use tower_ratelimit::Headers;

use crate::measure::{Samples, interleave, time};
use crate::rows::middleware::{call, ours, peer, peer_with_headers};
use crate::table::{Goal, Table, Unit};

const BARE: &str = "Router, no headers";
const HEADERS: &str = "Router, three headers";
const LAYER: &str = "Router, a layer that does nothing";

pub fn measure(table: &mut Table) {
    if !table.wants_any([BARE, HEADERS, LAYER]) {
        return;
    }
    let router = || Router::new().route("/", get(async || ()));
    let (mut plain, mut empty) = (router(), router().layer(Identity::new()));
    let (mut bare, mut peers_bare) = (router().layer(ours().headers(Headers::none())), router().layer(peer()));
    let (mut with_headers, mut peers_with_headers) = (router().layer(ours()), router().layer(peer_with_headers()));

    let [plain, empty, samples @ ..] = interleave([
        &mut || time(|| call(&mut plain, StatusCode::OK)),
        &mut || time(|| call(&mut empty, StatusCode::OK)),
        &mut || time(|| call(&mut bare, StatusCode::OK)),
        &mut || time(|| call(&mut peers_bare, StatusCode::OK)),
        &mut || time(|| call(&mut with_headers, StatusCode::OK)),
        &mut || time(|| call(&mut peers_with_headers, StatusCode::OK)),
    ]);
    let samples: [Samples; 4] = samples;
    let [bare, peers_bare, with_headers, peers_with_headers] = samples.map(|sample| sample.minus(&empty));
    table.row(BARE, Unit::Nanoseconds, &bare, ("tower_governor", &peers_bare), Goal::None);
    table.row(HEADERS, Unit::Nanoseconds, &with_headers, ("tower_governor", &peers_with_headers), Goal::None);
    table.row(LAYER, Unit::Nanoseconds, &empty, ("no layer", &plain), Goal::None);
}
