//! The implementation of the middleware: its configuration, the admission of a request, and the
//! work after its response.

pub(crate) mod admission;
pub(crate) mod config;
mod inspect;
mod lints;
#[cfg(feature = "lookup")]
mod lookup;
mod on_error;
pub(crate) mod options;
pub(crate) mod post_response;
mod reject;
pub(crate) mod state;
mod usage;
mod wait;
pub(crate) mod waiting_room;

pub use self::config::OnError;
pub use self::options::{ChosenPolicy, IntoCost, IntoPolicySource, PolicySource, ResponseHead, policy_by};
