//! The middleware: requests, responses and keys.

mod allow_list;
mod charge;
mod client_ip;
mod extractors;
mod fuzz_corpus;
#[cfg(feature = "grpc")]
mod grpc;
mod handlers;
mod headers;
mod lints;
mod log;
mod middleware;
#[cfg(feature = "metrics")]
mod observe;
mod rejections;
mod shadow;
mod stacking;
mod waiting;
