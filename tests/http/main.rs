//! The middleware: requests, responses and keys.

mod allow_list;
mod calendar;
mod charge;
mod client;
mod client_ip;
mod client_lists;
mod client_reqwest;
mod clock_resolution;
#[cfg(all(feature = "metrics", feature = "redis"))]
mod dashboard;
mod extractors;
mod fuzz_corpus;
#[cfg(feature = "grpc")]
mod grpc;
mod handlers;
mod header_options;
mod headers;
mod in_flight;
mod inner_fields;
mod lints;
mod live_policy;
mod lockout;
mod log;
mod lookup;
mod lookup_forget;
mod lookup_tenant;
mod memory_refusals;
mod meter;
mod middleware;
mod nat64;
mod near_limit;
#[cfg(feature = "metrics")]
mod observe;
mod panics;
mod probe;
mod readiness;
mod realclientip;
mod rejections;
mod settle;
mod several_keys;
mod shadow;
mod stacked_refusals;
mod stacking;
mod structured_fields;
mod usage;
mod wait;
