//! Waiting for time to pass.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use blockhouse_core::metrics::{Timestamp, clock};

use crate::event_loop::local;
use crate::event_loop::timer::Key;

/// Completes after a while. See [`sleep`].
pub struct Sleep {
    due: Timestamp,
    key: Option<Key>,
}

/// The longest sleep: about thirty years.
const MAX_SLEEP: Duration = Duration::from_secs(1 << 30);

/// Waits for `duration`, or a little longer: engines without io_uring count in milliseconds. A
/// `duration` of more than thirty years is shortened to thirty years.
pub fn sleep(duration: Duration) -> Sleep {
    Sleep { due: clock::read_now() + duration.min(MAX_SLEEP), key: None }
}

/// Whether the caller is inside of an event loop, which timers need.
pub fn has_timers() -> bool {
    local::try_current(|_| ()).is_some()
}

/// Waits for the future, but not longer than `limit`. After that time the future is dropped, and
/// the result is `None`.
pub async fn timeout<T>(limit: Duration, future: impl Future<Output = T>) -> Option<T> {
    let (mut future, mut end) = (pin!(future), sleep(limit));
    poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => Pin::new(&mut end).poll(cx).map(|()| None),
    })
    .await
}

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        if this.due <= clock::now() {
            return Poll::Ready(());
        }
        local::current(|local| local.timers.set(this.due, &mut this.key, cx.waker()));
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            // Without a loop there is no queue to clean.
            local::try_current(|local| local.timers.remove(key));
        }
    }
}
