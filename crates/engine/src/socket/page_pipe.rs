//! Bytes of a file on their way to a socket without a copy: a pipe with references to pages of the
//! host's page cache.
//!
//! Guarantees: filling waits for no page that is in the cache, and sending never waits in a system
//! call. The pages are those of the file: a write to the file before the peer has received them
//! changes what it receives.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use blockhouse_core::{BufferPool, ByteRange, IoVectorList};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};

use super::Stream;

/// Bytes that a pipe may be asked to hold: the most that the kernel gives to every process.
const CAPACITY: usize = 1 << 20;
/// Bytes of the longest read that fits at any offset. Reason: a read that is not aligned to pages
/// needs one page more in the pipe.
const MAX_BYTES: usize = CAPACITY - (4 << 10);
/// Pipes of a pool. Each has two descriptors.
const MAX_PIPES: usize = 8;
/// Bytes that are copied to wait until the socket has room.
const WAITING_BYTES: usize = 4 << 10;

/// The pipes of a connection, made when they are needed.
#[derive(Default)]
pub struct PagePipes {
    free: FreePipes,
    /// Each pipe has a clone.
    made: Rc<()>,
}

/// Pipes that hold nothing.
type FreePipes = Rc<RefCell<Vec<Pipe>>>;

struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
    _made: Rc<()>,
}

impl PagePipes {
    /// An empty pipe for this many bytes. `None` if they do not fit, and while all pipes are on
    /// their way.
    pub fn take(&self, length: usize) -> Option<EmptyPipe> {
        if length > MAX_BYTES {
            return None;
        }
        let free = self.free.borrow_mut().pop();
        let pipe = free.map_or_else(|| self.make(), Some)?;
        Some(EmptyPipe { pipe, free: Rc::clone(&self.free) })
    }

    fn make(&self) -> Option<Pipe> {
        if Rc::strong_count(&self.made) > MAX_PIPES {
            return None;
        }
        // Without a free descriptor or enough memory the bytes are copied.
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).ok()?;
        fcntl_setpipe_size(&write, CAPACITY).ok()?;
        Some(Pipe { read, write, _made: Rc::clone(&self.made) })
    }
}

/// A pipe that holds nothing.
pub struct EmptyPipe {
    pipe: Pipe,
    free: FreePipes,
}

impl EmptyPipe {
    /// Puts references to the pages of a range of `file` into the pipe. `None` if fewer are there.
    pub fn fill(self, file: BorrowedFd<'_>, range: ByteRange) -> Option<Pages> {
        let Self { pipe, free } = self;
        let (length, mut offset) = (range.length() as usize, range.offset());
        let mut put = 0;
        while put < length {
            let left = length - put;
            // A pipe with a part of the bytes is dropped.
            match splice(file, Some(&mut offset), &pipe.write, None, left, SpliceFlags::NONBLOCK) {
                Ok(0) | Err(_) => return None,
                Ok(moved) => put += moved,
            }
        }
        Some(Pages { pipe: Some(pipe), length, free })
    }
}

/// Pages in a pipe.
pub struct Pages {
    /// `None` once it went back.
    pipe: Option<Pipe>,
    /// Bytes that are still in it.
    length: usize,
    free: FreePipes,
}

impl Pages {
    /// Bytes that were not sent yet.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether all of it was sent.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Sends some of it, waiting until the socket accepts some. No other send is in flight.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn send_some(&mut self, stream: &Stream, pool: &BufferPool) -> io::Result<()> {
        let Some(pipe) = &self.pipe else { return Ok(()) };
        match stream.splice(pipe.read.as_fd(), self.length) {
            Ok(sent) => self.length -= sent,
            // A send waits for room, and moves a few bytes by the way.
            Err(Errno::AGAIN) => {
                let length = self.length.min(WAITING_BYTES);
                let mut buffer = pool.get(length).map_err(io::Error::other)?;
                let read = rustix::io::read(&pipe.read, buffer.bytes_mut())?;
                self.length -= read;
                let mut list = IoVectorList::new();
                list.push(buffer.lend_range(0, read));
                stream.send(list).await.0?;
            }
            Err(error) => return Err(error.into()),
        }
        if self.length == 0 {
            self.free.borrow_mut().extend(self.pipe.take());
        }
        Ok(())
    }
}

impl Stream {
    /// Moves bytes from a pipe into the socket without waiting.
    fn splice(&self, pipe: BorrowedFd<'_>, length: usize) -> Result<usize, Errno> {
        // The kernel decides by the socket's flag alone whether to wait (`splice_to_socket`), and
        // the engines need it to be blocking.
        rustix::io::ioctl_fionbio(self, true)?;
        let spliced = splice(pipe, None, self, None, length, SpliceFlags::NONBLOCK);
        rustix::io::ioctl_fionbio(self, false)?;
        match spliced {
            Ok(0) => Err(Errno::PIPE),
            spliced => spliced,
        }
    }
}
