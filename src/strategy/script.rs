/// A strategy as a Lua script, for storages that decide inside their server. See
/// [`Strategy::script`](super::Strategy::script).
///
/// The sources are pieces of one script. A piece that several strategies share is included once.
/// They define the following functions, where `NAME` is the [`name`](Self::name) with `_` instead
/// of `-`. Write them as global functions. The storage declares them as local.
///
/// - `NAME_hit(now, cost, till, a, b, ...)` returns the state after a hit as `till, a, b, delay`,
///   or nothing for a refusal. A fifth value of `true` means that the state is ahead of the clock.
///   In a refusal, four values of `nil` precede it.
/// - `NAME_refuse(now, till, a, b, ...)` returns the state after a
///   [refusal](super::Strategy::refuse), or nothing if the state does not change. It is called for
///   a state that is ahead of the clock, and after every refusal if the strategy [counts
///   refusals](super::Strategy::counts_refusals).
/// - `NAME_charge(now, cost, till, a, b, ...)` returns the state after a
///   [charge](super::Strategy::charge).
/// - `NAME_refund(now, cost, till, a, b, hit, ...)` returns the state after a refund of `cost`
///   units of a hit (`hit.at`, `hit.till`, `hit.anchor`), or nothing if the state does not change.
///   A `till` of 0 means that no state is left.
///
/// `till`, `a` and `b` are a [`State::Counts`](super::State::Counts), or zeros for no state. `...`
/// stands for the [`arguments`](Self::arguments), which are numbers.
///
/// The code after a line `-- Only for settling.` is removed from scripts that decide. Comments must
/// be on separate lines. All functions must be pure. Numbers are doubles, which are exact up to
/// 2^53.
///
/// The name consists of letters, digits and `-`, and starts with a letter. A script with another
/// name is ignored.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "a strategy fills in every field")]
pub struct Script {
    /// The prefix of the functions. It must differ from those of other strategies.
    pub name: &'static str,
    /// The pieces, in the order of their dependencies.
    pub sources: &'static [&'static str],
    /// The arguments that depend on the quota and the cost. Their number must be constant.
    pub arguments: Vec<u64>,
    /// `true` if the script may admit a hit with a delay. It then returns the delay in
    /// microseconds.
    pub delays: bool,
}
