/// A strategy's rule in Lua, for a storage that decides inside its server: see [`Strategy::script`](super::Strategy::script).
///
/// The sources are pieces of one script, in which each piece stands once. They define functions (global ones by the look of them: the script
/// declares them) called by the [`name`](Self::name), with `_` for `-`, and one of:
///
/// - `NAME_hit(now, cost, till, a, b, at)` returns the state after a hit as `till, a, b, delay`, or nothing when it refuses.
///   A fifth value of `true`, also after four of `nil`, says that the state is ahead of a clock that has gone back;
/// - `NAME_refuse(now, till, a, b, at)` returns the state after a [refusal](super::Strategy::refuse), or nothing when nothing
///   changes. It is called for a state that is ahead of the clock, and always if the strategy
///   [counts refusals](super::Strategy::counts_refusals);
/// - `NAME_refund(now, cost, till, a, b, at, hit)` answers the state without a hit (`hit.at`, `hit.till`, `hit.anchor`), with a `till` of 0 for
///   none, or nothing when nothing changes.
///
/// `till`, `a` and `b` are a [`State::Counts`](super::State::Counts), zeros for none. The arguments are `ARGV[at]` and those that follow,
/// as text. What follows a line `-- Only for refunds.` is left out of scripts that decide; comments stand on lines of their own. All functions
/// are pure. Numbers are doubles, exact up to 2^53.
///
/// The name is letters, digits and `-`, beginning with a letter; a strategy with another one runs as if it had no script.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "a strategy fills in every field")]
pub struct Script {
    /// What the functions are found by: not the name of another strategy's.
    pub name: &'static str,
    /// The pieces, in the order in which they need each other.
    pub sources: &'static [&'static str],
    /// What the functions need to know of the quota and of the cost: always as many.
    pub arguments: Vec<u64>,
    /// Whether a hit may be admitted with a delay, which is in microseconds.
    pub delays: bool,
}
