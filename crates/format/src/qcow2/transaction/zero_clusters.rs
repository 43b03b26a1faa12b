//! Removes zero clusters, which version 2 does not have. Without a backing file, zero clusters
//! become unallocated clusters, which also read as zeros. With a backing file, a cluster of written
//! zeros replaces each zero cluster.
//!
//! All L2 tables are checked, also the tables of snapshots. A table with zero clusters is copied to
//! a new cluster, for all L1 tables that refer to the table. Host clusters that zero clusters kept
//! are free afterwards.

use std::collections::BTreeMap;

use blockhouse_core::{Result, Storage};

use crate::qcow2::layout::entry::{Entry, SubclusterBitmap, l1_word};
use crate::qcow2::layout::words;
use crate::qcow2::writeback::Metadata;

use super::metadata_transaction::{MetadataTransaction, RefcountDelta, references};

/// Replaces the zero clusters of the disk and of all snapshots.
///
/// # Errors
/// `Corrupt` if tables contradict the format; `NoSpace`; storage errors.
pub(super) async fn replace_zero_clusters<S: Storage>(
    metadata: &Metadata<S>,
    transaction: &mut MetadataTransaction<'_, S>,
) -> Result<()> {
    let snapshots = transaction.snapshots().to_vec();
    // The number of L1 entries that refer to each L2 table.
    let mut users = BTreeMap::new();
    let mut count_users = |l1: &[u64]| -> Result<()> {
        for table in references(metadata, l1)?.into_iter().flatten() {
            *users.entry(table.offset).or_insert(0) += 1;
        }
        Ok(())
    };
    count_users(transaction.l1())?;
    for snapshot in &snapshots {
        count_users(&transaction.l1_of(snapshot).await?)?;
    }
    let mut copies = BTreeMap::new();
    for (offset, users) in users {
        if let Some(copy) = copy_without_zero_clusters(transaction, offset, users).await? {
            copies.insert(offset, copy);
        }
    }
    let active = transaction.l1().to_vec();
    if let Some(l1) = refer_to(&copies, metadata, transaction, active)? {
        transaction.set_l1(l1, transaction.size());
    }
    for (number, snapshot) in snapshots.iter().enumerate() {
        // The L1 table is read again: the tables of all snapshots together may not fit into memory.
        let l1 = transaction.l1_of(snapshot).await?;
        if let Some(l1) = refer_to(&copies, metadata, transaction, l1)? {
            set_snapshot_l1(transaction, number, &l1).await?;
        }
    }
    Ok(())
}

/// The L1 table `l1`, changed to refer to the copies of L2 tables; `None` if none of its tables has
/// a copy.
fn refer_to<S: Storage>(
    copies: &BTreeMap<u64, u64>,
    metadata: &Metadata<S>,
    transaction: &MetadataTransaction<'_, S>,
    mut l1: Vec<u64>,
) -> Result<Option<Vec<u64>>> {
    let mut has_changed = false;
    let tables = references(metadata, &l1)?;
    for (word, table) in l1.iter_mut().zip(tables) {
        if let Some(&copy) = table.and_then(|table| copies.get(&table.offset)) {
            *word = l1_word(transaction.reference_to(copy));
            has_changed = true;
        }
    }
    Ok(has_changed.then_some(l1))
}

/// The offset of a copy of the L2 table at `offset`, to which `users` L1 entries refer; `None` if
/// the table has no zero clusters.
async fn copy_without_zero_clusters<S: Storage>(
    transaction: &mut MetadataTransaction<'_, S>,
    offset: u64,
    users: u64,
) -> Result<Option<u64>> {
    let (geometry, is_backed) = (transaction.geometry(), transaction.header().backing.is_some());
    let mut l2 = transaction.read_table(offset).await?;
    let mut has_changed = false;
    for index in 0..geometry.l2_entries() as usize {
        let Entry::Standard { host, subclusters } = transaction.entry(&l2, index, offset)? else {
            continue;
        };
        if subclusters != SubclusterBitmap::ZERO {
            continue;
        }
        if let Some(host) = host {
            count(transaction, host.offset, users, RefcountDelta::Decrement)?;
        }
        let entry = if is_backed {
            let zeros = transaction.put(vec![0; geometry.cluster_size() as usize]).await?;
            count(transaction, zeros, users - 1, RefcountDelta::Increment)?;
            let host = Some(transaction.reference_to(zeros));
            Entry::Standard { host, subclusters: SubclusterBitmap::DATA }
        } else {
            Entry::UNALLOCATED
        };
        entry.write(&mut l2, index, geometry);
        has_changed = true;
    }
    if !has_changed {
        return Ok(None);
    }
    let copy = transaction.put(l2).await?;
    count(transaction, copy, users - 1, RefcountDelta::Increment)?;
    count(transaction, offset, users, RefcountDelta::Decrement)?;
    Ok(Some(copy))
}

/// Adds or removes this many references to the cluster at `offset`.
fn count<S: Storage>(
    transaction: &mut MetadataTransaction<'_, S>,
    offset: u64,
    references: u64,
    how: RefcountDelta,
) -> Result<()> {
    let cluster = transaction.geometry().cluster_of(offset);
    (0..references).try_for_each(|_| transaction.count_one(cluster, how))
}

/// Gives a snapshot another L1 table of the same length.
async fn set_snapshot_l1<S: Storage>(
    transaction: &mut MetadataTransaction<'_, S>,
    snapshot: usize,
    l1: &[u64],
) -> Result<()> {
    let old = transaction.snapshots()[snapshot].l1_offset;
    let new = transaction.put(words::bytes_of(l1)).await?;
    transaction.release(old, l1.len() as u64 * 8)?;
    transaction.snapshots_mut()[snapshot].l1_offset = new;
    Ok(())
}
