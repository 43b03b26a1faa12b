//! The queue of tasks that wait for a slot in a full table, first come, first served.
//!
//! Guarantees:
//! - A slot that becomes free while a task waits is reserved for the task that waits longest. Tasks
//!   that have just released a slot cannot overtake it again and again.
//! - A task that was woken and then dropped passes its slot on to the next.
//! - To wait costs one entry, however often a task is polled.

use std::collections::VecDeque;
use std::task::Waker;

/// The tasks that wait for a slot.
#[derive(Default)]
pub(crate) struct WaitQueue {
    /// The waiting tasks, in the order of their tickets.
    waiting: VecDeque<(Ticket, Waker)>,
    issued: u64,
    woken: usize,
}

/// A position in the queue. Its owner passes it to `try_acquire` until it has a slot, or to
/// `cancel`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ticket(u64);

impl WaitQueue {
    /// How many free slots are reserved for tasks that were woken and have not run yet.
    pub(crate) fn reserved(&self) -> usize {
        self.woken
    }

    /// Adds a task at the end. [`wake_next`](Self::wake_next) returns `waiter` when it is the
    /// task's turn.
    pub(crate) fn enqueue(&mut self, waiter: &Waker) -> Ticket {
        self.issued += 1;
        let ticket = Ticket(self.issued);
        self.waiting.push_back((ticket, waiter.clone()));
        ticket
    }

    /// Whether the holder was woken. If so, it has the reserved slot, and the ticket is used up.
    /// Otherwise `waiter` replaces its waker.
    pub(crate) fn try_acquire(&mut self, ticket: Ticket, waiter: &Waker) -> bool {
        match self.find(ticket) {
            Some(index) => {
                self.waiting[index].1.clone_from(waiter);
                false
            }
            None => {
                self.woken -= 1;
                true
            }
        }
    }

    /// A slot is free: reserves it for the next task, which the caller wakes.
    #[must_use]
    pub(crate) fn wake_next(&mut self) -> Option<Waker> {
        let (_, waiter) = self.waiting.pop_front()?;
        self.woken += 1;
        Some(waiter)
    }

    /// Ends the wait of a ticket's holder. If the holder was woken already, its slot is passed on:
    /// returns the waker of the next task, which the caller wakes.
    #[must_use]
    pub(crate) fn cancel(&mut self, ticket: Ticket) -> Option<Waker> {
        match self.find(ticket) {
            Some(index) => {
                self.waiting.remove(index);
                None
            }
            None => {
                self.woken -= 1;
                self.wake_next()
            }
        }
    }

    /// The holder's index in the queue; `None` if it was woken.
    fn find(&self, ticket: Ticket) -> Option<usize> {
        self.waiting.binary_search_by_key(&ticket, |&(other, _)| other).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_reserved_in_the_order_of_arrival() {
        let mut queue = WaitQueue::default();
        let [first, second] = [queue.enqueue(Waker::noop()), queue.enqueue(Waker::noop())];
        assert!(!queue.try_acquire(first, Waker::noop()) && queue.reserved() == 0);
        assert!(queue.wake_next().is_some() && queue.reserved() == 1);
        assert!(!queue.try_acquire(second, Waker::noop()), "the slot is reserved for the first");
        assert!(queue.try_acquire(first, Waker::noop()) && queue.reserved() == 0);
        assert!(queue.wake_next().is_some() && queue.try_acquire(second, Waker::noop()));
        assert!(queue.wake_next().is_none() && queue.reserved() == 0);
    }

    #[test]
    fn a_task_that_cancels_passes_its_slot_on() {
        let mut queue = WaitQueue::default();
        let [first, second, third] = [(); 3].map(|()| queue.enqueue(Waker::noop()));
        assert!(queue.cancel(second).is_none(), "was not woken yet");
        assert!(queue.wake_next().is_some());
        assert!(queue.cancel(first).is_some(), "the third is woken in place of the first");
        assert_eq!(queue.reserved(), 1);
        assert!(queue.cancel(third).is_none());
        assert_eq!(queue.reserved(), 0);
    }
}
