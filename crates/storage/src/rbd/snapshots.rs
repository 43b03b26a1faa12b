//! Changes of an image's snapshots, and queries of what has changed since a snapshot.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockhouse_core::{ByteRange, Error, ErrorKind, Result, SnapshotChange, StorageChange, errno};

use super::connection::{Connection, Image};

/// The longest range that one call queries for changes. The limit bounds time and memory: librbd
/// sends a message for each object, and each changed extent may be as short as a sector.
const MAX_CHANGE_RANGE: u64 = 1 << 30;

/// Carries a change out. Stores in `size` the size that the image has after it.
pub(super) async fn change(
    connection: &Connection,
    size: &Arc<AtomicU64>,
    change: SnapshotChange<'_>,
) -> Result<()> {
    if let SnapshotChange::Create(name) | SnapshotChange::Rename { to: name, .. } = change
        && let Err(why) = check_name(name)
    {
        return Err(Error::new(ErrorKind::InvalidInput, why).on(connection.name()));
    }
    let what = match change {
        SnapshotChange::Create(_) => "cannot take the snapshot",
        SnapshotChange::Delete(_) => "cannot delete the snapshot",
        SnapshotChange::Rename { .. } => "cannot rename the snapshot",
        SnapshotChange::Apply(_) => "cannot apply the snapshot",
    };
    let (owned, size) = (OwnedChange::of(change), Arc::clone(size));
    let carry_out = move |image: &Image| {
        owned.carry_out(image)?;
        if let OwnedChange::Apply(_) = owned {
            size.store(image.size()?, Ordering::Release);
        }
        Ok(())
    };
    let changed = connection.run_blocking(what, carry_out).await;
    changed.map_err(|error| match error.errno() {
        16 /* EBUSY */ => error.hint("it is protected, and may have clones: see 'rbd snap unprotect'"),
        17 /* EEXIST */ => error.hint("choose another name"),
        _ => error,
    })
}

/// The parts of a range, queried in pieces, that have changed since a snapshot.
pub(super) async fn changes_since(
    connection: &Connection,
    snapshot: &str,
    range: ByteRange,
) -> Result<Vec<StorageChange>> {
    let mut changes: Vec<StorageChange> = Vec::new();
    let mut rest = range;
    while !rest.is_empty() {
        let piece = rest.truncate(MAX_CHANGE_RANGE);
        rest = rest.skip(piece.length());
        let since = snapshot.to_owned();
        let ask = move |image: &Image| image.changes_since(&since, piece);
        let found = connection.run_blocking("cannot find what has changed", ask).await;
        let found = found.map_err(|error| match error.errno() {
            errno::EINVAL => {
                error.hint("the snapshot has to be older than what it is compared with")
            }
            _ => error,
        })?;
        for change in found {
            match changes.last_mut() {
                Some(last) if is_next(last, &change) => {
                    last.range = ByteRange::between(last.range.offset(), change.range.end());
                }
                _ => changes.push(change),
            }
        }
    }
    Ok(changes)
}

fn is_next(last: &StorageChange, next: &StorageChange) -> bool {
    last.allocation == next.allocation && last.range.end() == next.range.offset()
}

/// Refuses names with characters that Ceph's tools cannot express.
fn check_name(name: &str) -> Result<(), &'static str> {
    match name {
        "" => Err("the name of a snapshot is not empty"),
        _ if name.contains(['/', '@', '\0']) => {
            Err("the name of a snapshot in Ceph has no '/', '@' or zero byte")
        }
        _ => Ok(()),
    }
}

/// A change that goes to another thread.
enum OwnedChange {
    Create(String),
    Delete(String),
    Rename(String, String),
    Apply(String),
}

impl OwnedChange {
    fn of(change: SnapshotChange<'_>) -> Self {
        match change {
            SnapshotChange::Create(name) => Self::Create(name.to_owned()),
            SnapshotChange::Delete(name) => Self::Delete(name.to_owned()),
            SnapshotChange::Rename { from, to } => Self::Rename(from.to_owned(), to.to_owned()),
            SnapshotChange::Apply(name) => Self::Apply(name.to_owned()),
        }
    }

    fn carry_out(&self, image: &Image) -> std::io::Result<()> {
        image.change_snapshots(match self {
            Self::Create(name) => SnapshotChange::Create(name),
            Self::Delete(name) => SnapshotChange::Delete(name),
            Self::Rename(from, to) => SnapshotChange::Rename { from, to },
            Self::Apply(name) => SnapshotChange::Apply(name),
        })
    }
}
