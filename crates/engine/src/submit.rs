//! The future of one operation.

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use rustix::io::Errno;

use crate::event_loop::{self, Local, Submitted};
use crate::operation::{Operation, Token};

/// Starts `operation` on the current loop when first polled. Gives the kernel's answer and the
/// operation back. From then on it belongs to that loop, wherever it is polled or dropped. Dropped
/// before it is ready, it leaves the operation to complete by itself, with all it owns.
pub(crate) fn submit(operation: Operation) -> Submit {
    Submit(Stage::New(operation))
}

pub(crate) struct Submit(Stage);

enum Stage {
    New(Operation),
    Running(Rc<Local>, Token),
    Over,
}

// Nothing points into the future itself: what must stay in place is in the loop's table.
impl Unpin for Submit {}

impl Future for Submit {
    type Output = (Result<usize, Errno>, Operation);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match std::mem::replace(&mut self.0, Stage::Over) {
            Stage::New(operation) => {
                let local = event_loop::current(Rc::clone);
                match local.submit(operation, cx.waker()) {
                    Submitted::Done(result, operation) => {
                        return Poll::Ready((outcome(result), operation));
                    }
                    Submitted::Running(token) => self.0 = Stage::Running(local, token),
                    Submitted::Full(operation) => self.0 = Stage::New(operation),
                }
                Poll::Pending
            }
            Stage::Running(local, token) => match local.poll_result(token, cx.waker()) {
                Poll::Ready((result, operation)) => Poll::Ready((outcome(result), operation)),
                Poll::Pending => {
                    self.0 = Stage::Running(local, token);
                    Poll::Pending
                }
            },
            Stage::Over => panic!("a future is not polled after it was ready"),
        }
    }
}

impl Drop for Submit {
    fn drop(&mut self) {
        if let Stage::Running(local, token) = &self.0 {
            local.abandon(*token);
        }
    }
}

/// The kernel's way to say a count or an errno in one number.
fn outcome(result: i32) -> Result<usize, Errno> {
    usize::try_from(result).map_err(|_| Errno::from_raw_os_error(-result))
}
