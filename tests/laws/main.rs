//! The published suites, on what is right and on what is broken.

mod broken_storages;
mod broken_strategies;
mod compare_and_swap;
mod strategies_and_storages;
mod wrappers;
