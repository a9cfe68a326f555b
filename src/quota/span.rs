/// The lowest bit of the shift in the mark of a bucket's state. The bits above it hold the shift.
pub(crate) const MARK_SHIFT: u32 = 26;

/// The lowest bit of the size in the mark of a bucket's state. The bits below it hold the anchor.
pub(crate) const MARK_SIZE: u32 = 16;

/// A time span: whole microseconds, and a fraction in units of 1/N microseconds, where N is the
/// amount of the quota.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Span {
    pub(crate) micros: u64,
    pub(crate) part: u32,
}

impl Span {
    /// Returns the span in whole microseconds, rounded up.
    #[inline]
    pub(crate) const fn micros_up(self) -> u64 {
        self.micros + (self.part > 0) as u64
    }

    /// Returns the largest mark that the state of a bucket can have if the bucket refills in this
    /// span: a shift, the shifted span and an anchor. `strategy::mark` describes the layout.
    #[allow(clippy::cast_possible_truncation)] // 10 bits
    pub(crate) const fn largest_mark(self) -> u32 {
        let span = self.micros_up();
        let shift = (64 - span.leading_zeros()).saturating_sub(MARK_SHIFT - MARK_SIZE);
        shift << MARK_SHIFT | ((span >> shift) as u32) << MARK_SIZE | ((1 << MARK_SIZE) - 1)
    }

    /// Returns the span of `parts` units of 1/`amount` microseconds. Saturates at `u64::MAX`
    /// microseconds.
    #[allow(clippy::cast_possible_truncation)]
    pub(super) const fn of(amount: u32, parts: u128) -> Self {
        if parts <= u64::MAX as u128 {
            let (parts, amount) = (parts as u64, amount as u64);
            return Self { micros: parts / amount, part: (parts % amount) as u32 };
        }
        let micros = parts / amount as u128;
        let micros = if micros < u64::MAX as u128 { micros as u64 } else { u64::MAX };
        Self { micros, part: (parts % amount as u128) as u32 }
    }
}
