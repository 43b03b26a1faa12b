//! The disk's side of jobs: a mirror, a commit, a stream, a backup. Jobs observe the disk's
//! changes, copy its data, and replace its image or detach its backing file.

use std::sync::Arc;

use blockhouse_core::{ByteRange, Result, Storage};

use super::Disk;
use crate::observers::ChangeObserver;
use crate::read_probe::ReadProbe;

/// The handle for jobs on a disk in use: its [base](Self::base), the parts that the disk leaves to
/// its backing file ([`populate`](Self::populate)), and the observers of the disk's changes. See
/// also [`QuiescedDisk`].
///
/// [`QuiescedDisk`]: super::QuiescedDisk
pub struct DiskJobs<'a, S: Storage> {
    pub(super) disk: &'a Disk<S>,
}

impl<S: Storage> Clone for DiskJobs<'_, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: Storage> Copy for DiskJobs<'_, S> {}

impl<S: Storage> Disk<S> {
    /// The handle for jobs on the disk.
    pub fn jobs(&self) -> DiskJobs<'_, S> {
        DiskJobs { disk: self }
    }
}

impl<'a, S: Storage> DiskJobs<'a, S> {
    /// The disk.
    pub(crate) fn disk(self) -> &'a Disk<S> {
        self.disk
    }

    /// Reports all later changes to `observer`.
    ///
    /// # Errors
    /// As [`Disk::quiesced`].
    pub async fn observe(self, observer: Arc<dyn ChangeObserver>) -> Result<()> {
        let _guard = self.disk.quiesce().await?;
        self.disk.observers.attach(observer);
        Ok(())
    }

    /// Detaches `observer`. The observer still gets reports of changes in flight.
    pub fn stop_observing(self, observer: &Arc<dyn ChangeObserver>) {
        self.disk.observers.detach(observer);
    }

    /// Starts a probe for reads of exactly these ranges by the disk's exports, to detect that
    /// another disk is an export of this one. A second probe replaces the ranges, and the drop of
    /// either probe ends both.
    pub fn probe_reads(self, ranges: Vec<ByteRange>) -> ReadProbe<'a> {
        self.disk.read_probes.begin(ranges)
    }
}
