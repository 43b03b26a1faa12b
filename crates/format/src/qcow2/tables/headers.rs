//! The header as it should be and as it is on disk.
//!
//! Only the first sector ever changes, with one write. A write whose outcome is not known (it
//! failed, or its future was dropped) leaves the disk's header unknown until another one is
//! durable.

use crate::qcow2::layout::header::{Header, Incompatible};

/// Both headers, and the writes between them.
pub(crate) struct Headers {
    wanted: Header,
    disk: Header,
    /// Writes of the header that were begun.
    begun: u64,
    /// The newest of them that completed.
    ended: u64,
    /// The newest of them that a flush has covered.
    durable: u64,
}

impl Headers {
    /// Of an image with this header on disk.
    pub(crate) fn new(header: Header) -> Self {
        Self { wanted: header.clone(), disk: header, begun: 0, ended: 0, durable: 0 }
    }

    /// As it should be.
    pub(crate) fn wanted(&self) -> &Header {
        &self.wanted
    }

    pub(crate) fn wanted_mut(&mut self) -> &mut Header {
        &mut self.wanted
    }

    /// As the last write of it made it.
    pub(crate) fn disk(&self) -> &Header {
        &self.disk
    }

    /// Another header is the active one, on disk and in memory.
    pub(crate) fn replace(&mut self, header: Header) {
        self.disk = header.clone();
        self.wanted = header;
    }

    /// The image names another backing file or data file: the disk says so already.
    pub(crate) fn set_names(&mut self, new: &Header) {
        for header in [&mut self.wanted, &mut self.disk] {
            header.backing.clone_from(&new.backing);
            header.data_file.clone_from(&new.data_file);
            header.extensions.clone_from(&new.extensions);
        }
    }

    /// Begins a write that changes the header on disk: patches its first bytes. Extensions that
    /// change or move fit into the first sector ([`Header::fit_extensions`]). Returns the
    /// number of the write.
    pub(crate) fn begin_write(
        &mut self,
        change: impl FnOnce(&mut Header),
        bytes: &mut [u8],
    ) -> u64 {
        let (extensions, length) = (self.disk.extensions.clone(), self.disk.length);
        change(&mut self.disk);
        self.wanted.incompatible = self.disk.incompatible;
        self.wanted.autoclear = self.disk.autoclear;
        self.disk.patch(bytes);
        if self.disk.extensions != extensions || self.disk.length != length {
            self.wanted.extensions.clone_from(&self.disk.extensions);
            self.disk.put_extensions(bytes);
        }
        // The next writeback repeats this write before it relies on it, whether it succeeds or not.
        self.begun += 1;
        self.begun
    }

    /// The write with this number completed.
    pub(crate) fn end_write(&mut self, number: u64) {
        self.ended = self.ended.max(number);
    }

    /// The newest write that completed: a flush that begins now covers it.
    pub(crate) fn last_ended(&self) -> u64 {
        self.ended
    }

    /// A flush has covered the writes that had completed up to `number`.
    pub(crate) fn set_durable(&mut self, number: u64) {
        self.durable = self.durable.max(number);
    }

    /// Whether a write was begun whose end is not durable.
    pub(crate) fn is_write_unknown(&self) -> bool {
        self.durable < self.begun
    }

    /// Whether the header on disk has this bit, durably.
    pub(crate) fn is_marked_durably(&self, bit: Incompatible) -> bool {
        self.disk.incompatible.contains(bit) && !self.is_write_unknown()
    }
}
