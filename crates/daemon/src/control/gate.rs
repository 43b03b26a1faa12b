//! A gate that holds off requests during a hand-over. A hand-over begins only if no request is in
//! progress. After a successful hand-over no request is executed, because the images belong to
//! another process.

use std::ops::Deref;
use std::sync::Arc;

use blockhouse_core::sync::Condvar;
use parking_lot::Mutex;

/// A gate that requests pass.
#[derive(Default)]
pub struct Gate {
    state: Mutex<State>,
    opened: Condvar,
}

#[derive(Default)]
struct State {
    inside: usize,
    is_closed: bool,
    is_sealed: bool,
}

/// Guard of a request in progress.
pub struct Inside<G: Deref<Target = Gate>>(G);

/// Guard of the closed gate: no request is executed until this is dropped.
pub struct Closed<'a>(&'a Gate);

impl Gate {
    /// Waits until requests may be executed. `None` if the gate is sealed, because no request is
    /// executed after that.
    pub async fn enter(&self) -> Option<Inside<&Self>> {
        self.opened
            .wait_until(|| {
                let mut state = self.state.lock();
                if state.is_sealed {
                    return Some(None);
                }
                if state.is_closed {
                    return None;
                }
                state.inside += 1;
                Some(Some(Inside(self)))
            })
            .await
    }

    /// As [`enter`](Self::enter), for work that outlives the caller. `None` if the gate is closed.
    pub(crate) fn try_enter(self: Arc<Self>) -> Option<Inside<Arc<Self>>> {
        {
            let mut state = self.state.lock();
            if state.is_sealed || state.is_closed {
                return None;
            }
            state.inside += 1;
        }
        Some(Inside(self))
    }

    /// Whether the gate is sealed: no request is executed from then on.
    pub fn is_sealed(&self) -> bool {
        self.state.lock().is_sealed
    }

    /// Holds off new requests; `None` if a request is in progress or the gate is closed already.
    pub fn try_close(&self) -> Option<Closed<'_>> {
        let mut state = self.state.lock();
        if state.inside > 0 || state.is_closed {
            return None;
        }
        state.is_closed = true;
        Some(Closed(self))
    }
}

impl Closed<'_> {
    /// Refuses all requests from now on.
    pub fn seal(self) {
        self.0.state.lock().is_sealed = true;
    }
}

impl<G: Deref<Target = Gate>> Drop for Inside<G> {
    fn drop(&mut self) {
        self.0.state.lock().inside -= 1;
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.0.state.lock().is_closed = false;
        self.0.opened.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn a_closed_gate_holds_requests_off_and_closes_only_between_them() {
        let gate = Gate::default();
        let inside = gate.enter().now_or_never().flatten().expect("it is open");
        assert!(gate.try_close().is_none());
        drop(inside);
        let closed = gate.try_close().expect("none is inside");
        let mut later = pin!(gate.enter());
        assert!(later.as_mut().now_or_never().is_none());
        drop(closed);
        let inside = later.now_or_never().flatten().expect("it is open again");
        drop(inside);
        gate.try_close().expect("none is inside").seal();
        assert!(gate.enter().now_or_never().is_some_and(|inside| inside.is_none()));
    }
}
