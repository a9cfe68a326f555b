//! The permit of a request, in handlers of axum and in the extensions.

use std::convert::Infallible;
use std::future::ready;

use axum::Router;
use axum::body::Body;
use axum::routing::get;
use common::ask;
use common::fake_cas_store::FakeCasStore;
use http::{Request, Response};
use tower::{Layer, service_fn};
use tower_ratelimit::extract::NoPermit;
use tower_ratelimit::{Global, InFlightLayer, OnError, Permit};

use super::shared::cas;
use super::{Script, layer, of};

#[tokio::test]
async fn handlers_extract_the_permit() {
    let app = || {
        let must = |permit: Permit| async move { format!("{permit:?}") };
        let may = |permit: Option<Permit>| async move { format!("{}", permit.is_some()) };
        Router::new().route("/must", get(must)).route("/may", get(may))
    };
    let body = async |app: &Router, path: &str| {
        let response = ask(app, Request::get(path).body(Body::empty()).unwrap()).await;
        let status = response.status().as_u16();
        (status, axum::body::to_bytes(response.into_body(), 1_000).await.unwrap())
    };
    let limited = app().layer(InFlightLayer::new(1, Global::new()));
    assert_eq!(body(&limited, "/must").await, (200, "Permit { .. }".into()));
    assert_eq!(body(&limited, "/may").await, (200, "true".into()));
    for unlimited in [app(), app().layer(InFlightLayer::new(1, Global::new()).skip(|_| true))] {
        assert_eq!(body(&unlimited, "/may").await, (200, "false".into()));
        assert_eq!(body(&unlimited, "/must").await, (500, format!("{}\n", NoPermit::default()).into()));
    }
    let reason = NoPermit::default().to_string();
    assert!(reason.contains("InFlightLayer") && reason.contains("Option<Permit>"), "{reason}");
}

#[tokio::test]
async fn request_that_passes_without_a_slot_has_a_permit_that_holds_nothing() {
    let store = FakeCasStore::default();
    store.fail(true);
    for layer in [layer(0).cost(|_| 0), layer(0).shadow(), layer(1).storage(cas(&store), OnError::Admit)] {
        let service = layer.layer(service_fn(|request: Request<()>| {
            let mut response = Response::new(Script::default());
            response.extensions_mut().insert(request.extensions().get::<Permit>().cloned().unwrap());
            ready(Ok::<_, Infallible>(response))
        }));
        let response = ask(&service, of("a")).await;
        assert_eq!((response.status().as_u16(), layer.in_use()), (200, 0));
    }
}
