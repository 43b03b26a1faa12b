//! Open files in a ring's own table (`IORING_REGISTER_FILES`), so that a request names a slot there and
//! the kernel need not look the descriptor up.
//!
//! A file is known by a small number of its own, which the process gives out at open; each ring finds
//! the slot by one look into an array. A slot is filled by the file's first request on that ring.
//!
//! Promises: a slot is emptied only after the file was closed, which is after its last request
//! completed, as each request owns the file; so no request ever meets another file in its slot. A
//! number is given out anew only after every ring has emptied the file's slot. A file that finds no
//! slot keeps its plain descriptor.

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use io_uring::Submitter;
use parking_lot::Mutex;

use crate::membership::{Holder, Membership};

/// Slots of one ring. One that serves more images at a time reaches the others plainly.
const SLOTS: u32 = 256;

/// Whether the rings know open files by slots of their own tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FixedFiles {
    /// Every request names a slot, where the kernel (5.19 on) has such tables and the file found one.
    On,
    /// Every request names the plain descriptor.
    Off,
}

/// The number of an open file in this process. It goes back when the last owner is gone: the file
/// itself, or a ring that has it in a slot.
pub(crate) struct Number(u32);

/// What is free below `next`, the smallest number that was never given out.
struct Numbers {
    free: Vec<u32>,
    next: u32,
}

static NUMBERS: Mutex<Numbers> = Mutex::new(Numbers { free: Vec::new(), next: 0 });

impl Number {
    pub(crate) fn take() -> Self {
        let mut numbers = NUMBERS.lock();
        let fresh = numbers.next;
        Self(numbers.free.pop().unwrap_or_else(|| {
            numbers.next = fresh + 1;
            fresh
        }))
    }

    fn index(&self) -> usize {
        self.0 as usize
    }
}

impl Drop for Number {
    fn drop(&mut self) {
        NUMBERS.lock().free.push(self.0);
    }
}

/// What a request of a ring names as its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Descriptor(RawFd),
    Slot(u32),
}

/// Where a file stands with a ring.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// It has no slot, as far as is known.
    Outside,
    Slot(u32),
    /// The kernel does not take it.
    Refused,
}

/// The table of one ring.
pub(crate) struct FixedTable {
    holder: Arc<dyn Holder<Number>>,
    state: State,
    /// By the file's number.
    standing: Vec<Standing>,
    /// By slot: the number stays taken as long as the slot is.
    slots: Vec<Option<Arc<Number>>>,
    free: Vec<u32>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// The kernel has not been asked for a table yet.
    Wanted,
    Registered,
    /// Not asked for, or refused: the kernel is too old, or the limit on open files too low.
    Absent,
}

impl FixedTable {
    /// The table of a ring whose loop is `holder`. It takes nothing before the first file comes.
    pub(crate) fn new(holder: Arc<dyn Holder<Number>>, fixed: FixedFiles) -> Self {
        let state = match fixed {
            FixedFiles::On => State::Wanted,
            FixedFiles::Off => State::Absent,
        };
        Self { holder, state, standing: Vec::new(), slots: Vec::new(), free: Vec::new() }
    }

    /// What a request for that file is to name. Its first request puts it into a free slot.
    pub(crate) fn place(
        &mut self,
        ring: &Submitter<'_>,
        file: &Membership<Number>,
        descriptor: RawFd,
    ) -> Place {
        match self.standing.get(file.thing().index()) {
            Some(Standing::Slot(slot)) => Place::Slot(*slot),
            Some(Standing::Refused) => Place::Descriptor(descriptor),
            Some(Standing::Outside) | None => match self.admit(ring, file, descriptor) {
                Some(slot) => Place::Slot(slot),
                None => Place::Descriptor(descriptor),
            },
        }
    }

    fn admit(
        &mut self,
        ring: &Submitter<'_>,
        file: &Membership<Number>,
        descriptor: RawFd,
    ) -> Option<u32> {
        if self.state == State::Wanted {
            self.register(ring);
        }
        let slot = self.free.pop()?;
        let index = file.thing().index();
        if self.standing.len() <= index {
            self.standing.resize(index + 1, Standing::Outside);
        }
        if fill(ring, slot, descriptor).is_err() {
            self.free.push(slot);
            self.standing[index] = Standing::Refused;
            // So that the mark goes with the file, and is not left to the next of that number.
            file.add(&self.holder);
            return None;
        }
        self.standing[index] = Standing::Slot(slot);
        self.slots[slot as usize] = Some(Arc::clone(file.thing()));
        file.add(&self.holder);
        Some(slot)
    }

    fn register(&mut self, ring: &Submitter<'_>) {
        self.state = State::Absent;
        if ring.register_files_sparse(SLOTS).is_ok() {
            self.state = State::Registered;
            self.slots.resize_with(SLOTS as usize, || None);
            self.free.extend((0..SLOTS).rev());
        }
    }

    /// Empties the slot of a file that is closed.
    pub(crate) fn forget(&mut self, ring: &Submitter<'_>, number: &Number) {
        let Some(standing) = self.standing.get_mut(number.index()) else { return };
        let standing = std::mem::replace(standing, Standing::Outside);
        if let Standing::Slot(slot) = standing {
            // It cannot fail for a slot of the table. If it did, the slot would be filled anew all
            // the same: to fill it replaces what is there.
            let _ = fill(ring, slot, EMPTY);
            self.slots[slot as usize] = None;
            self.free.push(slot);
        }
    }

    /// Gives the whole table back. No request is under way.
    pub(crate) fn close(&mut self, ring: &Submitter<'_>) {
        if self.state == State::Registered {
            // Only a ring without a table refuses.
            let _ = ring.unregister_files();
        }
        self.state = State::Absent;
        self.standing.clear();
        self.slots.clear();
        self.free.clear();
    }
}

/// What stands for "no file" where a descriptor is expected.
const EMPTY: RawFd = -1;

fn fill(ring: &Submitter<'_>, slot: u32, descriptor: RawFd) -> io::Result<()> {
    ring.register_files_update(slot, &[descriptor]).map(drop)
}
