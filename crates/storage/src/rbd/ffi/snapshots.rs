//! The snapshots of an image.

use std::ffi::c_int;
use std::io;
use std::time::Duration;

use blockhouse_core::{SnapshotChange, StorageSnapshot};

use super::image::{Image, text};
use super::library::{SnapshotRecord, Time};
use super::waiter::Waiter;
use super::{c_string, check};

/// Snapshots that are asked for at first.
const USUAL_COUNT: usize = 16;

impl<W: Waiter> Image<W> {
    /// All snapshots, in the order in which they were taken.
    pub(crate) fn snapshots(&self) -> io::Result<Vec<StorageSnapshot>> {
        let empty = SnapshotRecord { id: 0, size: 0, name: std::ptr::null() };
        let mut records = vec![empty; USUAL_COUNT];
        let count = loop {
            let mut room = c_int::try_from(records.len()).unwrap_or(c_int::MAX);
            let list = self.rbd().rbd_snap_list;
            // SAFETY: there is room for as many records. One more than there are snapshots is filled, with a null name.
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
        // SAFETY: they are the records that librbd has filled, up to the null name; none is used afterwards.
        unsafe { (self.rbd().rbd_snap_list_end)(records.as_mut_ptr()) };
        Ok(snapshots)
    }

    /// When a snapshot was taken; zero where that is not known any more.
    fn time_of(&self, id: u64) -> Duration {
        let mut time = Time::default();
        // SAFETY: there is room for the time.
        let code = unsafe { (self.rbd().rbd_snap_get_timestamp)(self.handle, id, &raw mut time) };
        let seconds = u64::try_from(time.seconds).unwrap_or(0);
        match check(code) {
            Ok(_) => Duration::new(seconds, u32::try_from(time.nanoseconds).unwrap_or(0)),
            Err(_) => Duration::ZERO,
        }
    }

    /// Changes the snapshots.
    ///
    /// # Errors
    /// EEXIST for a name that is taken, ENOENT for one that there is not; EBUSY for a snapshot that is protected.
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
