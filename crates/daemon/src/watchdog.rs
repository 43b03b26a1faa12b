//! The service manager's watchdog: it hears that the server is alive while every event loop runs.
//!
//! Guarantee: each message (`WATCHDOG=1`, sd_notify(3)) follows a task on every loop that was submitted after the message
//! before. So while a loop hangs no message is sent, and the service manager ends the server after the unit's
//! `WatchdogSec=` and starts it anew. A loop that goes on in time has cost nothing. Without a watchdog nothing runs.

use std::time::Duration;

use blockhouse_engine::Handle;
use sd_notify::NotifyState;

use crate::service_manager;

/// Into how many parts the time of the service manager is divided: with one message in each, a loop may be held up for
/// three of them.
const PARTS: u32 = 4;

/// The process that the service manager started, and so the one that its environment is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Started {
    /// This one.
    Here,
    /// One whose environment this process has, because it goes on in its place.
    Before,
}

/// Starts the thread that asks `loops` and tells the service manager, if that wants to be told. It ends when a loop has
/// ended.
pub(crate) fn start(loops: Vec<Handle>, started: Started) {
    let Some(time) = time(started) else { return };
    let tell = || service_manager::tell(&[NotifyState::Watchdog]);
    let watch = move || watch(&loops, time / PARTS, tell);
    if let Err(error) = std::thread::Builder::new().name("watchdog".into()).spawn(watch) {
        tracing::warn!(
            "no thread for the watchdog, the service manager will end this server: {error}"
        );
    }
}

/// After how much silence the service manager acts; `None` without a watchdog.
fn time(started: Started) -> Option<Duration> {
    if started == Started::Here {
        return sd_notify::watchdog_enabled();
    }
    let time = std::env::var("WATCHDOG_USEC").ok()?;
    time.parse().ok().filter(|time| *time > 0).map(Duration::from_micros)
}

/// Calls `tell` each time that all loops have run, with pauses, until one has ended.
fn watch(loops: &[Handle], pause: Duration, tell: impl Fn()) {
    while all_run(loops) {
        tell();
        std::thread::sleep(pause);
    }
}

/// Waits until each loop has run a task; whether all are there.
fn all_run(loops: &[Handle]) -> bool {
    let tasks: Vec<_> = loops.iter().map(|handle| handle.spawn(|| async {})).collect();
    tasks.into_iter().all(|task| task.wait().is_some())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{RecvTimeoutError, channel};

    use blockhouse_engine::{EngineChoice, LoopThread};

    use super::*;

    /// Longer than anything takes on a busy machine.
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_loop_that_hangs_keeps_the_messages_off() {
        let start = |name: &str| {
            LoopThread::start(name.into(), EngineChoice::Auto, |_| ()).expect("a loop")
        };
        let loops = [start("good"), start("bad")];
        let handles = loops.iter().map(|thread| thread.handle().clone()).collect::<Vec<_>>();
        let (told, messages) = channel();
        let watching = std::thread::spawn(move || {
            watch(&handles, Duration::from_millis(1), || _ = told.send(()));
        });
        messages.recv_timeout(LONG).expect("both run");
        let (release, released) = channel::<()>();
        let (hang, hangs) = channel();
        drop(loops[1].handle().spawn(move || async move {
            hang.send(()).expect("the test waits");
            // It blocks the loop's thread until the test lets go.
            let _ = released.recv();
        }));
        hangs.recv_timeout(LONG).expect("it hangs");
        // One message may have been on its way; the loop cannot have run a task that was submitted since.
        while messages.try_recv().is_ok() {}
        let late = std::iter::from_fn(|| messages.recv_timeout(Duration::from_millis(200)).ok());
        assert!(
            late.count() <= 1,
            "a loop hangs, and the service manager is told that all is well"
        );
        drop(release);
        messages.recv_timeout(LONG).expect("it goes on");
        loops.into_iter().for_each(LoopThread::stop);
        watching.join().expect("it ends with the loops");
        while messages.try_recv().is_ok() {}
        assert_eq!(messages.recv_timeout(LONG), Err(RecvTimeoutError::Disconnected));
    }
}
