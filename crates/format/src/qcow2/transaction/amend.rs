//! Other options for an image: its version, and whether refcounts may be written late.
//!
//! One write of the header's first sector changes them, as the last step of a transaction that writes the snapshot table
//! anew (version 3 wants more in its entries): a crash leaves the old options or the new ones. Only what older tables
//! already say stays true of version 3, so no other table changes. The way back is not here: version 2 has no zero
//! clusters, so data of each would have to be written first.

use blockhouse_core::{Error, ErrorKind, Result, Storage};

use crate::qcow2::layout::header::{Header, LAZY_REFCOUNTS, LENGTH_3, SECTOR};
use crate::qcow2::layout::options::{Switch, Version};
use crate::qcow2::layout::table_io;

use super::ImageMetadata;
use super::backing::free_first_sector;
use super::metadata_transaction::{MetadataTransaction, Transactions};

/// What is to change of an image; `None` stays as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amendments {
    /// The revision of the format: only to a later one.
    pub version: Option<Version>,
    /// Whether refcounts may be written late: only in version 3.
    pub lazy_refcounts: Option<Switch>,
}

/// Changes the options of an image, durably.
///
/// # Errors
/// `Unsupported` for what cannot be changed in place; `InvalidInput` where the header has no room, or the options
/// contradict each other; `ReadOnly`; `NoSpace`. The options are the old ones then.
pub(crate) async fn amend<S: Storage>(
    metadata: &ImageMetadata<S>,
    transactions: &Transactions,
    amendments: Amendments,
) -> Result<()> {
    metadata.check_writable()?;
    let old = metadata.lock().tables.headers().disk().clone();
    let Some(new) = amended(metadata.storage().name(), &old, amendments)? else { return Ok(()) };
    if new.length != old.length {
        free_first_sector(metadata).await?;
    }
    let change = async |transaction: &mut MetadataTransaction<'_, S>| {
        let size = transaction.size();
        let version = new.geometry.version;
        let entries = transaction.snapshots_mut().iter_mut();
        entries.filter(|entry| entry.is_incomplete(version)).for_each(|entry| entry.complete(size));
        let sector = table_io::read(metadata.storage(), 0, SECTOR).await?;
        let change = |header: &mut Header| {
            header.geometry.version = version;
            header.length = new.length;
            header.compatible = new.compatible;
        };
        transaction.change_header(change, &sector)
    };
    transactions.run_beside_guest_data(metadata, change).await
}

/// The header with the new options; `None` where it has them.
fn amended(name: &str, old: &Header, amendments: Amendments) -> Result<Option<Header>> {
    let mut new = old.clone();
    match amendments.version {
        Some(Version::V3) if old.geometry.version < 3 => {
            new.geometry.version = 3;
            new.length = LENGTH_3;
        }
        Some(Version::V2) if old.geometry.version >= 3 => {
            let what =
                "an image of version 3 (compat 1.1) does not become one of version 2 in place";
            return Err(Error::new(ErrorKind::Unsupported, what).on(name).hint(
                "'blockhouse convert -O qcow2 -o compat=0.10 IMAGE NEW' makes another image",
            ));
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
