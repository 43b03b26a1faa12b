//! A larger disk: more L1 entries, then the size.

use std::sync::atomic::Ordering;

use blockhouse_core::{Error, ErrorKind, Result, Storage};

use super::Qcow2;
use super::alloc::Punch;
use super::state::{State, Step};

/// The largest L1 table, in bytes.
const MOST_L1_BYTES: u64 = 32 << 20;

impl<S: Storage> Qcow2<S> {
    /// As [`Format::resize`](crate::Format::resize), to a larger size only. What lies beyond the old
    /// end in the last cluster or in the backing file comes to light: the caller zeroes it.
    pub async fn resize(&self, size: u64) -> Result<()> {
        self.check_writable()?;
        let invalid =
            |what: String| Err(Error::new(ErrorKind::InvalidInput, what).on(self.storage().name()));
        if !size.is_multiple_of(512) {
            return invalid(format!("a disk of {size} bytes is no multiple of 512"));
        }
        if size < self.size() {
            return invalid(format!("cannot make a disk of {} bytes shorter: {size}", self.size()));
        }
        if self.geometry.l1_entries_for(size) * 8 > MOST_L1_BYTES {
            return invalid(format!("a disk of {size} bytes is too large for its cluster size"));
        }
        if self.state.lock().header.snapshots > 0 && self.geometry.version < 3 {
            return invalid("version 2 snapshots do not say how large the disk was".into());
        }
        self.step(|state| {
            state.check_thawed()?;
            state.grow(size)
        })
        .await?;
        self.size.store(size, Ordering::Release);
        Ok(())
    }
}

impl State {
    fn grow(&mut self, size: u64) -> Step<()> {
        let geometry = self.geometry;
        let entries = geometry.l1_entries_for(size);
        if entries > self.l1.len() as u64 {
            let old = geometry.cluster_of(self.header.l1_offset);
            let old_count = geometry.clusters_for(self.l1.len() as u64 * 8);
            let new = self.carve(geometry.clusters_for(entries * 8))?;
            if old_count > 0 {
                self.retire(old..old + old_count, Punch::No);
            }
            self.metadata.extend(new.clone());
            self.l1.resize(entries as usize, 0);
            self.header.l1_offset = geometry.offset_of(new.start);
            self.header.l1_entries = entries as u32;
        }
        self.header.size = size;
        self.version += 1;
        Ok(())
    }
}
