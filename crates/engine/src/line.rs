//! The line in front of a full table: first come, first served.
//!
//! Promises: a place that becomes free while somebody waits is kept for whoever waits longest, so
//! that those who were served just now cannot take it again and again; one that is called and has
//! gone meanwhile gives his turn to the next; and waiting costs one entry, however often a waiter is
//! polled.

use std::collections::VecDeque;
use std::task::Waker;

/// Whoever waits for a place.
#[derive(Default)]
pub(crate) struct Line {
    /// In the order of their tickets.
    waiting: VecDeque<(Ticket, Waker)>,
    issued: u64,
    called: usize,
}

/// A position in the line. Whoever holds one either is `admitted` some day or `leaves`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ticket(u64);

impl Line {
    /// How many free places are kept for those who were called and have not come yet.
    pub(crate) fn kept(&self) -> usize {
        self.called
    }

    /// Joins at the end. `waiter` is handed out when it is called.
    pub(crate) fn join(&mut self, waiter: &Waker) -> Ticket {
        self.issued += 1;
        let ticket = Ticket(self.issued);
        self.waiting.push_back((ticket, waiter.clone()));
        ticket
    }

    /// Whether the holder was called: the place that was kept is its own now, and the ticket is used
    /// up. Otherwise `waiter` is handed out when it is called.
    pub(crate) fn admit(&mut self, ticket: Ticket, waiter: &Waker) -> bool {
        match self.find(ticket) {
            Some(index) => {
                self.waiting[index].1.clone_from(waiter);
                false
            }
            None => {
                self.called -= 1;
                true
            }
        }
    }

    /// A place is free: calls the next one, to be woken by the caller.
    #[must_use]
    pub(crate) fn call(&mut self) -> Option<Waker> {
        let (_, waiter) = self.waiting.pop_front()?;
        self.called += 1;
        Some(waiter)
    }

    /// Gives a ticket up. If it was called already the next one is, to be woken by the caller.
    #[must_use]
    pub(crate) fn leave(&mut self, ticket: Ticket) -> Option<Waker> {
        match self.find(ticket) {
            Some(index) => {
                self.waiting.remove(index);
                None
            }
            None => {
                self.called -= 1;
                self.call()
            }
        }
    }

    /// Where in the line the holder is; nowhere when it was called.
    fn find(&self, ticket: Ticket) -> Option<usize> {
        self.waiting.binary_search_by_key(&ticket, |&(other, _)| other).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_kept_in_the_order_of_arrival() {
        let mut line = Line::default();
        let [first, second] = [line.join(Waker::noop()), line.join(Waker::noop())];
        assert!(!line.admit(first, Waker::noop()) && line.kept() == 0);
        assert!(line.call().is_some() && line.kept() == 1);
        assert!(!line.admit(second, Waker::noop()), "the place is kept for the first");
        assert!(line.admit(first, Waker::noop()) && line.kept() == 0);
        assert!(line.call().is_some() && line.admit(second, Waker::noop()));
        assert!(line.call().is_none() && line.kept() == 0);
    }

    #[test]
    fn whoever_goes_gives_his_turn_to_the_next() {
        let mut line = Line::default();
        let [first, second, third] = [(); 3].map(|()| line.join(Waker::noop()));
        assert!(line.leave(second).is_none(), "was not called yet");
        assert!(line.call().is_some());
        assert!(line.leave(first).is_some(), "the third is called in place of the first");
        assert_eq!(line.kept(), 1);
        assert!(line.leave(third).is_none());
        assert_eq!(line.kept(), 0);
    }
}
