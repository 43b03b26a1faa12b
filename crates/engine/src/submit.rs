//! The future of one operation.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use rustix::io::Errno;

use crate::event_loop::{self, Submitted};
use crate::operation::{Operation, Token};

/// Starts `operation` on the current loop when first polled. Gives the kernel's answer and the
/// operation back. Dropped before that, it leaves the operation to complete
/// by itself, with all it owns.
pub(crate) fn submit(operation: Operation) -> Submit {
    Submit(Stage::New(operation))
}

pub(crate) struct Submit(Stage);

enum Stage {
    New(Operation),
    Running(Token),
    Over,
}

// Nothing points into the future itself: what must stay in place is in the loop's table.
impl Unpin for Submit {}

impl Future for Submit {
    type Output = (Result<usize, Errno>, Operation);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match std::mem::replace(&mut self.0, Stage::Over) {
            Stage::New(operation) => {
                match event_loop::current(|local| local.submit(operation, cx.waker())) {
                    Submitted::Done(result, operation) => {
                        return Poll::Ready((outcome(result), operation));
                    }
                    Submitted::Running(token) => self.0 = Stage::Running(token),
                    Submitted::Full(operation) => self.0 = Stage::New(operation),
                }
                Poll::Pending
            }
            Stage::Running(token) => {
                let poll = event_loop::current(|local| local.poll_result(token, cx.waker()));
                if poll.is_pending() {
                    self.0 = Stage::Running(token);
                }
                poll.map(|(result, operation)| (outcome(result), operation))
            }
            Stage::Over => panic!("a future is not polled after it was ready"),
        }
    }
}

impl Drop for Submit {
    fn drop(&mut self) {
        if let Stage::Running(token) = self.0 {
            // Without a loop its table is gone, and the operation with it.
            event_loop::try_current(|local| local.abandon(token));
        }
    }
}

/// The kernel's way to say a count or an errno in one number.
fn outcome(result: i32) -> Result<usize, Errno> {
    usize::try_from(result).map_err(|_| Errno::from_raw_os_error(-result))
}
