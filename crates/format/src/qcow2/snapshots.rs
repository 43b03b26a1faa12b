//! Where the snapshots' L1 tables are.

use blockhouse_core::{Result, Storage};

use super::entry::{be32, be64};
use super::geometry::{Geometry, MOST_OFFSET};
use super::header::Header;
use super::table_io;

/// The largest L1 table, in bytes.
const MOST_L1_BYTES: u64 = 32 << 20;
/// What a snapshot's entry is made of besides its extra data, id and name.
const FIXED: usize = 40;
const MOST_EXTRA: u32 = 1024;

/// Where an L1 table is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct L1Place {
    pub(crate) offset: u64,
    pub(crate) entries: u32,
}

impl L1Place {
    /// The active L1 table.
    pub(crate) fn active(header: &Header) -> Self {
        Self { offset: header.l1_offset, entries: header.l1_entries }
    }

    pub(crate) fn length(self) -> u64 {
        u64::from(self.entries) * 8
    }

    /// Whether a table can be there at all.
    pub(crate) fn is_possible(self, geometry: Geometry) -> bool {
        self.length() <= MOST_L1_BYTES
            && self.offset <= MOST_OFFSET
            && geometry.is_cluster_aligned(self.offset)
    }
}

/// What the snapshot table says of places.
pub(crate) struct SnapshotPlaces {
    pub(crate) l1_tables: Vec<L1Place>,
    /// Bytes of the snapshot table, as far as it makes sense.
    pub(crate) length: u64,
    /// Why it does not make sense up to its end.
    pub(crate) problem: Option<String>,
}

impl SnapshotPlaces {
    /// Reads the snapshot table.
    ///
    /// # Errors
    /// Only what the storage answers.
    pub(crate) async fn read<S: Storage>(storage: &S, header: &Header) -> Result<Self> {
        let start = header.snapshots_offset;
        let mut places = Self { l1_tables: Vec::new(), length: 0, problem: None };
        for number in 0..header.snapshots {
            let offset = start + places.length;
            if offset >= storage.size() {
                places.problem = Some(format!("the snapshot table ends before entry {number}"));
                break;
            }
            let fixed = table_io::read(storage, offset, FIXED).await?;
            let (names, extra) = (be32(&fixed, 12), be32(&fixed, 36));
            if extra > MOST_EXTRA {
                places.problem = Some(format!("the snapshot at offset {offset} is too long"));
                break;
            }
            places.l1_tables.push(L1Place { offset: be64(&fixed, 0), entries: be32(&fixed, 8) });
            let names = u64::from(names >> 16) + u64::from(names & 0xffff);
            places.length += (FIXED as u64 + u64::from(extra) + names).next_multiple_of(8);
        }
        Ok(places)
    }
}
