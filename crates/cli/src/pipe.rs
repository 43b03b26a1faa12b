//! Standard input and output at the speed of the other end: pipes get large buffers, and a separate
//! thread makes the blocking calls.

use std::fs::File;
use std::future::poll_fn;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc;
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use blockhouse_core::Buffer;
use futures_channel::mpsc as queue;
use futures_util::StreamExt;

/// The capacity that is requested for a pipe, in bytes.
const PIPE_SIZE: usize = 1 << 20;
/// The maximum number of chunks in flight.
const CHUNKS: usize = 3;

/// Pieces of standard input, in order; all but the last are full.
pub struct Chunks {
    coming: queue::Receiver<io::Result<Vec<u8>>>,
    spare: mpsc::Sender<Vec<u8>>,
}

/// Starts to read standard input in pieces of `size` bytes.
pub fn read_standard_input(size: usize) -> Result<Chunks> {
    let input = own(io::stdin().as_fd()).context("cannot use standard input")?;
    let (mut give, coming) = queue::channel(0);
    let (spare, empty) = mpsc::channel();
    for _ in 0..CHUNKS {
        // The send does not fail, because the receiver is in the thread's closure below.
        let _ = spare.send(Vec::with_capacity(size));
    }
    let read = move || {
        let mut input = input;
        while let Ok(mut chunk) = empty.recv() {
            chunk.clear();
            let outcome = Read::by_ref(&mut input).take(size as u64).read_to_end(&mut chunk);
            let is_last = !matches!(outcome, Ok(length) if length == size);
            if !matches!(outcome, Ok(0)) {
                let sent = futures_executor::block_on(send(&mut give, outcome.map(|_| chunk)));
                if sent == Reader::Gone {
                    return;
                }
            }
            if is_last {
                return;
            }
        }
    };
    spawn("input", read)?;
    Ok(Chunks { coming, spare })
}

impl Chunks {
    /// The next piece; `None` at the end.
    pub async fn next(&mut self) -> Option<io::Result<Vec<u8>>> {
        self.coming.next().await
    }

    /// Takes back the buffer of a used piece.
    pub fn recycle(&self, chunk: Vec<u8>) {
        // After the end of the input, the reading thread needs no buffer.
        let _ = self.spare.send(chunk);
    }
}

/// Whether the other end of a channel or pipe is still open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    There,
    Gone,
}

/// Standard output.
pub struct Output {
    give: queue::Sender<Buffer>,
    written: mpsc::Receiver<Buffer>,
    thread: JoinHandle<io::Result<()>>,
    /// The name of the data, for messages.
    what: &'static str,
}

/// Starts to write to standard output; `what` is the name of the data in messages.
pub fn write_standard_output(what: &'static str) -> Result<Output> {
    let output = own(io::stdout().as_fd()).context("cannot use standard output")?;
    let (give, mut coming) = queue::channel::<Buffer>(1);
    let (give_back, written) = mpsc::channel();
    let write = move || {
        let mut output = output;
        while let Some(buffer) = futures_executor::block_on(coming.next()) {
            output.write_all(buffer.bytes())?;
            // An error is ignored, because the caller need not take buffers back.
            let _ = give_back.send(buffer);
        }
        Ok(())
    };
    let thread = spawn("output", write)?;
    Ok(Output { give, written, thread, what })
}

impl Output {
    /// Queues all bytes of the buffer to be written. Returns whether more can be written; if not,
    /// [`finish`](Self::finish) returns the reason.
    pub async fn write(&mut self, buffer: Buffer) -> Reader {
        send(&mut self.give, buffer).await
    }

    /// A buffer that was written and can be reused, if any.
    pub fn written(&self) -> Option<Buffer> {
        self.written.try_recv().ok()
    }

    /// Waits until everything is written.
    ///
    /// # Errors
    /// The reader has closed the pipe, or a write fails.
    pub fn finish(self) -> Result<()> {
        drop(self.give);
        // The wait may block, because nothing else is left to do meanwhile.
        match self.thread.join() {
            Ok(outcome) => {
                outcome.with_context(|| format!("cannot write {} to standard output", self.what))
            }
            Err(_) => anyhow::bail!("cannot write {} to standard output", self.what),
        }
    }
}

/// Waits for space in the queue, then sends `one`. Returns whether the other side still exists.
async fn send<T>(give: &mut queue::Sender<T>, one: T) -> Reader {
    let is_ready = poll_fn(|context| give.poll_ready(context)).await.is_ok();
    if is_ready && give.start_send(one).is_ok() { Reader::There } else { Reader::Gone }
}

/// A duplicate of the descriptor. If it is a pipe, requests a large buffer.
fn own(descriptor: BorrowedFd<'_>) -> io::Result<File> {
    let own = descriptor.try_clone_to_owned()?;
    // An error is ignored: files have no such buffer, and the user may have reached the limit on
    // memory of pipes. The transfer is only slower then.
    let _ = rustix::pipe::fcntl_setpipe_size(&own, PIPE_SIZE);
    Ok(File::from(own))
}

fn spawn<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    let builder = std::thread::Builder::new().name(format!("blockhouse-{name}"));
    builder.spawn(work).context("cannot start a thread")
}
