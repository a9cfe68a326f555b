/// A strategy's rule in Lua, for a storage that decides inside its server: see [`Strategy::script`](super::Strategy::script).
///
/// The sources are pieces of one script, in which each piece stands once. They define functions (global ones by the look of them: the script
/// declares them) called by the [`name`](Self::name), with `_` for what is no letter or digit, and one of:
///
/// - `NAME_hit(now, cost, till, a, b, at)` answers the state after a hit, as `till, a, b, delay`, or nothing when it refuses;
/// - `NAME_refuse(now, till, a, b, at)`, only if a refusal changes a live state, answers that;
/// - `NAME_refund(now, cost, till, a, b, at, hit)` answers the state without a hit (`hit.at`, `hit.till`, `hit.anchor`), with a `till` of 0 for
///   none, or nothing when nothing changes.
///
/// `till`, `a` and `b` are a [`State::Counts`](super::State::Counts), zeros for none. The arguments are `ARGV[at]` to `ARGV[at + 4]`,
/// as text. What follows a line `-- Only for refunds.` is left out of scripts that decide. All functions are pure. Numbers are doubles, exact up to 2^53.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::exhaustive_structs)] // a strategy fills in all there is
pub struct Script {
    /// What the functions are found by.
    pub name: &'static str,
    /// The pieces, in the order in which they need each other.
    pub sources: &'static [&'static str],
    /// What the functions need to know of the quota and of the cost.
    pub arguments: [u64; 5],
}
