//! Continues the bitmaps of an image in its new overlay, under the same names.
//!
//! Guarantee: all these bitmaps change in one transaction, so that a crash leaves all old or all
//! new bits.

use blockhouse_core::{Error, ErrorKind, Result, Storage};

use crate::qcow2::bitmaps::BitsReader;
use crate::qcow2::layout::bitmap_directory::{
    self, BitmapEntry, BitmapFlags, BitsCluster, index_of,
};

use super::bitmaps::{
    Bitmaps, Merge, NextChange, check_bounds, check_consistent, check_live, place_table,
    release_bitmap, run,
};
use super::metadata_transaction::MetadataTransaction;

/// The content of bitmaps that continue in another image.
#[derive(Clone, Copy)]
pub enum InheritedBits<'a> {
    /// The whole disk counts as changed, while the real changes are not known yet.
    All,
    /// The bits in the old image, which no longer changes, and these further changes.
    Exact(NextChange<'a>),
}

impl<S: Storage> Bitmaps<'_, S> {
    /// Continues the bitmaps of these names of `source` in this image, with their granularity and
    /// state. If this image has a bitmap of such a name, only its bits are replaced. `source` must
    /// not change from this call on, unless `bits` is `All` or the bitmaps are disabled.
    ///
    /// # Errors
    /// As [`merge`](Self::merge).
    pub async fn inherit(
        &self,
        source: &Bitmaps<'_, S>,
        names: &[String],
        bits: InheritedBits<'_>,
    ) -> Result<()> {
        let (metadata, source) = (&self.image.metadata, &source.image.metadata);
        let image = source.storage().name();
        if metadata.size() != source.size() {
            let what = "is of another size than the image whose bitmaps go on in it";
            return Err(Error::new(ErrorKind::InvalidInput, what).on(metadata.storage().name()));
        }
        let header = source.lock().tables.headers.disk().clone();
        let theirs = bitmap_directory::read(source.storage(), &header).await?;
        let change = async |entries: &mut Vec<BitmapEntry>,
                            transaction: &mut MetadataTransaction<'_, S>| {
            for name in names {
                let of_source = &theirs[index_of(image, name, &theirs)?];
                check_consistent(image, of_source, &header)?;
                let place = entries.iter().position(|entry| entry.name == of_source.name);
                let place = place.unwrap_or(entries.len());
                if place == entries.len() {
                    let flags = of_source.flags.intersection(BitmapFlags::AUTO);
                    if flags.contains(BitmapFlags::AUTO) {
                        check_live(metadata.storage().name(), entries, transaction.header())?;
                    }
                    let bits = of_source.granularity_bits;
                    entries.push(BitmapEntry::new(&of_source.name, bits, flags));
                } else {
                    release_bitmap(&entries[place], metadata.storage(), transaction).await?;
                }
                let entry = &mut entries[place];
                let clusters = entry.clusters_for(transaction.size(), transaction.geometry());
                check_bounds(metadata.storage().name(), entry, clusters, transaction.geometry())?;
                let table = match bits {
                    InheritedBits::All => vec![BitsCluster::Ones; clusters as usize],
                    InheritedBits::Exact(changed) => {
                        let (storage, geometry) = (metadata.storage(), metadata.geometry());
                        let empty = BitsReader::empty(storage, geometry, entry, metadata.size());
                        let (storage, geometry) = (source.storage(), source.geometry());
                        let theirs = BitsReader::open(storage, geometry, of_source, source.size());
                        Merge::run(&empty, &theirs.await?, Some(changed), transaction).await?
                    }
                };
                place_table(entry, table, transaction).await?;
            }
            Ok(())
        };
        run(self.image, change).await
    }
}
