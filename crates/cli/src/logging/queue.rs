//! Queue of log lines that a separate thread writes to standard error.
//!
//! Guarantees: [`Queue::push`] never waits for a write, so event loops may call it; memory is
//! bounded; lines keep their order; in place of dropped lines their number is written.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use tracing::Level;

use super::line::{Line, LineFormat};

/// Maximum bytes of waiting lines.
const CAPACITY: usize = 256 << 10;
/// The delay of summaries of omitted lines after the last line, and the period of summaries while
/// lines keep coming.
const SUMMARY_PERIOD: Duration = Duration::from_secs(10);

/// The queue of log lines. It exists as long as the process.
pub struct Queue(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    /// Format of the queue's own lines.
    format: LineFormat,
    /// Notified when lines are added.
    filled: Condvar,
    /// Notified when all lines are written.
    empty: Condvar,
}

#[derive(Default)]
struct State {
    lines: VecDeque<Box<[u8]>>,
    /// Total bytes of `lines`.
    bytes: usize,
    /// Pushes dropped since the last queued one.
    dropped: u64,
    /// Whether the thread is writing the lines that it took.
    is_writing: bool,
}

impl Queue {
    /// Starts the thread, which writes lines with `write`, and periodically the lines that
    /// `summaries` returns.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        format: LineFormat,
        summaries: impl Fn(Instant) -> Vec<Line> + Send + 'static,
        write: impl FnMut(&[u8]) + Send + 'static,
    ) -> io::Result<Self> {
        let (filled, empty) = (Condvar::new(), Condvar::new());
        let shared = Arc::new(Shared { state: Mutex::default(), format, filled, empty });
        let queue = Self(Arc::clone(&shared));
        let builder = std::thread::Builder::new().name("blockhouse-log".into());
        builder.spawn(move || shared.work(summaries, write))?;
        Ok(queue)
    }

    /// Adds whole lines, or drops them if the queue is full.
    pub fn push(&self, lines: &[u8]) {
        let mut state = self.0.state.lock();
        if state.bytes + lines.len() > CAPACITY {
            state.dropped += 1;
            return;
        }
        state.tell_dropped(self.0.format);
        state.add(lines);
        drop(state);
        self.0.filled.notify_one();
    }

    /// Waits until all lines are written, for at most `limit`. Returns whether all lines are
    /// written.
    pub fn flush(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        let Some(mut state) = self.0.state.try_lock_for(limit) else { return false };
        state.tell_dropped(self.0.format);
        self.0.filled.notify_one();
        while state.is_writing || !state.lines.is_empty() {
            if self.0.empty.wait_until(&mut state, until).timed_out() {
                return false;
            }
        }
        true
    }
}

impl State {
    fn add(&mut self, lines: &[u8]) {
        self.bytes += lines.len();
        self.lines.push_back(lines.into());
    }

    fn tell_dropped(&mut self, format: LineFormat) {
        let dropped = std::mem::take(&mut self.dropped);
        if dropped > 0 {
            let what = "were dropped: standard error took them too slowly";
            let line = Line::of_log(Level::WARN, format!("{dropped} lines of the log {what}"));
            self.add(line.render(format).as_bytes());
        }
    }
}

/// Schedule of summaries. They are written a period after the last lines, because a flood begins
/// with lines that are written, and once a period while lines keep coming.
struct SummarySchedule {
    last: Instant,
    deadline: Option<Instant>,
}

impl SummarySchedule {
    fn new(now: Instant) -> Self {
        Self { last: now, deadline: None }
    }

    fn lines_were_written(&mut self, now: Instant) {
        self.deadline = Some(now + SUMMARY_PERIOD);
    }

    /// Whether summaries are due now. If so, marks them as written.
    fn take_due(&mut self, now: Instant) -> bool {
        let is_past_deadline = self.deadline.take_if(|deadline| *deadline <= now).is_some();
        let is_due = is_past_deadline || now.duration_since(self.last) >= SUMMARY_PERIOD;
        if is_due {
            self.last = now;
        }
        is_due
    }
}

impl Shared {
    fn work(&self, summaries: impl Fn(Instant) -> Vec<Line>, mut write: impl FnMut(&[u8])) {
        let mut schedule = SummarySchedule::new(Instant::now());
        loop {
            let lines = self.take(schedule.deadline);
            lines.iter().for_each(|line| write(line));
            let now = Instant::now();
            if !lines.is_empty() {
                schedule.lines_were_written(now);
            }
            if schedule.take_due(now) {
                let lines = summaries(now);
                lines.iter().for_each(|line| write(line.render(self.format).as_bytes()));
            }
        }
    }

    /// Takes all lines. If there are none, waits for some until `deadline`.
    fn take(&self, deadline: Option<Instant>) -> VecDeque<Box<[u8]>> {
        let mut state = self.state.lock();
        state.is_writing = false;
        if state.lines.is_empty() {
            self.empty.notify_all();
            match deadline {
                Some(deadline) => drop(self.filled.wait_until(&mut state, deadline)),
                None => self.filled.wait(&mut state),
            }
        }
        state.bytes = 0;
        state.is_writing = !state.lines.is_empty();
        std::mem::take(&mut state.lines)
    }
}

/// Writes all bytes to standard error without the Rust runtime's lock, because a thread that waits
/// here would hold the lock. Bytes that cannot be written are dropped.
pub fn write_to_standard_error(bytes: &[u8]) {
    write_all(rustix::stdio::stderr(), bytes);
}

fn write_all(output: BorrowedFd<'_>, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match rustix::io::write(output, bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(Errno::INTR) => {}
            // A program that shares the descriptor made it non-blocking.
            Err(Errno::AGAIN) => {
                let _ = rustix::event::poll(&mut [PollFd::new(&output, PollFlags::OUT)], None);
            }
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// A queue whose output takes a line for each permit.
    fn slow() -> (Queue, mpsc::Sender<()>, mpsc::Receiver<Vec<u8>>) {
        let (permit, permits) = mpsc::channel();
        let (give, written) = mpsc::channel();
        let write = move |line: &[u8]| {
            if !line.is_empty() && permits.recv().is_ok() {
                let _ = give.send(line.to_vec());
            }
        };
        let queue = Queue::start(LineFormat::Plain, |_| Vec::new(), write).expect("a thread");
        (queue, permit, written)
    }

    #[test]
    fn a_stalled_output_holds_nobody_up_and_what_is_missing_is_counted() {
        let (queue, permit, written) = slow();
        queue.push(b"first\n");
        while !queue.0.state.lock().lines.is_empty() {
            std::thread::yield_now();
        }
        // The thread waits to write the first line.
        let line = [&vec![b'x'; CAPACITY / 4 - 1][..], b"\n"].concat();
        (0..20).for_each(|_| queue.push(&line));
        assert_eq!(queue.0.state.lock().bytes, CAPACITY);
        assert!(!queue.flush(Duration::from_millis(1)), "nothing can be written");
        (0..6).for_each(|_| permit.send(()).expect("the thread runs"));
        assert!(queue.flush(Duration::from_secs(60)));
        let written: Vec<_> = written.try_iter().collect();
        let lengths: Vec<_> = written.iter().map(Vec::len).collect();
        let last = String::from_utf8_lossy(&written[5]);
        assert_eq!(lengths[..5], [6, CAPACITY / 4, CAPACITY / 4, CAPACITY / 4, CAPACITY / 4]);
        assert!(last.starts_with(" WARN 16 lines of the log were dropped"), "{last}");
    }

    #[test]
    fn lines_are_written_in_order_and_all_of_them_by_a_flush() {
        let (queue, permit, written) = slow();
        let lines: Vec<_> = (0..100).map(|number| format!("{number}\n").into_bytes()).collect();
        for line in &lines {
            queue.push(line);
            permit.send(()).expect("the thread runs");
        }
        assert!(queue.flush(Duration::from_secs(60)));
        assert_eq!(written.try_iter().collect::<Vec<_>>(), lines);
    }
}
