//! The header of an image in two versions: the version that the next writeback leaves on disk, and
//! the version on disk.
//!
//! A header write changes only the first sector. If a header write failed or its future was
//! dropped, its outcome is unknown. The header on disk is then unknown until a later header write
//! is durable. If the write was to store other names, later writes store the old names.

use crate::qcow2::layout::header::{Header, Incompatible, SECTOR};

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
    /// The old names, if it is unknown whether a failed change has replaced them on disk.
    old_names: Option<OldNames>,
}

/// Names that each header write stores, until one of these writes is durable.
struct OldNames {
    /// The first sector with these names.
    sector: Vec<u8>,
    /// The length of the header's fields.
    length: usize,
    /// The number of the first header write that stores the names.
    first_write: u64,
}

/// Stores the names of `sector`, a header's first sector, into `bytes`: the fields of the backing
/// file's name, and all after the fields, which have `length` bytes.
pub(crate) fn put_names(bytes: &mut [u8], length: usize, sector: &[u8]) {
    bytes[8..20].copy_from_slice(&sector[8..20]);
    bytes[length..SECTOR].copy_from_slice(&sector[length..SECTOR]);
}

impl Headers {
    /// For an image with this header on disk.
    pub(crate) fn new(header: Header) -> Self {
        let (wanted, disk) = (header.clone(), header);
        Self { wanted, disk, begun: 0, ended: 0, durable: 0, extended: 0, old_names: None }
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

    /// Makes each header write store the names of `sector`, the first sector before a change of
    /// names that failed or was dropped, until one of these writes is durable. The names in memory
    /// are the old ones already.
    pub(crate) fn restore_names(&mut self, sector: &[u8]) {
        let (sector, length) = (sector[..SECTOR].to_vec(), self.disk.length);
        self.old_names = Some(OldNames { sector, length, first_write: self.begun + 1 });
    }

    /// Whether the old names must be stored again.
    pub(crate) fn has_old_names(&self) -> bool {
        self.old_names.is_some()
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
        if let Some(OldNames { sector, length, .. }) = &self.old_names {
            put_names(bytes, *length, sector);
        }
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
        self.old_names.take_if(|names| names.first_write <= number);
    }

    /// Whether a header write was begun that may not be durable, or names must be stored again.
    pub(crate) fn is_write_unknown(&self) -> bool {
        self.durable < self.begun || self.has_old_names()
    }

    /// Whether the header on disk has this bit durably.
    pub(crate) fn is_marked_durably(&self, bit: Incompatible) -> bool {
        self.disk.incompatible.contains(bit) && !self.is_write_unknown()
    }
}
