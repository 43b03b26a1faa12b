//! Checks that a machine's state is complete. Reason: at the end of a pipe, a reader cannot tell a
//! writer that has finished from a writer that has died.
//!
//! QEMU's stream begins with "QEVM" and ends with a byte 0, then a byte 6, the length of a
//! description of its devices (32 bits, big-endian), and the description, a JSON object. Streams of
//! other programs are not checked.

const MAGIC: &[u8] = b"QEVM";
const BEFORE: [u8; 2] = [0, 6];
/// Maximum number of bytes of the stream's end that are kept. A description usually has some ten
/// thousand bytes.
const KEPT: usize = 2 << 20;

/// The first and the last bytes of a stream.
#[derive(Default)]
pub struct StreamEnd {
    first: Vec<u8>,
    last: Vec<u8>,
}

impl StreamEnd {
    /// Adds the next bytes of the stream.
    pub fn look_at(&mut self, bytes: &[u8]) {
        let missing = MAGIC.len() - self.first.len();
        self.first.extend(&bytes[..missing.min(bytes.len())]);
        if self.is_qemu() {
            let surplus = (self.last.len() + bytes.len()).saturating_sub(KEPT);
            self.last.drain(..surplus.min(self.last.len()));
            self.last.extend(&bytes[bytes.len().saturating_sub(KEPT)..]);
        }
    }

    fn is_qemu(&self) -> bool {
        self.first == MAGIC
    }

    /// # Errors
    /// The error says what is missing.
    pub fn check(&self) -> Result<(), &'static str> {
        if self.first.is_empty() {
            return Err("standard input had nothing; is the producer's pipe connected?");
        }
        if !self.is_qemu() || self.has_description() {
            return Ok(());
        }
        Err(
            "the state ends early: QEMU's description of the devices is missing at its end; let QEMU \
             finish, and see whether it says why it stopped (machines with suppress-vmdesc=on leave it out)",
        )
    }

    fn has_description(&self) -> bool {
        if self.last.last() != Some(&b'}') {
            return false;
        }
        let length = self.last.len();
        let head = BEFORE.len() + 4;
        (0..length.saturating_sub(head)).any(|at| {
            let description = (length - at - head) as u32;
            let (before, rest) = self.last[at..].split_at(BEFORE.len());
            before == BEFORE && rest[..4] == description.to_be_bytes() && rest[4] == b'{'
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(length: usize) -> Vec<u8> {
        let mut bytes = [MAGIC, &vec![7; length]].concat();
        let description = b"{\"devices\":[]}";
        bytes.extend(BEFORE);
        bytes.extend((description.len() as u32).to_be_bytes());
        bytes.extend(description);
        bytes
    }

    fn check(bytes: &[u8], piece: usize) -> Result<(), &'static str> {
        let mut end = StreamEnd::default();
        bytes.chunks(piece).for_each(|piece| end.look_at(piece));
        end.check()
    }

    #[test]
    fn a_whole_stream_is_recognised_in_pieces_of_any_size() {
        for piece in [1, 3, 1000, 1 << 20, 5 << 20] {
            let length = if piece < 1000 { 5000 } else { 3 << 20 };
            assert_eq!(check(&stream(length), piece), Ok(()), "{piece}");
        }
    }

    #[test]
    fn a_stream_that_ends_early_is_refused_wherever_that_is() {
        let whole = stream(100);
        for length in 4..whole.len() {
            assert!(check(&whole[..length], 17).is_err(), "{length}");
        }
        assert!(check(&[], 1).is_err());
    }

    #[test]
    fn what_is_not_of_qemu_may_end_anywhere() {
        assert_eq!(check(b"anything", 3), Ok(()));
    }
}
