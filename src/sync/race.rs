//! Helpers of the loom models.

use std::sync::Arc;

use loom::thread;

/// Two closures that run at the same time in a model.
#[derive(Clone, Copy)]
pub(crate) struct Race {
    is_swapped: bool,
}

/// Runs the model in all its interleavings, twice: each closure of its race is once the one that loom starts with.
///
/// To find races, loom (0.7) remembers only the last access to each atomic. A thread that loads an atomic before it stores
/// to it thus hides its race with an earlier load of the other thread, and loom does not try the store before that load.
/// When the storing thread starts, loom does.
pub(crate) fn model(f: impl Fn(Race) + Copy + Send + Sync + 'static) {
    for is_swapped in [false, true] {
        loom::model(move || f(Race { is_swapped }));
    }
}

impl Race {
    pub(crate) fn run<T: 'static, A: 'static, B: 'static>(
        self,
        shared: &Arc<T>,
        a: impl FnOnce(&T) -> A + 'static,
        b: impl FnOnce(&T) -> B + 'static,
    ) -> (A, B) {
        let other = Arc::clone(shared);
        if self.is_swapped {
            let a = thread::spawn(move || a(&other));
            let b = b(shared);
            (a.join().unwrap(), b)
        } else {
            let b = thread::spawn(move || b(&other));
            let a = a(shared);
            (a, b.join().unwrap())
        }
    }
}
