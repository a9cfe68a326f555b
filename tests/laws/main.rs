//! The law suites, for correct and for broken implementations.

mod broken_storages;
mod broken_strategies;
mod compare_and_swap;
mod fleets;
mod slots;
mod strategies_and_storages;
mod wrappers;
