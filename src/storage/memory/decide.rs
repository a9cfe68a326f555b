//! The entry points of decisions. They select the code path by the number of limits.

use std::slice;

use super::MemoryInner;
use super::answer::{Answer, Fast, Full, Mode};
use crate::decision::Decision;
use crate::policy::Op;
use crate::storage::{StorageRequest, Summary};
use crate::strategy::Status;

impl MemoryInner {
    #[inline]
    pub(super) fn decide(&self, request: &StorageRequest<'_>) -> Decision {
        let mut decision = Decision::blank();
        if request.op == Op::Charge {
            self.decide_any(self.look_up(self.locate_request(request)), request, Full(&mut decision));
        } else {
            self.answer(request, Full(&mut decision));
        }
        decision.set_policy(request.policy.digest());
        decision.set_ahead(self.clock.ahead());
        self.lengthen_waits(|| decision.limits_mut());
        decision
    }

    #[inline]
    pub(super) fn try_admit(&self, request: &StorageRequest<'_>, mode: Mode, summary: Option<&mut Summary>) -> bool {
        let Some(summary) = summary else { return self.answer(request, Fast { mode, summary: None }) };
        let is_admitted = self.answer(request, Fast { mode, summary: Some(summary) });
        self.lengthen_waits(|| slice::from_mut(&mut summary.limit));
        // Header fields report the time of the wall clock, like `Decision::wall_at`.
        summary.at = summary.at.minus(u64::from(self.clock.ahead()) * 1_000_000);
        is_admitted
    }

    /// Adds the resolution of the clock to the waits of a refusal. Each answer of the storage that
    /// can contain a wait passes here.
    #[inline]
    fn lengthen_waits<'a>(&self, statuses: impl FnOnce() -> &'a mut [Status]) {
        if self.resolution > 0 {
            for status in statuses() {
                status.lengthen_wait(self.resolution);
            }
        }
    }

    fn answer<A: Answer>(&self, request: &StorageRequest<'_>, answer: A) -> A::Output {
        if request.policy.limits().len() == 1 {
            return self.decide_small::<1, A>(request, answer);
        }
        self.answer_several(request, answer)
    }

    /// A separate function, because the jump table would slow down policies with one limit.
    #[inline(never)]
    fn answer_several<A: Answer>(&self, request: &StorageRequest<'_>, answer: A) -> A::Output {
        match request.policy.limits().len() {
            2 => self.decide_small::<2, A>(request, answer),
            3 => self.decide_small::<3, A>(request, answer),
            4 => self.decide_small::<4, A>(request, answer),
            5 => self.decide_small::<5, A>(request, answer),
            6 => self.decide_small::<6, A>(request, answer),
            _ => self.decide_any(self.look_up(self.locate_request(request)), request, answer),
        }
    }
}
