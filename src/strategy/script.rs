/// A strategy as a Lua script, for the Redis storage, which decides inside its server. See
/// [`Strategy::script`](super::Strategy::script).
///
/// The sources define the following functions, where `NAME` is the [`name`](Self::name) with `_`
/// instead of `-`. Write them as global functions. The storage declares them as local, because
/// Redis forbids global ones. Declare all other functions as local.
///
/// - `NAME_hit(now, cost, till, a, b, ...)` returns the state after a hit as `till, a, b, delay`,
///   or nothing for a refusal. The `delay` is in microseconds, and used only if
///   [`delays`](Self::delays) is `true`. If the state is ahead of the clock, the function returns
///   `true` as its fifth value. In a refusal, four values of `nil` precede it.
/// - `NAME_refuse(now, till, a, b, ...)` returns the state after a
///   [refusal](super::Strategy::refuse) as `till, a, b`, or nothing if the state does not change.
///   It is called after a hit that a limit of the policy refuses. For a strategy that [counts
///   refusals](super::Strategy::counts_refusals), it is called if the state has not expired.
///   Otherwise, it is called if the fifth value of `NAME_hit` was `true`.
/// - `NAME_charge(now, cost, till, a, b, ...)` returns the state after a
///   [charge](super::Strategy::charge) as `till, a, b`.
/// - `NAME_refund(now, cost, till, a, b, hit, ...)` returns the state after a refund of `cost`
///   units of a hit (`hit.at`, `hit.till`, `hit.anchor`) as `till, a, b`, or nothing if the state
///   does not change. A `till` of 0 means that no state is left.
///
/// `till`, `a` and `b` are a [`State::Counts`](super::State::Counts), which may have expired, or
/// zeros for no state. `...` stands for the [`arguments`](Self::arguments).
///
/// The code after a line `-- Only for settling.` is removed from scripts that only decide on hits.
/// All functions must be pure. Numbers are doubles, which are exact up to 2^53.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "a strategy fills in every field")]
pub struct Script {
    /// The prefix of the functions. It must differ from those of other strategies. It consists of
    /// ASCII letters, digits and `-`, and starts with a letter. A script with another name is
    /// ignored.
    pub name: &'static str,
    /// The pieces of the Lua source. Each piece comes after the pieces that it uses.
    pub sources: &'static [&'static str],
    /// The numbers that the functions get as their last arguments. They depend on the quota and the
    /// cost. The length must be constant. Numbers above 2^53 are rounded.
    pub arguments: Vec<u64>,
    /// `true` if the script may admit a hit with a delay. Then `NAME_hit` must return the delay.
    pub delays: bool,
}
