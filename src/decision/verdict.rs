use std::fmt;

/// The storage that decided: the primary storage, or the fallback of a
/// [`Breaker`](crate::storage::Breaker). See [`Decision::source`](crate::Decision::source).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a storage has at most one fallback")]
pub enum DecisionSource {
    /// The primary storage, or the only one.
    Primary,
    /// The fallback.
    Fallback,
}

/// The answer (admitted, or the kind of refusal) and the source, in one 32-bit word to keep
/// decisions small.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Verdict(u32);

/// The bit that is set if the fallback decided. The bits below it are the answer.
const FALLBACK: u32 = 1 << 8;

impl Verdict {
    pub(super) const ADMITTED: Self = Self(0);
    pub(super) const REFUSED: Self = Self(1);
    // Refusals by the storage instead of a strategy.
    pub(super) const STORAGE_FULL: Self = Self(2);
    pub(super) const CONTENDED: Self = Self(3);

    /// Returns `true` if this is the answer. Ignores the source.
    #[inline]
    pub(super) const fn is(self, answer: Self) -> bool {
        self.0 & !FALLBACK == answer.0
    }

    /// Replaces the answer and keeps the source.
    pub(super) const fn instead(self, answer: Self) -> Self {
        Self(self.0 & FALLBACK | answer.0)
    }

    pub(super) const fn source(self) -> DecisionSource {
        if self.0 & FALLBACK == 0 { DecisionSource::Primary } else { DecisionSource::Fallback }
    }

    pub(super) const fn via(self, source: DecisionSource) -> Self {
        match source {
            DecisionSource::Primary => Self(self.0 & !FALLBACK),
            DecisionSource::Fallback => Self(self.0 | FALLBACK),
        }
    }
}

impl fmt::Debug for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let answer = match self.via(DecisionSource::Primary) {
            Self::ADMITTED => "Admitted",
            Self::STORAGE_FULL => "StorageFull",
            Self::CONTENDED => "Contended",
            _ => "Refused",
        };
        f.write_str(answer)?;
        if self.source() == DecisionSource::Fallback { f.write_str(" by a fallback") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answer_and_source_are_independent() {
        for answer in [Verdict::ADMITTED, Verdict::REFUSED, Verdict::STORAGE_FULL, Verdict::CONTENDED] {
            assert_eq!(answer.source(), DecisionSource::Primary);
            for source in [DecisionSource::Primary, DecisionSource::Fallback] {
                let verdict = answer.via(source);
                assert!(verdict.is(answer));
                assert_eq!(verdict.source(), source);
                assert_eq!(verdict.instead(Verdict::REFUSED).instead(answer), verdict);
                assert_eq!(verdict.via(DecisionSource::Primary), answer);
            }
        }
    }

    #[test]
    fn debug_output_shows_the_answer_and_a_fallback() {
        assert_eq!(format!("{:?}", Verdict::ADMITTED), "Admitted");
        assert_eq!(format!("{:?}", Verdict::STORAGE_FULL.via(DecisionSource::Fallback)), "StorageFull by a fallback");
    }
}
