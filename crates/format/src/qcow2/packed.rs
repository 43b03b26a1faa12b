//! Places for compressed clusters, one behind the other.
//!
//! Their data needs less than a cluster each, so several share a host cluster, which is counted once
//! for each of them, and one may reach into the next host cluster, which is then counted too. One
//! cluster at a time is open for more; it stays so while anybody's data is in it. Space inside a
//! cluster is never given back by itself: it returns when the last user of the cluster is gone.

use blockhouse_core::{
    ByteRange, Error, ErrorKind, Extent, ExtentFlags, ExtentState, Result, Storage,
};

use super::Qcow2;
use super::entry::CompressedPlace;
use super::pending::Change;
use super::state::{Blocked, State, Step};

impl<S: Storage> Qcow2<S> {
    /// As [`Format::map_compressed`](crate::Format::map_compressed).
    pub async fn map_compressed(&self, guest: ByteRange, length: u64) -> Result<Extent> {
        self.check_writable()?;
        if self.geometry.has_data_file {
            let what = "an image with a data file has no compressed clusters";
            return Err(Error::new(ErrorKind::Unsupported, what).on(self.storage.name()));
        }
        self.check_intact()?;
        self.begin_changes().await?;
        let block = u64::from(self.storage().capabilities().alignment.offset);
        let prepared = self.step(|state| state.map_compressed(guest, length, block)).await;
        self.marking(prepared).await
    }
}

impl State {
    /// A place for `length` bytes that the cluster `guest` is compressed to. It starts at a multiple
    /// of `block` and has whole blocks for itself, so that nobody writes to a block of another.
    fn map_compressed(&mut self, guest: ByteRange, length: u64, block: u64) -> Step<Extent> {
        self.check_thawed()?;
        self.check_room()?;
        let cluster = self.geometry.cluster_of(guest.offset());
        let alone = cluster..cluster + 1;
        self.pending.free_from(cluster, alone.end).map_err(Blocked::Wait)?;
        if let Some(event) = self.pending.overwrites_of(&alone) {
            return Err(Blocked::Wait(event));
        }
        self.own_l2_slice(cluster)?;
        let length = length.next_multiple_of(block);
        let place = CompressedPlace { offset: self.pack(length, block)?, length };
        self.pending.begin(alone, Change::Pack(place));
        let state = ExtentState::Compressed { host: place.offset, length };
        Ok(Extent { guest, alloc_range: guest, state, flags: ExtentFlags::NEW })
    }

    /// Takes `length` bytes, less than a cluster, in the open cluster, in it and the next one, or in
    /// a new one.
    fn pack(&mut self, length: u64, block: u64) -> Step<u64> {
        let geometry = self.geometry;
        let next = self.open_end.map(|end| end.next_multiple_of(block));
        // At a cluster's end nothing is open.
        let next = next.filter(|&next| !geometry.is_cluster_aligned(next));
        if let Some(start) = next {
            let cluster = geometry.cluster_of(start);
            let count = self.refcount(cluster)?;
            if count < geometry.most_refcount() {
                let fits = start + length <= geometry.offset_of(cluster + 1);
                let beyond = if fits { None } else { Some(self.allocate(1)?.start) };
                if beyond.is_none_or(|beyond| beyond == cluster + 1) {
                    self.set_refcount(cluster, count + 1)?;
                    return self.packed(start, length);
                }
                return self.packed(geometry.offset_of(beyond.unwrap_or(cluster)), length);
            }
        }
        let taken = self.allocate(1)?.start;
        self.packed(geometry.offset_of(taken), length)
    }

    /// What follows these bytes is for the next ones.
    fn packed(&mut self, start: u64, length: u64) -> Step<u64> {
        if !CompressedPlace::is_reachable(start, self.geometry) {
            let cluster = self.geometry.cluster_of(start);
            self.free_unlinked(cluster..cluster + 1);
            let what = "compressed data can lie no further back in the file";
            return Err(Error::new(ErrorKind::NoSpace, what).on(&self.name).at(start).into());
        }
        self.open_end = Some(start + length);
        Ok(start)
    }

    /// A cluster has no user any more: nothing is packed into it.
    pub(crate) fn close_packed(&mut self, cluster: u64) {
        // The end of a full cluster lies in the next one.
        if self.open_end.is_some_and(|end| self.geometry.cluster_of(end - 1) == cluster) {
            self.open_end = None;
        }
    }
}
