//! The protocol between a thread that submits and a loop that is about to sleep.
//!
//! Guarantee: a message that is posted to a mailbox is taken by its loop before the loop sleeps, or
//! `post` asks the poster to notify the loop, which ends the sleep by one system call. Only the
//! first message of a batch needs a notification, and none does while the loop runs. This upholds
//! invariant 6 (ARCHITECTURE.md): no request waits for a sleeping loop.
//!
//! How: "is the loop asleep" and "are there messages" are one state under one mutex, so that in no
//! order of events a loop sleeps while it has a message. `mailbox::loom_model` checks the protocol
//! (interleavings with up to three forced switches), and that it fails without the notification.

#[cfg(loom)]
use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, Ordering},
};
#[cfg(not(loom))]
use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, Ordering},
};

/// Messages for one loop, from any thread.
pub(crate) struct Mailbox<M> {
    inbox: Mutex<Inbox<M>>,
    /// Whether the inbox has messages: lets a running loop check without locking the mutex. Only a
    /// hint; the mutex decides.
    maybe_nonempty: AtomicBool,
}

struct Inbox<M> {
    messages: Vec<M>,
    asleep: bool,
    /// Whether the loop has ended: no message is accepted.
    closed: bool,
}

/// The duty of a poster after posting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Wake {
    /// The loop sleeps and no poster was asked to notify it yet: the caller must.
    Needed,
    /// The loop runs, or another poster was asked to notify it.
    NotNeeded,
}

impl<M> Mailbox<M> {
    pub(crate) fn new() -> Self {
        Self {
            inbox: Mutex::new(Inbox { messages: Vec::new(), asleep: false, closed: false }),
            maybe_nonempty: AtomicBool::new(false),
        }
    }

    /// Posts a message, from any thread. It is dropped if the loop has ended.
    pub(crate) fn post(&self, message: M) -> Wake {
        let mut inbox = self.lock();
        if inbox.closed {
            // Unlocked before the drop of `message`, which may run any code.
            drop(inbox);
            return Wake::NotNeeded;
        }
        inbox.messages.push(message);
        self.maybe_nonempty.store(true, Ordering::Release);
        if std::mem::take(&mut inbox.asleep) { Wake::Needed } else { Wake::NotNeeded }
    }

    /// Whether there is probably a message. Only `prepare_to_sleep` decides.
    pub(crate) fn may_have_messages(&self) -> bool {
        self.maybe_nonempty.load(Ordering::Acquire)
    }

    /// Moves all messages to the end of `into`. For the loop's thread.
    pub(crate) fn take(&self, into: &mut Vec<M>) {
        if self.maybe_nonempty.load(Ordering::Acquire) {
            let mut inbox = self.lock();
            self.maybe_nonempty.store(false, Ordering::Release);
            into.append(&mut inbox.messages);
        }
    }

    /// Declares the loop asleep, unless there are messages. For the loop's thread: after `true`,
    /// the loop sleeps until the notification or another event.
    pub(crate) fn prepare_to_sleep(&self) -> bool {
        let mut inbox = self.lock();
        inbox.asleep = inbox.messages.is_empty();
        inbox.asleep
    }

    /// Marks the loop as running again, after any end of its sleep. For the loop's thread.
    pub(crate) fn wake_up(&self) {
        self.lock().asleep = false;
    }

    /// Marks the loop as ended. Returns the messages that it has not received.
    pub(crate) fn close(&self) -> Vec<M> {
        let mut inbox = self.lock();
        inbox.closed = true;
        std::mem::take(&mut inbox.messages)
    }

    fn lock(&self) -> MutexGuard<'_, Inbox<M>> {
        // Nothing panics while it holds the mutex, so it is never poisoned.
        self.inbox.lock().expect("the mailbox's mutex is never poisoned")
    }
}

/// Interleavings of posters and a loop, with up to `SWITCHES` switches. Compiled in lab/models.
#[cfg(all(test, loom))]
mod loom_model {
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

    use super::{Mailbox, Wake};

    /// The eventfd: a counter to wait for.
    #[derive(Default)]
    struct EventFd {
        count: Mutex<usize>,
        risen: Condvar,
    }

    impl EventFd {
        fn notify(&self) {
            *self.count.lock().unwrap() += 1;
            self.risen.notify_one();
        }

        fn wait(&self) -> usize {
            let mut count = self.count.lock().unwrap();
            while *count == 0 {
                count = self.risen.wait(count).unwrap();
            }
            std::mem::take(&mut *count)
        }
    }

    /// Whether posters follow the result of `post`.
    #[derive(Clone, Copy, PartialEq)]
    enum Posters {
        Obey,
        Forget,
    }

    fn run(posters: Posters, threads: usize, messages: usize) {
        let shared = Arc::new((Mailbox::new(), EventFd::default()));
        let handles: Vec<_> = (0..threads)
            .map(|_| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    for message in 0..messages {
                        if shared.0.post(message) == Wake::Needed && posters == Posters::Obey {
                            shared.1.notify();
                        }
                    }
                })
            })
            .collect();
        let (mailbox, event_fd) = &*shared;
        let mut taken = Vec::new();
        while taken.len() < threads * messages {
            mailbox.take(&mut taken);
            if taken.len() < threads * messages && mailbox.prepare_to_sleep() {
                assert_eq!(event_fd.wait(), 1, "one notification for one sleep");
                mailbox.wake_up();
            }
        }
        for handle in handles {
            handle.join().unwrap();
        }
    }

    /// All interleavings with at most this many forced switches: every known lost wake-up shows
    /// with two, and without a bound two posters take hours.
    const SWITCHES: usize = 3;

    fn check(threads: usize, messages: usize) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(SWITCHES);
        builder.check(move || run(Posters::Obey, threads, messages));
    }

    #[test]
    fn messages_of_one_poster_arrive_and_a_sleep_is_ended_by_one_notification() {
        check(1, 3);
    }

    #[test]
    fn messages_of_two_posters_arrive_and_a_sleep_is_ended_by_one_notification() {
        check(2, 2);
    }

    #[test]
    #[should_panic(expected = "deadlock")]
    fn without_the_notification_a_message_waits_for_ever() {
        loom::model(|| run(Posters::Forget, 1, 1));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_running_loop_is_not_disturbed() {
        let mailbox = Mailbox::new();
        assert_eq!(mailbox.post(1), Wake::NotNeeded);
    }

    #[test]
    fn a_sleeping_loop_is_woken_once_per_batch() {
        let mailbox = Mailbox::new();
        assert!(mailbox.prepare_to_sleep());
        let wakes: Vec<Wake> = (0..4).map(|message| mailbox.post(message)).collect();
        assert_eq!(wakes, [Wake::Needed, Wake::NotNeeded, Wake::NotNeeded, Wake::NotNeeded]);
        let mut taken = Vec::new();
        mailbox.take(&mut taken);
        assert_eq!(taken, [0, 1, 2, 3]);
    }

    #[test]
    fn no_loop_sleeps_with_a_message_in_its_mailbox() {
        let mailbox = Mailbox::new();
        assert_eq!(mailbox.post(()), Wake::NotNeeded);
        assert!(!mailbox.prepare_to_sleep());
    }
}
