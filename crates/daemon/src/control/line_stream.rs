//! Line framing for both directions of a connection, with a limit on the line length and on the
//! time that a peer may take to read a line.

use std::io;
use std::time::Duration;

use blockhouse_core::{Buffer, IoVectorList};
use blockhouse_engine::{Stream, timeout};

use super::MAX_LINE;

/// Maximum number of bytes that one system call receives.
const RECEIVE_SIZE: usize = 4096;
/// Maximum time for a peer to receive a line.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// The lines that a peer sends.
pub struct LineReader {
    stream: Stream,
    received: Buffer,
    /// The received bytes that were not returned yet.
    waiting: Vec<u8>,
}

/// The lines that are sent to a peer.
pub struct LineWriter(Stream);

/// A line from a peer.
pub enum Frame {
    /// A line without its end.
    Whole(Vec<u8>),
    /// More than [`MAX_LINE`] bytes without an end; the stream cannot be read further.
    TooLong,
}

/// Both directions of a connection.
pub fn line_stream(stream: Stream) -> (LineReader, LineWriter) {
    let (received, waiting) = (Buffer::new(RECEIVE_SIZE), Vec::new());
    (LineReader { stream: stream.clone(), received, waiting }, LineWriter(stream))
}

impl LineReader {
    /// The next line; `None` when the peer has closed the connection. The future must not be
    /// dropped before it is ready, because received bytes would be lost.
    pub async fn next(&mut self) -> io::Result<Option<Frame>> {
        let mut searched = 0;
        loop {
            if let Some(end) = self.waiting[searched..].iter().position(|byte| *byte == b'\n') {
                let end = searched + end;
                if end > MAX_LINE {
                    return Ok(Some(Frame::TooLong));
                }
                let mut line: Vec<u8> = self.waiting.drain(..=end).collect();
                line.truncate(end);
                return Ok(Some(Frame::Whole(line)));
            }
            if self.waiting.len() > MAX_LINE {
                return Ok(Some(Frame::TooLong));
            }
            searched = self.waiting.len();
            match self.receive().await? {
                0 => return Ok(None),
                count => self.waiting.extend_from_slice(&self.received.bytes()[..count]),
            }
        }
    }

    async fn receive(&mut self) -> io::Result<usize> {
        let mut list = IoVectorList::new();
        list.push(self.received.lend());
        let (result, list) = self.stream.receive(list).await;
        // The list borrows the buffer until this point.
        drop(list);
        result
    }
}

impl LineWriter {
    /// Sends on this connection.
    pub fn new(stream: Stream) -> Self {
        Self(stream)
    }

    /// Whether the peer has closed the connection for both directions. A peer that has stopped
    /// sending may still read.
    pub async fn is_closed(&self) -> bool {
        // On a closed connection even an empty send fails.
        self.0.send_directly(IoVectorList::new()).await.0.is_err()
    }

    /// Sends a line.
    ///
    /// # Errors
    /// The kernel's error, or `TimedOut` if the peer does not read.
    pub async fn send(&self, line: &[u8]) -> io::Result<()> {
        let mut buffer = Buffer::new(line.len() + 1);
        let (text, end) = buffer.bytes_mut().split_at_mut(line.len());
        text.copy_from_slice(line);
        end.fill(b'\n');
        let mut list = IoVectorList::new();
        list.push(buffer.lend());
        match timeout(SEND_TIMEOUT, self.0.send(list)).await {
            Some((sent, _)) => sent,
            None => Err(io::ErrorKind::TimedOut.into()),
        }
    }
}
