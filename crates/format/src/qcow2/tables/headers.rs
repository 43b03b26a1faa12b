//! The header of an image in two versions: the version that the next writeback leaves on disk, and
//! the version on disk.
//!
//! A header write changes only the first sector. If a header write failed or its future was
//! dropped, its outcome is unknown. The header on disk is then unknown until a later header write
//! is durable.

use crate::qcow2::layout::header::{Header, Incompatible};

/// Both versions of the header, and the progress of writes of it.
pub(crate) struct Headers {
    wanted: Header,
    disk: Header,
    /// The number of header writes that were begun.
    begun: u64,
    /// The number of the newest header write that completed.
    ended: u64,
    /// The number of the newest header write that a flush has covered.
    durable: u64,
    /// The number of the newest header write that stored the extensions.
    extended: u64,
}

impl Headers {
    /// For an image with this header on disk.
    pub(crate) fn new(header: Header) -> Self {
        Self { wanted: header.clone(), disk: header, begun: 0, ended: 0, durable: 0, extended: 0 }
    }

    /// The header that the next writeback is to leave on disk.
    pub(crate) fn wanted(&self) -> &Header {
        &self.wanted
    }

    pub(crate) fn wanted_mut(&mut self) -> &mut Header {
        &mut self.wanted
    }

    /// The header as changed by the newest header write, whether or not this write is durable.
    pub(crate) fn disk(&self) -> &Header {
        &self.disk
    }

    /// Replaces both versions by `header`, which is on disk.
    pub(crate) fn replace(&mut self, header: Header) {
        self.disk = header.clone();
        self.wanted = header;
    }

    /// Takes over the names of the backing file and data file from `new`, which is on disk already.
    pub(crate) fn set_names(&mut self, new: &Header) {
        for header in [&mut self.wanted, &mut self.disk] {
            header.backing.clone_from(&new.backing);
            header.data_file.clone_from(&new.data_file);
            header.extensions.clone_from(&new.extensions);
        }
        self.extended = 0;
    }

    /// Begins a write that changes the header on disk: patches `bytes`, the header's first bytes.
    /// Extensions that change or move must fit into the first sector ([`Header::fit_extensions`]).
    /// Returns the number of the write.
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
        // The next writeback repeats this write, unless a flush covers this write first.
        self.begun += 1;
        let is_changed = self.disk.extensions != extensions || self.disk.length != length;
        if is_changed || self.durable < self.extended {
            self.wanted.extensions.clone_from(&self.disk.extensions);
            self.disk.put_extensions(bytes);
            self.extended = self.begun;
        }
        self.begun
    }

    /// Records that the header write with this number completed.
    pub(crate) fn end_write(&mut self, number: u64) {
        self.ended = self.ended.max(number);
    }

    /// The number of the newest header write that completed. A flush that begins now covers this
    /// write.
    pub(crate) fn last_ended(&self) -> u64 {
        self.ended
    }

    /// Records that a flush has covered the header writes up to `number`.
    pub(crate) fn set_durable(&mut self, number: u64) {
        self.durable = self.durable.max(number);
    }

    /// Whether a header write was begun that may not be durable.
    pub(crate) fn is_write_unknown(&self) -> bool {
        self.durable < self.begun
    }

    /// Whether the header on disk has this bit durably.
    pub(crate) fn is_marked_durably(&self, bit: Incompatible) -> bool {
        self.disk.incompatible.contains(bit) && !self.is_write_unknown()
    }
}
