//! The implementation of the middleware: its configuration, the admission of a request, and the
//! work after its response.

mod admission;
mod apply;
pub(crate) mod common;
pub(crate) mod config;
pub(crate) mod exchange;
pub(crate) mod lints;
pub(crate) mod members;
pub(crate) mod options;
pub(crate) mod post_response;
pub(crate) mod progress;
mod respond;
mod settlement;
pub(crate) mod state;
pub(crate) mod step;
mod together;
mod waiting_hits;

pub use self::config::OnError;
pub use self::options::{ChosenPolicy, IntoCost, IntoPolicySource, PolicySource, ResponseHead, policy_by};
