//! Changes an image's options: its version, and lazy refcounts.
//!
//! One write of the header's first sector changes the options, as the last step of a transaction: a
//! crash leaves the old options or the new options. The transaction writes the snapshot table anew,
//! because version 3 requires more data in its entries. Tables of version 2 are valid in version 3.
//! For a change to version 2, zero clusters are removed, with tables beside the active tables
//! (`zero_clusters`), and lazy refcounts are turned off. An image with any other feature that
//! version 2 lacks keeps its version, as with QEMU.

use blockhouse_core::{Error, ErrorKind, Result, Storage};

use crate::qcow2::Qcow2;
use crate::qcow2::header::Qcow2Header;
use crate::qcow2::layout::compression::Compression;
use crate::qcow2::layout::extensions::{self, BITMAPS, FEATURE_NAMES};
use crate::qcow2::layout::header::{
    Header, Incompatible, LAZY_REFCOUNTS, LENGTH_2, LENGTH_3, SECTOR,
};
use crate::qcow2::layout::options::{Switch, Version};
use crate::qcow2::layout::snapshot_table::SnapshotEntry;
use crate::qcow2::layout::table_io;

use super::backing::free_first_sector;
use super::metadata_transaction::MetadataTransaction;
use super::zero_clusters::replace_zero_clusters;

/// The hint if an image cannot be changed in place.
const CONVERT: &str = "'blockhouse convert -O qcow2 -o compat=0.10 IMAGE NEW' makes another image";

/// The changes of an image's options; an option of `None` stays as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amendments {
    /// The revision of the format. An earlier revision is possible only if the image has no newer
    /// feature other than zero clusters and lazy refcounts.
    pub version: Option<Version>,
    /// Whether refcounts may be written late: only in version 3.
    pub lazy_refcounts: Option<Switch>,
}

impl<S: Storage> Qcow2Header<'_, S> {
    /// Changes options of the image, durably: after a crash the image has the old options or the
    /// new options. [`features`](Self::features) returns the new options; all other values are as
    /// when the image was opened. The caller closes the image after this.
    ///
    /// # Errors
    /// `Unsupported` for options that cannot be changed in place; `InvalidInput` if the header has
    /// no space, or the options contradict each other; `ReadOnly`; `NoSpace`; storage errors.
    pub async fn amend(&self, amendments: Amendments) -> Result<()> {
        let Qcow2 { metadata, transactions, .. } = self.image;
        metadata.check_writable()?;
        let name = metadata.storage().name();
        let old = metadata.lock().tables.headers.disk().clone();
        let Some(new) = amended(name, &old, amendments)? else { return Ok(()) };
        if new.length > old.length {
            free_first_sector(metadata).await?;
        }
        let is_downgrade = new.geometry.version < old.geometry.version;
        if is_downgrade {
            // Version 2 has no dirty bit, so all refcounts are written before the change.
            metadata.write_everything().await?;
            metadata.settle().await?;
        }
        let change = async |transaction: &mut MetadataTransaction<'_, S>| {
            let size = transaction.size();
            let version = new.geometry.version;
            if is_downgrade {
                check_marks(name, transaction.header())?;
                check_snapshots(name, transaction.snapshots(), size)?;
                replace_zero_clusters(metadata, transaction).await?;
            }
            let entries = transaction.snapshots_mut().iter_mut();
            entries
                .filter(|entry| entry.is_incomplete(version))
                .for_each(|entry| entry.complete(size));
            let sector = table_io::read(metadata.storage(), 0, SECTOR).await?;
            let change = |header: &mut Header| {
                header.geometry.version = version;
                header.length = new.length;
                header.compatible = new.compatible;
                if is_downgrade {
                    header.autoclear = 0;
                    header.extensions.retain(|extension| extension.kind != FEATURE_NAMES);
                }
            };
            transaction.change_header(change, &sector)
        };
        transactions.run_beside_guest_data(metadata, change).await
    }
}

/// The header with the new options; `None` if `old` already has these options.
fn amended(name: &str, old: &Header, amendments: Amendments) -> Result<Option<Header>> {
    let mut new = old.clone();
    match amendments.version {
        Some(Version::V3) if old.geometry.version < 3 => {
            new.geometry.version = 3;
            new.length = LENGTH_3;
        }
        Some(Version::V2) if old.geometry.version >= 3 => {
            check_features(name, old)?;
            new.geometry.version = 2;
            new.length = LENGTH_2;
            new.compatible = 0;
        }
        Some(_) | None => {}
    }
    match amendments.lazy_refcounts {
        Some(Switch::On) if new.geometry.version < 3 => {
            let what = "version 2 (compat 0.10) has no lazy refcounts";
            return Err(Error::new(ErrorKind::InvalidInput, what)
                .on(name)
                .hint("say compat=1.1,lazy_refcounts=on"));
        }
        Some(Switch::On) => new.compatible |= LAZY_REFCOUNTS,
        Some(Switch::Off) => new.compatible &= !LAZY_REFCOUNTS,
        None => {}
    }
    Ok((new != *old).then_some(new))
}

/// Refuses an image with a feature that version 2 lacks and that the amendment does not remove.
fn check_features(name: &str, header: &Header) -> Result<()> {
    let has_bitmaps = extensions::find(&header.extensions, BITMAPS).is_some();
    let (what, hint) = if header.geometry.refcount_order != 4 {
        ("its refcounts do not have 16 bits", CONVERT)
    } else if header.geometry.has_data_file {
        ("its data is in another file", CONVERT)
    } else if header.geometry.extended_l2 {
        ("it has subclusters (extended_l2)", CONVERT)
    } else if header.compression != Compression::Zlib {
        ("its compressed clusters are zstd's", CONVERT)
    } else if header.encryption.is_some() {
        ("it is encrypted", CONVERT)
    } else if has_bitmaps {
        ("it has bitmaps", "'blockhouse bitmap remove' takes them away")
    } else {
        return Ok(());
    };
    Err(unfit(name, what, hint))
}

/// Refuses an image with header bits that version 2 lacks.
fn check_marks(name: &str, header: &Header) -> Result<()> {
    if header.incompatible == Incompatible::empty() {
        Ok(())
    } else {
        Err(unfit(name, "it is marked as one that may be wrong", "check it first"))
    }
}

/// Refuses snapshots that do not fit into an entry of version 2.
fn check_snapshots(name: &str, entries: &[SnapshotEntry], size: u64) -> Result<()> {
    let fits = |entry: &SnapshotEntry| {
        entry.disk_size().is_none_or(|of_snapshot| of_snapshot == size)
            && u32::try_from(entry.vm_state_size()).is_ok()
    };
    if entries.iter().all(fits) {
        Ok(())
    } else {
        Err(unfit(name, "it has a snapshot of a disk of another size, or a long state", CONVERT))
    }
}

fn unfit(name: &str, what: &str, hint: &'static str) -> Error {
    let what = format!("cannot become an image of version 2 (compat 0.10) in place: {what}");
    Error::new(ErrorKind::Unsupported, what).on(name).hint(hint)
}
