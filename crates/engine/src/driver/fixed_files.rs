//! Open files in a ring's own table (`IORING_REGISTER_FILES`), so that a request names a slot there
//! and the kernel need not look the descriptor up.
//!
//! A file gets a small id when it is opened, unique in the process. Each ring finds the file's slot
//! by one look into an array. A slot is filled by the file's first request on that ring.
//!
//! Guarantees: a slot is emptied only after the file was closed. Each request owns its file, so the
//! file's last request has completed by then. No request finds another file in its slot. An id is
//! reused only after every ring has emptied the file's slot. Requests of a file without a slot use
//! its descriptor.

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use io_uring::Submitter;
use parking_lot::Mutex;

use crate::driver::registrations::{Registrations, Unregister};

/// The number of slots of one ring. For further files, the ring uses their descriptors.
const SLOTS: u32 = 256;

/// Whether the rings identify open files by slots of their own tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FixedFiles {
    /// Every request names a slot, if the kernel (5.19 or later) has such tables and the file got
    /// one.
    On,
    /// Every request names the plain descriptor.
    Off,
}

/// The id of an open file in this process. It is released by the last owner: the file itself, or a
/// ring that has it in a slot.
pub(crate) struct FileId(u32);

/// The free ids below `next`, the smallest id that was never given out.
struct FileIds {
    free: Vec<u32>,
    next: u32,
}

static IDS: Mutex<FileIds> = Mutex::new(FileIds { free: Vec::new(), next: 0 });

impl FileId {
    pub(crate) fn take() -> Self {
        let mut ids = IDS.lock();
        let fresh = ids.next;
        Self(ids.free.pop().unwrap_or_else(|| {
            ids.next = fresh + 1;
            fresh
        }))
    }

    fn index(&self) -> usize {
        self.0 as usize
    }
}

impl Drop for FileId {
    fn drop(&mut self) {
        IDS.lock().free.push(self.0);
    }
}

/// The name of a file in a ring's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileRef {
    Fd(RawFd),
    Fixed(u32),
}

/// The state of a file in a ring's table.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FileSlot {
    /// The file has no slot on this ring.
    Unregistered,
    Registered(u32),
    /// The kernel did not accept the file.
    Rejected,
}

/// The table of one ring.
pub(crate) struct FixedTable {
    owner: Arc<dyn Unregister<FileId>>,
    state: State,
    /// The state of each file, by the file's id.
    file_slots: Vec<FileSlot>,
    /// For each slot, the id of its file. The id is not reused while the slot is in use.
    slots: Vec<Option<Arc<FileId>>>,
    free: Vec<u32>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// The kernel was not asked for a table yet.
    Pending,
    Registered,
    /// The table was not requested, or the kernel refused it because it is too old or the limit on
    /// open files is too low.
    Absent,
}

impl FixedTable {
    /// The table of a ring of the loop `owner`. It allocates nothing before the first file.
    pub(crate) fn new(owner: Arc<dyn Unregister<FileId>>, fixed: FixedFiles) -> Self {
        let state = match fixed {
            FixedFiles::On => State::Pending,
            FixedFiles::Off => State::Absent,
        };
        Self { owner, state, file_slots: Vec::new(), slots: Vec::new(), free: Vec::new() }
    }

    /// The reference to a file in a request. The file's first request on this ring puts it into a
    /// free slot.
    pub(crate) fn file_ref(
        &mut self,
        ring: &Submitter<'_>,
        file: &Registrations<FileId>,
        descriptor: RawFd,
    ) -> FileRef {
        match self.file_slots.get(file.resource().index()) {
            Some(FileSlot::Registered(slot)) => FileRef::Fixed(*slot),
            Some(FileSlot::Rejected) => FileRef::Fd(descriptor),
            Some(FileSlot::Unregistered) | None => match self.register(ring, file, descriptor) {
                Some(slot) => FileRef::Fixed(slot),
                None => FileRef::Fd(descriptor),
            },
        }
    }

    fn register(
        &mut self,
        ring: &Submitter<'_>,
        file: &Registrations<FileId>,
        descriptor: RawFd,
    ) -> Option<u32> {
        if self.state == State::Pending {
            self.create(ring);
        }
        let slot = self.free.pop()?;
        let index = file.resource().index();
        if self.file_slots.len() <= index {
            self.file_slots.resize(index + 1, FileSlot::Unregistered);
        }
        if fill(ring, slot, descriptor).is_err() {
            self.free.push(slot);
            self.file_slots[index] = FileSlot::Rejected;
            // Registered so that the mark is removed when the file closes. Otherwise the next file
            // with this id would inherit the mark.
            file.add(&self.owner);
            return None;
        }
        self.file_slots[index] = FileSlot::Registered(slot);
        self.slots[slot as usize] = Some(Arc::clone(file.resource()));
        file.add(&self.owner);
        Some(slot)
    }

    fn create(&mut self, ring: &Submitter<'_>) {
        self.state = State::Absent;
        if ring.register_files_sparse(SLOTS).is_ok() {
            self.state = State::Registered;
            self.slots.resize_with(SLOTS as usize, || None);
            self.free.extend((0..SLOTS).rev());
        }
    }

    /// Empties the slot of a file that is closed.
    pub(crate) fn unregister(&mut self, ring: &Submitter<'_>, id: &FileId) {
        let Some(file_slot) = self.file_slots.get_mut(id.index()) else { return };
        let file_slot = std::mem::replace(file_slot, FileSlot::Unregistered);
        if let FileSlot::Registered(slot) = file_slot {
            // This cannot fail for a slot of the table. If it did, reuse of the slot would still be
            // safe, because it replaces the old file.
            let _ = fill(ring, slot, EMPTY);
            self.slots[slot as usize] = None;
            self.free.push(slot);
        }
    }

    /// Unregisters the whole table. No request is in flight.
    pub(crate) fn close(&mut self, ring: &Submitter<'_>) {
        if self.state == State::Registered {
            // This fails only for a ring without a table.
            let _ = ring.unregister_files();
        }
        self.state = State::Absent;
        self.file_slots.clear();
        self.slots.clear();
        self.free.clear();
    }
}

/// The value for "no file" in place of a descriptor.
const EMPTY: RawFd = -1;

fn fill(ring: &Submitter<'_>, slot: u32, descriptor: RawFd) -> io::Result<()> {
    ring.register_files_update(slot, &[descriptor]).map(drop)
}
