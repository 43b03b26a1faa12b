//! Snapshots of the disk, with or without the machine's state: taken, applied, deleted, renamed.
//!
//! Taking one costs reading and writing the image's tables, never its data: all clusters are counted
//! once more, and copied when they are next written. Each of these changes happens as a whole or not at
//! all, whatever crashes (see [`super::draft`]). The machine's state lies in the snapshot's tables
//! behind the disk, at the size of the disk rounded up to what one L1 entry covers.

use std::time::Duration;

use blockhouse_core::{Error, ErrorKind, Result, Storage};

use super::draft::{Counting, Draft, Sharers};
use super::snapshot_table::{self, EntryFacts, MAX_NAME, Snapshot, SnapshotEntry};
use super::{Access, OpenOptions, Qcow2, VmStateTables, table_io};

/// What a new snapshot is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewSnapshot {
    /// 1 to 255 bytes, different from all others in the image.
    pub name: String,
    /// When it is taken, since 1970-01-01 UTC.
    pub created: Duration,
    /// How long the machine has run.
    pub vm_clock: Duration,
}

impl<S: Storage> Qcow2<S> {
    /// All snapshots, in the order in which they were taken.
    ///
    /// # Errors
    /// `Corrupt` where the table contradicts the format; why nobody knows which table is in force, after
    /// a change of it failed at its last step.
    pub async fn snapshots(&self) -> Result<Vec<Snapshot>> {
        let header = {
            let state = self.state.lock();
            state.check_known_tables()?;
            state.disk_header.clone()
        };
        let table = snapshot_table::read(&self.storage, &header).await?;
        Ok(table.entries.iter().map(|entry| entry.described(header.size)).collect())
    }

    /// Takes a snapshot of the guest's disk, with a machine's state if one is given; durable when it
    /// returns. No change of the guest's data may be under way.
    ///
    /// # Errors
    /// `InvalidInput` for a name that is taken, empty or too long; `Unsupported` when refcounts cannot
    /// count so far, or when the image has a data file; `NoSpace`; or what the storage answers. Nothing
    /// has changed then, and `vm_state` is as it was.
    pub async fn create_snapshot(
        &self,
        new: &NewSnapshot,
        vm_state: Option<&VmStateTables>,
    ) -> Result<Snapshot> {
        self.redraft(async |draft: &mut Draft<'_, S>| {
            self.check_new_name(&new.name, &draft.snapshots)?;
            drop_old_vm_state(draft).await?;
            draft.count_tree(&draft.l1.clone(), Counting::Add).await?;
            draft.mark_owners(Sharers::ActiveAndSnapshot).await?;
            let mut l1 = draft.l1.clone();
            if let Some(vm_state) = vm_state {
                vm_state.put(draft, &mut l1).await?;
            }
            let l1_offset =
                if l1.is_empty() { 0 } else { draft.put(table_io::bytes_of(&l1)).await? };
            let facts = EntryFacts {
                name: &new.name,
                created: new.created,
                vm_clock: new.vm_clock,
                vm_state_size: vm_state.map_or(0, VmStateTables::size),
                disk_size: draft.header.size,
            };
            let id = next_id(&draft.snapshots);
            let entry = SnapshotEntry::new(id, l1_offset, l1.len() as u32, &facts);
            let described = entry.described(draft.header.size);
            draft.snapshots.push(entry);
            self.check_table(&draft.snapshots)?;
            Ok(described)
        })
        .await
    }

    /// Makes the disk what it was when the snapshot was taken, its size included; durable when it
    /// returns. No change of the guest's data may be under way. What was written since is gone.
    ///
    /// # Errors
    /// As [`create_snapshot`](Self::create_snapshot); `InvalidInput` for an unknown name.
    pub async fn apply_snapshot(&self, name: &str) -> Result<()> {
        self.redraft(async |draft: &mut Draft<'_, S>| {
            let index = self.index_of(name, &draft.snapshots)?;
            let entry = draft.snapshots[index].clone();
            let size = entry.disk_size().unwrap_or(draft.header.size);
            let entries = draft.geometry.l1_entries_for(size);
            let mut l1 = draft.l1_of(&entry).await?;
            if (l1.len() as u64) < entries {
                let what = format!("the snapshot '{name}' has {} L1 entries", l1.len());
                return Err(Error::new(ErrorKind::Corrupt, what).on(self.storage.name()));
            }
            // The machine's state stays the snapshot's alone.
            l1.truncate(entries as usize);
            draft.count_tree(&l1, Counting::Add).await?;
            draft.count_tree(&draft.l1.clone(), Counting::Remove).await?;
            draft.l1 = l1;
            draft.header.size = size;
            draft.mark_owners(Sharers::Active).await
        })
        .await
    }

    /// Deletes a snapshot; durable when it returns. No change of the guest's data may be under way.
    ///
    /// # Errors
    /// As [`apply_snapshot`](Self::apply_snapshot).
    pub async fn delete_snapshot(&self, name: &str) -> Result<()> {
        self.redraft(async |draft: &mut Draft<'_, S>| {
            let index = self.index_of(name, &draft.snapshots)?;
            let entry = draft.snapshots.remove(index);
            let l1 = draft.l1_of(&entry).await?;
            draft.count_tree(&l1, Counting::Remove).await?;
            if !l1.is_empty() {
                draft.release(entry.l1_offset, l1.len() as u64 * 8)?;
            }
            draft.mark_owners(Sharers::Active).await
        })
        .await
    }

    /// Gives a snapshot another name; durable when it returns.
    ///
    /// # Errors
    /// As [`create_snapshot`](Self::create_snapshot); `InvalidInput` for an unknown name.
    pub async fn rename_snapshot(&self, name: &str, new_name: &str) -> Result<()> {
        self.redraft(async |draft: &mut Draft<'_, S>| {
            let index = self.index_of(name, &draft.snapshots)?;
            self.check_new_name(new_name, &draft.snapshots)?;
            draft.snapshots[index].name = new_name.as_bytes().to_vec();
            self.check_table(&draft.snapshots)
        })
        .await
    }

    /// Opens an image as it was when a snapshot was taken, for reading. What lies behind the disk is
    /// the machine's state, see [`vm_state_offset`](Self::vm_state_offset).
    ///
    /// # Errors
    /// As [`open`](Self::open); `InvalidInput` for an unknown name.
    pub async fn open_snapshot(storage: S, options: OpenOptions, name: &str) -> Result<Self> {
        let image =
            Self::open(storage, OpenOptions { access: Access::ReadOnly, ..options }).await?;
        let header = image.state.lock().disk_header.clone();
        let table = snapshot_table::read(&image.storage, &header).await?;
        let entry = &table.entries[image.index_of(name, &table.entries)?];
        let bytes = entry.l1_entries as usize * 8;
        if entry.l1_offset.saturating_add(bytes as u64)
            > header.geometry.bytes_of(0..header.geometry.clusters_for(image.storage.size())).end()
        {
            let what =
                format!("the L1 table of the snapshot '{name}' lies behind the end of the file");
            let error = Error::new(ErrorKind::Corrupt, what).on(image.storage.name());
            return Err(error.at(entry.l1_offset));
        }
        let l1 = table_io::read(&image.storage, entry.l1_offset, bytes).await?;
        let size = entry.disk_size().unwrap_or(header.size);
        if header.geometry.l1_entries_for(size) * 8 > bytes as u64 {
            let what = format!("the snapshot '{name}' of {size} bytes has a short L1 table");
            return Err(Error::new(ErrorKind::Corrupt, what).on(image.storage.name()));
        }
        image.state.lock().l1 = table_io::words_of(&l1);
        // Nobody else has the image yet.
        let _ = image.snapshot.set(entry.described(header.size));
        image.size.store(size, std::sync::atomic::Ordering::Release);
        Ok(image)
    }

    fn index_of(&self, name: &str, entries: &[SnapshotEntry]) -> Result<usize> {
        let by_name = entries.iter().position(|entry| entry.name == name.as_bytes());
        let by_id = || entries.iter().position(|entry| entry.id == name.as_bytes());
        by_name.or_else(by_id).ok_or_else(|| {
            let error = Error::new(ErrorKind::InvalidInput, format!("has no snapshot '{name}'"));
            error.on(self.storage.name()).hint("'snapshot list' names those that it has")
        })
    }

    fn check_new_name(&self, name: &str, entries: &[SnapshotEntry]) -> Result<()> {
        let refuse = |what: String, hint: &'static str| {
            Err(Error::new(ErrorKind::InvalidInput, what).on(self.storage.name()).hint(hint))
        };
        if name.is_empty() || name.len() > MAX_NAME {
            let what = format!("a snapshot's name has 1 to {MAX_NAME} bytes, not {}", name.len());
            return refuse(what, "choose another name");
        }
        if entries.iter().any(|entry| entry.name == name.as_bytes()) {
            let hint = "choose another name, or delete that snapshot first";
            return refuse(format!("has a snapshot '{name}' already"), hint);
        }
        Ok(())
    }

    fn check_table(&self, entries: &[SnapshotEntry]) -> Result<()> {
        if snapshot_table::fits(entries) {
            return Ok(());
        }
        let what = format!("{} snapshots are more than the format allows", entries.len());
        Err(Error::new(ErrorKind::InvalidInput, what)
            .on(self.storage.name())
            .hint("delete some of them first"))
    }
}

/// What somebody left behind the disk in the active tables belongs to no snapshot.
async fn drop_old_vm_state<S: Storage>(draft: &mut Draft<'_, S>) -> Result<()> {
    let entries = draft.geometry.l1_entries_for(draft.header.size) as usize;
    if draft.l1.len() > entries {
        let behind = draft.l1.split_off(entries);
        draft.count_tree(&behind, Counting::Remove).await?;
    }
    Ok(())
}

/// One more than the largest number that is an id.
fn next_id(entries: &[SnapshotEntry]) -> Vec<u8> {
    let number = |entry: &SnapshotEntry| std::str::from_utf8(&entry.id).ok()?.parse::<u64>().ok();
    let largest = entries.iter().filter_map(number).max().unwrap_or(0);
    largest.saturating_add(1).to_string().into_bytes()
}
