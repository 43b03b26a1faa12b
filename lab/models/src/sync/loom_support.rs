//! Models of the parts of the primitives, and an executor for their futures.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use loom::sync::MutexGuard;
use loom::thread::{self, Thread};

/// A mutex that is never poisoned, as `parking_lot` has it.
#[derive(Debug)]
pub(super) struct Mutex<T>(loom::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(super) fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().expect("no model panics under a lock")
    }
}

impl<T: Default> Default for Mutex<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

/// A model of `event_listener::Event`: a notification wakes the tasks that listen already.
#[derive(Debug)]
pub struct Event(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    notifications: usize,
    waiting: Vec<Waker>,
}

impl Event {
    pub(super) fn new() -> Self {
        Self(Arc::new(Mutex::new(State::default())))
    }

    pub(super) fn listen(&self) -> EventListener {
        let since = self.0.lock().notifications;
        EventListener { event: Arc::clone(&self.0), since }
    }

    pub(super) fn notify(&self, count: usize) {
        assert_eq!(count, usize::MAX, "the model wakes all");
        let waiting = {
            let mut state = self.0.lock();
            state.notifications += 1;
            std::mem::take(&mut state.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }
}

/// Resolves with the first notification after the listener was created.
#[derive(Debug)]
pub struct EventListener {
    event: Arc<Mutex<State>>,
    since: usize,
}

impl Future for EventListener {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut state = self.event.lock();
        if state.notifications != self.since {
            return Poll::Ready(());
        }
        state.waiting.push(context.waker().clone());
        Poll::Pending
    }
}

/// Wakes a thread of the model.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future to its end on the current thread of a model.
pub(super) fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}
