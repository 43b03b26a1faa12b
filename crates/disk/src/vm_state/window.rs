//! A window: an aligned piece of a state that is being filled.

use blockhouse_core::Buffer;

/// A window. The bytes before `filled` are known.
pub(super) struct Window {
    index: u64,
    buffer: Buffer,
    filled: usize,
}

impl Window {
    /// An empty window; `buffer` may have any content.
    pub(super) fn new(index: u64, buffer: Buffer) -> Self {
        Self { index, buffer, filled: 0 }
    }

    /// A window that was stored before; `buffer` has its bytes.
    pub(super) fn filled(index: u64, buffer: Buffer) -> Self {
        Self { index, filled: buffer.len(), buffer }
    }

    /// The window's number: the number of windows before it.
    pub(super) fn index(&self) -> u64 {
        self.index
    }

    /// Puts bytes at `start`; skipped bytes become zeros.
    pub(super) fn put(&mut self, start: usize, bytes: &[u8]) {
        let (end, memory) = (start + bytes.len(), self.buffer.bytes_mut());
        if start > self.filled {
            memory[self.filled..start].fill(0);
        }
        memory[start..end].copy_from_slice(bytes);
        self.filled = self.filled.max(end);
    }

    /// Fills all bytes that are not known with zeros.
    pub(super) fn fill(&mut self) {
        self.buffer.bytes_mut()[self.filled..].fill(0);
        self.filled = self.buffer.len();
    }

    /// Fills the last cluster up with zeros; returns the number of clusters with content.
    pub(super) fn close(&mut self, cluster_size: usize) -> usize {
        let count = self.filled.div_ceil(cluster_size);
        self.buffer.bytes_mut()[self.filled..count * cluster_size].fill(0);
        count
    }

    /// The bytes of the window's cluster with this number, from 0.
    pub(super) fn cluster(&self, number: u64, cluster_size: u64) -> &[u8] {
        &self.buffer.bytes()[(number * cluster_size) as usize..][..cluster_size as usize]
    }

    pub(super) fn into_buffer(self) -> Buffer {
        self.buffer
    }
}

/// Whether all bytes are 0.
pub(super) fn is_zero(bytes: &[u8]) -> bool {
    const ZEROS: [u8; 4096] = [0; 4096];
    // Stops at the first part that is not zeros.
    bytes.chunks(ZEROS.len()).all(|part| part == &ZEROS[..part.len()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_skipped_is_zeros_whatever_the_memory_held() {
        let mut buffer = Buffer::new(4096);
        buffer.bytes_mut().fill(0xee);
        let mut window = Window::new(3, buffer);
        window.put(10, &[1, 2]);
        window.put(5, &[3]);
        window.put(600, &[4]);
        assert_eq!(window.close(512), 2);
        let bytes = window.into_buffer().bytes().to_vec();
        let mut wanted = vec![0; 1024];
        (wanted[5], wanted[10], wanted[11], wanted[600]) = (3, 1, 2, 4);
        assert_eq!(bytes[..1024], wanted);
        assert_eq!(bytes[1024..], [0xee; 3072], "not asked for");
    }

    #[test]
    fn one_byte_makes_the_difference() {
        let mut bytes = vec![0; 65_536];
        assert!(is_zero(&bytes) && is_zero(&[]));
        bytes[65_535] = 1;
        assert!(!is_zero(&bytes));
    }
}
