//! Images whose guest clusters lie in another file, the data file; the image has only tables.
//!
//! Each guest cluster has exactly one place there, at its own offset, as QEMU does it: nothing is
//! allocated or counted, and no place ever gets another owner. What the tables say is whether the
//! place counts.
//!
//! - Zeros and discards of data go to the data file, and its entries stay. So nothing has to be punched
//!   after a round, when the cluster may have data again. Tables say zero only of what has no data.
//! - Where the data file is the raw disk (`data_file_raw`), tables never say zero: all zeros are written
//!   there, so that it reads as the disk without the image.
//! - A write that was given up may still fill around its own bytes, and there is no other place to go
//!   to: the next change waits for its end.

use std::ops::Range;

use blockhouse_core::{ByteRange, Error, ErrorKind, Extent, IoVector, Result, Storage, Unmap};

use super::entry::Entry;
use super::prepare::{Way, nothing_to_do};
use super::state::{Blocked, State, Step};
use super::{Qcow2, Switch};

/// What an image says of its data file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataFile {
    /// Its name, as bytes of the host's file system; relative to the image's folder.
    pub name: Vec<u8>,
    /// Whether it reads as the guest's disk without the image.
    pub raw: Switch,
}

impl DataFile {
    fn is_raw_disk(&self) -> bool {
        self.raw == Switch::On
    }
}

impl<S: Storage> Qcow2<S> {
    /// The file that holds the guest's clusters, if the image does not.
    pub fn data_file(&self) -> Option<&DataFile> {
        self.data_file.as_ref()
    }

    /// The same image with its [`data_file`](Self::data_file), without which nothing can be mapped.
    ///
    /// # Errors
    /// `InvalidInput` where the image has none; `Unsupported` when clusters are smaller than its blocks.
    pub fn with_data(self, data: S) -> Result<Self> {
        if !self.geometry.has_data_file {
            let what = "the image has no data file";
            return Err(Error::new(ErrorKind::InvalidInput, what).on(self.storage.name()));
        }
        let block = u64::from(data.capabilities().alignment.offset);
        if self.cluster_size() < block {
            let size = self.cluster_size();
            let what = format!("clusters of {size} bytes in a data file of blocks of {block}");
            return Err(Error::new(ErrorKind::Unsupported, what)
                .on(data.name())
                .hint("open it through the page cache (--cache writeback)"));
        }
        self.state.lock().data_block = block;
        Ok(Self { data: Some(data), ..self })
    }

    /// Where the host offsets of extents point to: the data file, or the image.
    pub fn data(&self) -> &S {
        self.data.as_ref().unwrap_or(&self.storage)
    }

    /// Refuses to map what lies in a file that is not open.
    pub(super) fn check_data(&self) -> Result<()> {
        if self.geometry.has_data_file && self.data.is_none() {
            let what = "the image keeps its data in a data file, which is not open";
            return Err(Error::new(ErrorKind::Unsupported, what).on(self.storage.name()));
        }
        Ok(())
    }

    /// Refuses snapshots, whose disks share clusters: in a data file each cluster has one place.
    ///
    /// # Errors
    /// `Unsupported` for an image with a data file.
    pub fn check_sharing(&self) -> Result<()> {
        if !self.geometry.has_data_file {
            return Ok(());
        }
        let what = "an image with a data file has no snapshots and no VM states";
        Err(Error::new(ErrorKind::Unsupported, what)
            .on(self.storage.name())
            .hint("convert it to an image without one"))
    }

    /// Whether the data file reads as the disk, and so has a place for each cluster.
    pub fn is_raw_disk(&self) -> bool {
        self.data_file.as_ref().is_some_and(DataFile::is_raw_disk)
    }

    /// Makes the data file as long as a disk of `size` bytes, or leaves it longer: it is never shorter
    /// than the disk, whatever a crash leaves.
    pub(super) async fn grow_data(&self, size: u64) -> Result<()> {
        match &self.data {
            Some(data) if data.size() < size => data.resize(size).await,
            _ => Ok(()),
        }
    }

    /// As [`Format::track_cow_write`](crate::Format::track_cow_write).
    pub fn track_cow_write(&self, from: IoVector) -> IoVector {
        if self.geometry.has_data_file {
            from.with_guard(self.state.lock().fills.enter())
        } else {
            from
        }
    }
}

impl State {
    /// A place in a data file is the cluster's own.
    pub(crate) fn check_data_place(&self, cluster: u64, entry: Entry) -> Step<()> {
        match entry {
            Entry::Standard { place: Some(place), .. }
                if self.geometry.has_data_file
                    && place.offset != self.geometry.offset_of(cluster) =>
            {
                let guest = self.geometry.offset_of(cluster);
                let what = format!("the data file cannot hold the guest's offset {guest} there");
                Err(self.corrupt(what, place.offset).into())
            }
            _ => Ok(()),
        }
    }

    /// Waits for what those who were given up may still write around their own bytes in these clusters.
    pub(crate) fn wait_for_fills(&mut self, clusters: &Range<u64>) -> Step<()> {
        let haunted = &mut self.pending.haunted;
        if clusters.clone().any(|cluster| haunted.contains(&cluster)) {
            if let Some(end) = self.fills.listen() {
                return Err(Blocked::Wait(end));
            }
            // None is under way: all were through.
            haunted.clear();
        }
        Ok(())
    }

    /// What becomes visible in a data file ends with the disk, so that the file is no longer than that
    /// (up to the end of a block).
    pub(crate) fn without_what_is_past_the_end(
        &self,
        whole: ByteRange,
        guest: ByteRange,
    ) -> ByteRange {
        if !self.geometry.has_data_file {
            return whole;
        }
        let end = self.header.size.next_multiple_of(self.data_block).max(guest.end());
        ByteRange::between(whole.offset(), whole.end().min(end))
    }

    fn is_raw(&self) -> bool {
        self.header.data_file.as_ref().is_some_and(DataFile::is_raw_disk)
    }

    /// Whether the first bytes of `range`, up to the end of their cluster, are all data.
    fn starts_with_data(&mut self, range: ByteRange) -> Step<bool> {
        let cluster = self.geometry.cluster_of(range.offset());
        self.pending.free_from(cluster, cluster + 1).map_err(Blocked::Wait)?;
        let Some(slice) = self.l2_slice(cluster)? else { return Ok(false) };
        Ok(matches!(self.way(slice, cluster, range)?, Way::InPlace { .. }))
    }

    /// Zeros: written over data, said by tables where there is none.
    pub(crate) fn map_zero_in_data_file(&mut self, range: ByteRange) -> Step<Extent> {
        if self.is_raw() || self.starts_with_data(range)? {
            return self.map_write(range);
        }
        // One cluster: the next may have data.
        let first = range.truncate(self.rest_of_cluster(range.offset()));
        self.map_zero_by_tables(first, Unmap::Forbidden)
    }

    /// Data is discarded at its place, which stays its own.
    pub(crate) fn map_discard_in_data_file(&mut self, range: ByteRange) -> Step<Extent> {
        if self.starts_with_data(range)? {
            return self.map_write(range);
        }
        let cluster = self.geometry.cluster_of(range.offset());
        let span = match self.l2_slice(cluster)? {
            Some(_) => self.geometry.cluster_size(),
            None => self.geometry.l1_entry_span(),
        };
        Ok(nothing_to_do(range.truncate(span - range.offset() % span)))
    }
}
