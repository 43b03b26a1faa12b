//! The service manager's watchdog: this server sends it messages as long as each of its loops for
//! guests runs.
//!
//! Guarantee: before each message (`WATCHDOG=1`, sd_notify(3)) every loop has run a task that was
//! submitted after the previous message. So while a loop hangs no message is sent, and the service
//! manager ends the server after the unit's `WatchdogSec=` and restarts it. Without a watchdog no
//! thread is started.

use std::time::Duration;

use blockhouse_engine::Handle;
use sd_notify::NotifyState;

use crate::process::service_manager;

/// The number of messages in each interval of the service manager. A loop may hang for three
/// quarters of the interval.
const PARTS: u32 = 4;

/// The process that the service manager started, and for which it set the environment.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Started {
    /// This process.
    Here,
    /// The process before an upgrade, whose environment this process has inherited.
    Before,
}

/// Starts the thread that runs a task on each of `loops` and notifies the service manager, if that
/// has a watchdog. The thread ends when the first loop ends.
pub(crate) fn start(loops: Vec<Handle>, started: Started) {
    let Some(time) = time(started) else { return };
    let tell = || service_manager::tell(&[NotifyState::Watchdog]);
    let watch = move || watch(&loops, time / PARTS, tell);
    if let Err(error) = std::thread::Builder::new().name("watchdog".into()).spawn(watch) {
        tracing::warn!(
            "cannot start the watchdog's thread: the service manager will end this server when WatchdogSec= is over: {error}"
        );
    }
}

/// The time without a message after which the service manager acts; `None` without a watchdog.
fn time(started: Started) -> Option<Duration> {
    if started == Started::Here {
        return sd_notify::watchdog_enabled();
    }
    let time = std::env::var("WATCHDOG_USEC").ok()?;
    time.parse().ok().filter(|time| *time > 0).map(Duration::from_micros)
}

/// Calls `tell` each time after all loops have run a task, then pauses, until a loop has ended.
fn watch(loops: &[Handle], pause: Duration, tell: impl Fn()) {
    while all_run(loops) {
        tell();
        std::thread::sleep(pause);
    }
}

/// Waits until each loop has run a task. Returns false if a loop has ended.
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
            // This blocks the loop's thread until the test drops `release`.
            let _ = released.recv();
        }));
        hangs.recv_timeout(LONG).expect("it hangs");
        // One more message may follow, for tasks that ran before the loop hung. The loop cannot run
        // a task that was submitted later.
        while messages.try_recv().is_ok() {}
        let late = std::iter::from_fn(|| messages.recv_timeout(Duration::from_millis(200)).ok());
        assert!(late.count() <= 1, "a loop hangs, and messages go on");
        drop(release);
        messages.recv_timeout(LONG).expect("it goes on");
        loops.into_iter().for_each(LoopThread::stop);
        watching.join().expect("it ends with the loops");
        while messages.try_recv().is_ok() {}
        assert_eq!(messages.recv_timeout(LONG), Err(RecvTimeoutError::Disconnected));
    }
}
