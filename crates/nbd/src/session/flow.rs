//! How much one connection may have in flight.
//!
//! A client that sends more is not refused: the server stops reading from it until there is room.
//! So memory is bounded by the number of connections times the limits of a [`Flow`].

use std::cell::Cell;

use super::condition::Condition;

/// What one connection has in flight: requests that were read and whose replies were not sent yet,
/// and the bytes that they occupy.
pub struct Flow {
    requests: Cell<usize>,
    bytes: Cell<usize>,
    most_requests: usize,
    most_bytes: usize,
    changed: Condition,
}

impl Flow {
    /// Nothing in flight, and the limits.
    pub fn new(most_requests: usize, most_bytes: usize) -> Self {
        let (requests, bytes) = (Cell::new(0), Cell::new(0));
        Self { requests, bytes, most_requests, most_bytes, changed: Condition::default() }
    }

    /// Waits until a further request with this many bytes may come in. One request is always
    /// admitted, whatever its size. For the one task that then calls [`enter`](Self::enter).
    pub async fn room(&self, bytes: usize) {
        self.changed
            .until(|| {
                let (requests, held) = (self.requests.get(), self.bytes.get());
                let fits = requests < self.most_requests && held + bytes <= self.most_bytes;
                (requests == 0 || fits).then_some(())
            })
            .await;
    }

    /// Waits until nothing is in flight.
    pub async fn quiet(&self) {
        self.changed.until(|| (self.requests.get() == 0).then_some(())).await;
    }

    /// A request comes in.
    pub fn enter(&self, bytes: usize) {
        self.requests.update(|requests| requests + 1);
        self.bytes.update(|held| held + bytes);
    }

    /// Memory of a request is free again, before its reply is sent.
    pub fn free(&self, bytes: usize) {
        self.bytes.update(|held| held - bytes);
        self.changed.notify();
    }

    /// Replies were sent, or nobody is there any more to send them to.
    pub fn leave(&self, requests: usize, bytes: usize) {
        self.requests.update(|all| all - requests);
        self.free(bytes);
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    fn has_room(flow: &Flow, bytes: usize) -> bool {
        pin!(flow.room(bytes)).poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn one_request_of_any_size_is_admitted_and_then_the_limits_hold() {
        let flow = Flow::new(2, 100);
        assert!(has_room(&flow, 1000));
        flow.enter(1000);
        assert!(!has_room(&flow, 0), "over the bytes");
        flow.free(950);
        assert!(has_room(&flow, 50) && !has_room(&flow, 51));
        flow.enter(10);
        assert!(!has_room(&flow, 0), "over the requests");
        flow.leave(1, 10);
        flow.leave(1, 50);
        assert!(has_room(&flow, 101));
    }
}
