//! Where received bytes wait to be understood.

use blockhouse_core::{Buffer, IoVector};

/// A fixed amount of memory between the socket and the requests in it.
pub struct Staging {
    buffer: Buffer,
    start: usize,
    end: usize,
}

impl Staging {
    /// The room that `buffer` has, the first bytes of which hold `first`.
    ///
    /// # Panics
    /// When `first` is longer than that.
    pub fn new(mut buffer: Buffer, first: &[u8]) -> Self {
        buffer.bytes_mut()[..first.len()].copy_from_slice(first);
        Self { buffer, start: 0, end: first.len() }
    }

    /// What was received and not consumed.
    pub fn bytes(&self) -> &[u8] {
        &self.buffer.bytes()[self.start..self.end]
    }

    /// Passes over the first bytes, as many as there are but not more than `most`; says how many.
    pub fn consume(&mut self, most: usize) -> usize {
        let count = most.min(self.end - self.start);
        self.start += count;
        count
    }

    /// Moves the first bytes into `into`, as many as both have; says how many.
    pub fn take(&mut self, into: &mut [u8]) -> usize {
        let count = into.len().min(self.end - self.start);
        into[..count].copy_from_slice(&self.bytes()[..count]);
        self.consume(count)
    }

    /// Lends out free room, at most `most` bytes, for bytes that follow those that are here. The
    /// rest of an unfinished header moves to the front first, so there is always some.
    pub fn lend(&mut self, most: usize) -> IoVector {
        let Self { start, end, .. } = *self;
        if start > 0 {
            self.buffer.bytes_mut().copy_within(start..end, 0);
            (self.start, self.end) = (0, end - start);
        }
        let room = self.buffer.len() - self.end;
        self.buffer.lend_range(self.end, room.min(most))
    }

    /// `count` bytes were received into the room that was lent.
    pub fn filled(&mut self, count: usize) {
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
        assert_eq!((staging.take(&mut two), &two), (2, b"ab"));
        let mut loan = staging.lend(100);
        assert_eq!(loan.len(), 7, "the unread byte moved to the front");
        loan.copy_from(b"defg");
        drop(loan);
        staging.filled(4);
        assert_eq!(staging.bytes(), b"cdefg");
        assert_eq!(staging.consume(4), 4);
        assert_eq!(staging.lend(3).len(), 3);
        assert_eq!(staging.consume(4), 1);
        let mut none = [0; 2];
        assert_eq!(staging.take(&mut none), 0);
    }
}
