//! What a layer adds to a router, beyond what any layer does: axum boxes each one.

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
    let (mut told, mut peers_told) = (router().layer(ours()), router().layer(peer_with_headers()));

    let [plain, empty, samples @ ..] = interleave([
        &mut || time(|| call(&mut plain, StatusCode::OK)),
        &mut || time(|| call(&mut empty, StatusCode::OK)),
        &mut || time(|| call(&mut bare, StatusCode::OK)),
        &mut || time(|| call(&mut peers_bare, StatusCode::OK)),
        &mut || time(|| call(&mut told, StatusCode::OK)),
        &mut || time(|| call(&mut peers_told, StatusCode::OK)),
    ]);
    let samples: [Samples; 4] = samples;
    let [bare, peers_bare, told, peers_told] = samples.map(|sample| sample.minus(&empty));
    table.row(BARE, Unit::Nanoseconds, &bare, ("tower_governor", &peers_bare), Goal::None);
    table.row(HEADERS, Unit::Nanoseconds, &told, ("tower_governor", &peers_told), Goal::None);
    table.row(LAYER, Unit::Nanoseconds, &empty, ("no layer", &plain), Goal::None);
}
