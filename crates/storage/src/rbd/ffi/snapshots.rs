//! The snapshots of an image, and the ranges that have changed since a snapshot.

use std::ffi::c_int;
use std::io;
use std::time::Duration;

use blockhouse_core::{Allocation, ByteRange, SnapshotChange, StorageChange, StorageSnapshot};

use super::image::{Image, text};
use super::library::{Handle, SnapshotRecord, Time};
use super::waiter::Waiter;
use super::{c_string, check};

/// Number of snapshots that the first query has memory for.
const USUAL_COUNT: usize = 16;

impl<W: Waiter> Image<W> {
    /// All snapshots, in the order in which they were taken.
    pub(crate) fn snapshots(&self) -> io::Result<Vec<StorageSnapshot>> {
        let empty = SnapshotRecord { id: 0, size: 0, name: std::ptr::null() };
        let mut records = vec![empty; USUAL_COUNT];
        let count = loop {
            let mut room = c_int::try_from(records.len()).unwrap_or(c_int::MAX);
            let list = self.rbd().rbd_snap_list;
            // SAFETY: there is memory for that many records. After the last snapshot librbd fills
            // one more record, with a null name.
            let code = unsafe { list(self.handle, records.as_mut_ptr(), &raw mut room) };
            let needed = usize::try_from(room).unwrap_or(0);
            if code == -rustix::io::Errno::RANGE.raw_os_error() && needed > records.len() {
                records.resize(needed, empty);
                continue;
            }
            break check(code)? as usize;
        };
        let snapshots = records[..count].iter().map(|record| StorageSnapshot {
            id: record.id,
            // SAFETY: librbd has filled the record with a string, which is given back below.
            name: unsafe { text(record.name) },
            created: self.time_of(record.id),
            size: record.size,
        });
        let snapshots = snapshots.collect();
        // SAFETY: they are the records that librbd has filled, up to the null name; none is used
        // afterwards.
        unsafe { (self.rbd().rbd_snap_list_end)(records.as_mut_ptr()) };
        Ok(snapshots)
    }

    /// The time when a snapshot was taken; zero for a snapshot that is removed by now.
    fn time_of(&self, id: u64) -> Duration {
        let mut time = Time::default();
        // SAFETY: the time's memory is large enough.
        let code = unsafe { (self.rbd().rbd_snap_get_timestamp)(self.handle, id, &raw mut time) };
        let seconds = u64::try_from(time.seconds).unwrap_or(0);
        match check(code) {
            Ok(_) => Duration::new(seconds, u32::try_from(time.nanoseconds).unwrap_or(0)),
            Err(_) => Duration::ZERO,
        }
    }

    /// The ranges inside of `range` that were written or discarded since a snapshot was taken, in
    /// order.
    ///
    /// # Errors
    /// ENOENT if there is no such snapshot. EINVAL if the snapshot is younger than the one at which
    /// the image was opened.
    pub(crate) fn changes_since(
        &self,
        snapshot: &str,
        range: ByteRange,
    ) -> io::Result<Vec<StorageChange>> {
        let snapshot = c_string(snapshot)?;
        let mut found = Changes { range, changes: Vec::new() };
        let (whole_objects, with_parent) = (0, 1);
        // SAFETY: the callback is called during the call only, and gets the list, which has no
        // other user during it.
        let code = unsafe {
            (self.rbd().rbd_diff_iterate2)(
                self.handle,
                snapshot.as_ptr(),
                range.offset(),
                range.length(),
                with_parent,
                whole_objects,
                on_change,
                (&raw mut found).cast(),
            )
        };
        check(code)?;
        found.changes.sort_by_key(|change| change.range.offset());
        Ok(found.changes)
    }

    /// Changes the snapshots.
    ///
    /// # Errors
    /// EEXIST for an existing name, ENOENT for a missing one; EBUSY for a protected snapshot.
    pub(crate) fn change_snapshots(&self, change: SnapshotChange<'_>) -> io::Result<()> {
        let (rbd, image) = (self.rbd(), self.handle);
        let code = match change {
            SnapshotChange::Rename { from, to } => {
                let (from, to) = (c_string(from)?, c_string(to)?);
                // SAFETY: the image is open, as in all calls here.
                unsafe { (rbd.rbd_snap_rename)(image, from.as_ptr(), to.as_ptr()) }
            }
            SnapshotChange::Create(name) => {
                let name = c_string(name)?;
                // SAFETY: as above.
                unsafe { (rbd.rbd_snap_create)(image, name.as_ptr()) }
            }
            SnapshotChange::Delete(name) => {
                let name = c_string(name)?;
                // SAFETY: as above.
                unsafe { (rbd.rbd_snap_remove)(image, name.as_ptr()) }
            }
            SnapshotChange::Apply(name) => {
                let name = c_string(name)?;
                // SAFETY: as above.
                unsafe { (rbd.rbd_snap_rollback)(image, name.as_ptr()) }
            }
        };
        check(code).map(drop)
    }
}

/// The changes that a diff has found in a range.
struct Changes {
    range: ByteRange,
    changes: Vec<StorageChange>,
}

impl Changes {
    /// Adds the part of an extent that is inside of the range.
    fn add(&mut self, offset: u64, length: u64, exists: bool) {
        let start = offset.max(self.range.offset());
        let end = offset.saturating_add(length).min(self.range.end());
        if start < end {
            let allocation = if exists { Allocation::Data } else { Allocation::Hole };
            self.changes.push(StorageChange { range: ByteRange::between(start, end), allocation });
        }
    }
}

/// # Safety
/// `found` is [`Changes`] that nothing else uses during the call.
unsafe extern "C" fn on_change(offset: u64, length: usize, exists: c_int, found: Handle) -> c_int {
    // SAFETY: the caller guarantees it.
    let found = unsafe { &mut *found.cast::<Changes>() };
    found.add(offset, length as u64, exists != 0);
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_taken_as_far_as_it_is_in_the_range() {
        let mut found = Changes { range: ByteRange::between(100, 200), changes: Vec::new() };
        for (offset, length) in [(0, 100), (90, 20), (150, 10), (190, u64::MAX), (200, 1)] {
            found.add(offset, length, offset != 150);
        }
        let change = |start, end, allocation| StorageChange {
            range: ByteRange::between(start, end),
            allocation,
        };
        let expected = [
            change(100, 110, Allocation::Data),
            change(150, 160, Allocation::Hole),
            change(190, 200, Allocation::Data),
        ];
        assert_eq!(found.changes, expected);
    }
}
