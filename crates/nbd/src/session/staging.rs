//! The buffer between the socket and the parser of requests.

use blockhouse_core::{Buffer, IoVector};

/// Received bytes that were not parsed yet, in a buffer of fixed size.
pub struct Staging {
    buffer: Buffer,
    start: usize,
    end: usize,
}

impl Staging {
    /// A staging area of the size of `buffer` that begins with the bytes `first`.
    ///
    /// # Panics
    /// If `first` is longer than `buffer`.
    pub fn new(mut buffer: Buffer, first: &[u8]) -> Self {
        buffer.bytes_mut()[..first.len()].copy_from_slice(first);
        Self { buffer, start: 0, end: first.len() }
    }

    /// The bytes that were received and not consumed.
    pub fn bytes(&self) -> &[u8] {
        &self.buffer.bytes()[self.start..self.end]
    }

    /// Consumes up to `limit` bytes from the front. Returns their number.
    pub fn consume(&mut self, limit: usize) -> usize {
        let count = limit.min(self.end - self.start);
        self.start += count;
        count
    }

    /// Moves bytes from the front into `into`, as many as fit. Returns their number.
    pub fn copy_to(&mut self, into: &mut [u8]) -> usize {
        let count = into.len().min(self.end - self.start);
        into[..count].copy_from_slice(&self.bytes()[..count]);
        self.consume(count)
    }

    /// Lends up to `limit` bytes of free memory for the bytes that follow. Bytes that were not
    /// consumed, at most a part of a header, are moved to the front first, so that there is always
    /// free memory.
    pub fn lend(&mut self, limit: usize) -> IoVector {
        let free = self.make_room(limit);
        self.buffer.lend_range(self.end, free)
    }

    /// As [`lend`](Self::lend), but the caller fills the memory.
    pub fn free_mut(&mut self, limit: usize) -> &mut [u8] {
        let free = self.make_room(limit);
        &mut self.buffer.bytes_mut()[self.end..self.end + free]
    }

    fn make_room(&mut self, limit: usize) -> usize {
        let Self { start, end, .. } = *self;
        if start > 0 {
            self.buffer.bytes_mut().copy_within(start..end, 0);
            (self.start, self.end) = (0, end - start);
        }
        limit.min(self.buffer.len() - self.end)
    }

    /// Adds bytes that were received into the lent memory.
    pub fn add_received(&mut self, count: usize) {
        self.end += count;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_out_as_they_went_in() {
        let mut staging = Staging::new(Buffer::new(8), b"abc");
        let mut two = [0; 2];
        assert_eq!((staging.copy_to(&mut two), &two), (2, b"ab"));
        let mut loan = staging.lend(100);
        assert_eq!(loan.len(), 7, "the unread byte moved to the front");
        loan.copy_from(b"defg");
        drop(loan);
        staging.add_received(4);
        assert_eq!(staging.bytes(), b"cdefg");
        assert_eq!(staging.consume(4), 4);
        assert_eq!(staging.lend(3).len(), 3);
        assert_eq!(staging.consume(4), 1);
        let mut none = [0; 2];
        assert_eq!(staging.copy_to(&mut none), 0);
    }
}
