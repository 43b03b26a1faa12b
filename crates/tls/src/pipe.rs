//! OpenSSL's view of a connection: encrypted bytes that were received, and encrypted bytes to be
//! sent.
//!
//! Guarantee: nothing here waits. A read fails with `WouldBlock` if no bytes are there; a write
//! accepts all bytes, or fails with ENOMEM.

use std::io::{self, ErrorKind, Read, Write};

use blockhouse_core::{Buffer, BufferPool};

/// Bytes that are received at once: about eight records.
const RECEIVE_SIZE: usize = 128 << 10;

/// The two directions.
pub struct Pipe {
    pool: BufferPool,
    /// The received bytes; `None` while the kernel has the memory, and before the first receive.
    input: Option<Buffer>,
    /// The range of `input` that was not read yet.
    start: usize,
    end: usize,
    output: Option<Buffer>,
    /// How many bytes of the output are filled.
    output_end: usize,
    /// The size of a new output buffer.
    output_size: usize,
}

impl Pipe {
    /// An empty pipe, with output memory for a handshake.
    pub fn new(pool: BufferPool) -> Self {
        let output_size = 8 << 10;
        Self { pool, input: None, start: 0, end: 0, output: None, output_end: 0, output_size }
    }

    /// Sets the size of output buffers, from the next one on.
    pub fn set_output_size(&mut self, size: usize) {
        self.output_size = size;
    }

    /// Memory to receive into. All bytes that were received before must have been read.
    ///
    /// # Errors
    /// ENOMEM.
    pub fn take_input(&mut self) -> io::Result<Buffer> {
        match self.input.take() {
            Some(buffer) => Ok(buffer),
            None => self.buffer(RECEIVE_SIZE),
        }
    }

    /// Gives that memory back, with this many bytes received.
    pub fn put_input(&mut self, buffer: Buffer, count: usize) {
        (self.input, self.start, self.end) = (Some(buffer), 0, count);
    }

    /// The number of bytes that wait to be sent.
    pub fn output_len(&self) -> usize {
        self.output_end
    }

    /// The bytes to send, if there are any.
    pub fn take_output(&mut self) -> Option<Buffer> {
        let mut buffer = self.output.take()?;
        buffer.set_len(std::mem::take(&mut self.output_end));
        Some(buffer)
    }

    fn buffer(&self, size: usize) -> io::Result<Buffer> {
        self.pool.get(size).map_err(|error| io::Error::from_raw_os_error(error.errno()))
    }
}

impl Read for Pipe {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let Some(input) = self.input.as_ref().filter(|_| self.start < self.end) else {
            return Err(ErrorKind::WouldBlock.into());
        };
        let count = into.len().min(self.end - self.start);
        into[..count].copy_from_slice(&input.bytes()[self.start..self.start + count]);
        self.start += count;
        Ok(count)
    }
}

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let end = self.output_end + bytes.len();
        if self.output.as_ref().is_none_or(|output| output.len() < end) {
            let mut larger = self.buffer(end.next_multiple_of(self.output_size))?;
            if let Some(output) = &self.output {
                let old = &output.bytes()[..self.output_end];
                larger.bytes_mut()[..old.len()].copy_from_slice(old);
            }
            self.output = Some(larger);
        }
        let Some(output) = self.output.as_mut() else { return Ok(0) };
        output.bytes_mut()[self.output_end..end].copy_from_slice(bytes);
        self.output_end = end;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
