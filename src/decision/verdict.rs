use std::fmt;

/// The storage that decided, if one storage falls back to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a decision either admits or refuses")]
pub enum DecisionSource {
    /// The primary storage.
    Primary,
    /// The fallback.
    Fallback,
}

/// The answer and the recorded sources, in one word to keep decisions small.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Verdict(u32);

/// The low byte is the answer. Each recorded source adds a bit above it, the last one lowest, which
/// is 1 for a fallback.
const ANSWER: u32 = 0xFF;
const FIRST_WAY: u32 = ANSWER + 1;

impl Verdict {
    pub(super) const ADMITTED: Self = Self(0);
    pub(super) const REFUSED: Self = Self(1);
    // Refusals by the storage instead of a strategy.
    pub(super) const STORAGE_FULL: Self = Self(2);
    pub(super) const CONTENDED: Self = Self(3);

    /// Returns `true` if this is the answer. Ignores the recorded sources.
    #[inline]
    pub(super) const fn is(self, answer: Self) -> bool {
        self.0 & ANSWER == answer.0
    }

    /// Replaces the answer and keeps the recorded sources.
    pub(super) const fn instead(self, answer: Self) -> Self {
        Self(self.0 & !ANSWER | answer.0 & ANSWER)
    }

    pub(super) const fn is_from_fallback(self) -> bool {
        self.0 >= FIRST_WAY
    }

    pub(super) const fn via(self, way: DecisionSource) -> Self {
        let bit = match way {
            DecisionSource::Primary => 0,
            DecisionSource::Fallback => FIRST_WAY,
        };
        Self((self.0 & !ANSWER) << 1 | bit | self.0 & ANSWER)
    }

    pub(super) const fn back(self) -> (DecisionSource, Self) {
        let way = if self.0 & FIRST_WAY == 0 { DecisionSource::Primary } else { DecisionSource::Fallback };
        (way, Self((self.0 & !ANSWER) >> 1 & !ANSWER | self.0 & ANSWER))
    }
}

impl fmt::Debug for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let answer = match Self(self.0 & ANSWER) {
            Self::ADMITTED => "Admitted",
            Self::STORAGE_FULL => "StorageFull",
            Self::CONTENDED => "Contended",
            _ => "Refused",
        };
        f.write_str(answer)?;
        if self.is_from_fallback() { f.write_str(" by a fallback") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn back_returns_the_sources_in_reverse_order() {
        for answer in [Verdict::ADMITTED, Verdict::REFUSED, Verdict::STORAGE_FULL, Verdict::CONTENDED] {
            for ways in 0..32_u32 {
                let ways = (0..5)
                    .map(|bit| if ways >> bit & 1 == 0 { DecisionSource::Primary } else { DecisionSource::Fallback });
                let ways: Vec<DecisionSource> = ways.collect();
                let mut verdict = ways.iter().fold(answer, |verdict, &way| verdict.via(way));
                assert!(verdict.is(answer));
                assert_eq!(verdict.is_from_fallback(), ways.contains(&DecisionSource::Fallback));
                assert_eq!(verdict.instead(Verdict::REFUSED).instead(answer), verdict);
                for &expected in ways.iter().rev() {
                    let (way, before) = verdict.back();
                    assert_eq!(way, expected);
                    verdict = before;
                }
                assert_eq!(verdict, answer);
            }
        }
        assert_eq!(Verdict::ADMITTED.back(), (DecisionSource::Primary, Verdict::ADMITTED));
    }

    #[test]
    fn debug_output_shows_the_answer_and_a_fallback() {
        assert_eq!(format!("{:?}", Verdict::ADMITTED), "Admitted");
        assert_eq!(format!("{:?}", Verdict::STORAGE_FULL.via(DecisionSource::Fallback)), "StorageFull by a fallback");
    }
}
