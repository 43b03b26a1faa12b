//! Running more futures on the loop of the current thread.

use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use crate::event_loop::local;

/// The outcome of a spawned task, on the same thread. If it is dropped, the task continues.
pub struct Task<T>(Rc<Outcome<T>>);

struct Outcome<T> {
    value: Cell<Option<T>>,
    waiter: Cell<Option<Waker>>,
}

/// Runs a future on the current thread's loop. It shares the turns of the spawning task.
///
/// # Panics
/// Outside of an event loop.
pub fn spawn<F>(future: F) -> Task<F::Output>
where
    F: Future + 'static,
    F::Output: 'static,
{
    let outcome = Rc::new(Outcome { value: Cell::new(None), waiter: Cell::new(None) });
    let result = Rc::clone(&outcome);
    spawn_detached(async move {
        result.value.set(Some(future.await));
        if let Some(waiter) = result.waiter.take() {
            waiter.wake();
        }
    });
    Task(outcome)
}

/// As [`spawn`], for a future whose end no task waits for.
pub fn spawn_detached(future: impl Future<Output = ()> + 'static) {
    local::current(|local| local.tasks.add(Box::pin(future)));
}

/// As [`spawn_detached`], as a party of its own, with turns independent of the others'.
pub(crate) fn spawn_party(future: impl Future<Output = ()> + 'static) {
    local::current(|local| local.tasks.add_party(Box::pin(future)));
}

/// The party of the current task: a future submitted through a [`Handle`](crate::Handle), a
/// client's connection or a guest's queue, with all tasks that it spawned. The number is unique in
/// the process while the party exists; 0 outside of event loops.
pub fn current_party() -> usize {
    local::try_current(|local| local.tasks.current_party()).unwrap_or(0)
}

impl<T> Future for Task<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        match self.0.value.take() {
            Some(value) => Poll::Ready(value),
            None => {
                self.0.waiter.set(Some(cx.waker().clone()));
                Poll::Pending
            }
        }
    }
}
