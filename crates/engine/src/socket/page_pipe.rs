//! Sends bytes of a file to a socket without a copy, through a pipe with references to pages of the
//! host's page cache.
//!
//! Guarantees: filling does not wait for a page that is in the cache, and sending never waits in a
//! system call. The pages belong to the file, so a write to the file before the peer has received
//! them changes the bytes that the peer receives.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use blockhouse_core::{BufferPool, ByteRange, IoVectorList};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};

use super::Stream;

/// The capacity of a pipe in bytes: the most that the kernel allows every process.
const CAPACITY: usize = 1 << 20;
/// Bytes of the longest read that fits at any offset. Reason: a read that is not aligned to pages
/// needs one page more in the pipe.
const MAX_BYTES: usize = CAPACITY - (4 << 10);
/// The maximum number of pipes of a connection. Each has two descriptors.
const MAX_PIPES: usize = 8;
/// Bytes that are copied for a send that waits until the socket has space.
const WAITING_BYTES: usize = 4 << 10;

/// The pipes of a connection, made when they are needed.
#[derive(Default)]
pub struct PagePipes {
    free: FreePipes,
    /// Each pipe has a clone, so the reference count tells how many there are.
    made: Rc<()>,
}

/// Empty pipes.
type FreePipes = Rc<RefCell<Vec<Pipe>>>;

struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
    _made: Rc<()>,
}

impl PagePipes {
    /// An empty pipe for this many bytes. `None` if they do not fit, or while all pipes are in use.
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

/// An empty pipe.
pub struct EmptyPipe {
    pipe: Pipe,
    free: FreePipes,
}

impl EmptyPipe {
    /// Puts references to the pages of a range of `file` into the pipe. `None` if it gets fewer
    /// bytes.
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
    /// `None` once the pipe is free again.
    pipe: Option<Pipe>,
    /// Bytes that are still in the pipe.
    length: usize,
    free: FreePipes,
}

impl Pages {
    /// Bytes that were not sent yet.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether all bytes were sent.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Sends some bytes, and waits until the socket accepts some. The caller has no other send in
    /// flight.
    ///
    /// # Errors
    /// The kernel's error.
    pub async fn send_some(&mut self, stream: &Stream, pool: &BufferPool) -> io::Result<()> {
        let Some(pipe) = &self.pipe else { return Ok(()) };
        match stream.splice(pipe.read.as_fd(), self.length) {
            Ok(sent) => self.length -= sent,
            // The socket is full. A send of a few copied bytes waits until it has space.
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
        // The kernel (`splice_to_socket`) waits unless the socket is nonblocking, but the engines
        // need a blocking socket.
        rustix::io::ioctl_fionbio(self, true)?;
        let spliced = splice(pipe, None, self, None, length, SpliceFlags::NONBLOCK);
        rustix::io::ioctl_fionbio(self, false)?;
        match spliced {
            Ok(0) => Err(Errno::PIPE),
            spliced => spliced,
        }
    }
}
