//! Allocates space for compressed clusters, one directly after the other in the file.
//!
//! Compressed data is shorter than a cluster, so several compressed clusters share a host cluster.
//! The refcount of the host cluster counts each of them. If compressed data extends into the next
//! host cluster, the refcount of that cluster counts it too. At most one host cluster is open for
//! more data; it is closed when its last data is freed. Freed space inside a host cluster is not
//! reused before all data in the cluster is freed.

use blockhouse_core::{Error, ErrorKind};

use crate::qcow2::layout::entry::CompressedDescriptor;
use crate::qcow2::layout::geometry::Geometry;
use crate::qcow2::tables::{Step, Tables};

use super::Allocator;

impl Allocator {
    /// Allocates `length` bytes, less than a cluster, in the open cluster, in the open cluster and
    /// the next one, or in a new cluster. The bytes start at a multiple of `block`.
    pub(crate) fn alloc_bytes(
        &mut self,
        tables: &mut Tables,
        length: u64,
        block: u64,
    ) -> Step<u64> {
        let geometry = tables.geometry();
        let next = self.free_byte_offset.map(|end| end.next_multiple_of(block));
        // If the previous data ended at the end of a cluster, no cluster is open.
        let next = next.filter(|&next| !geometry.is_cluster_aligned(next));
        if let Some(start) = next {
            let cluster = geometry.cluster_of(start);
            let count = tables.refcounts().get(cluster)?;
            if count < geometry.max_refcount() {
                let fits = start + length <= geometry.offset_of(cluster + 1);
                let beyond = if fits { None } else { Some(self.allocate(tables, 1)?.start) };
                if beyond.is_none_or(|beyond| beyond == cluster + 1) {
                    tables.refcounts().set(cluster, count + 1)?;
                    return self.note_bytes(tables, start, length);
                }
                let start = geometry.offset_of(beyond.unwrap_or(cluster));
                return self.note_bytes(tables, start, length);
            }
        }
        let cluster = self.allocate(tables, 1)?.start;
        self.note_bytes(tables, geometry.offset_of(cluster), length)
    }

    /// Makes the next compressed data follow these bytes.
    fn note_bytes(&mut self, tables: &mut Tables, start: u64, length: u64) -> Step<u64> {
        let geometry = tables.geometry();
        if !CompressedDescriptor::is_reachable(start, geometry) {
            let cluster = geometry.cluster_of(start);
            self.free_unlinked(tables, cluster..cluster + 1);
            let what = "compressed data can lie no further back in the file";
            return Err(Error::new(ErrorKind::NoSpace, what).on(tables.name()).at(start).into());
        }
        self.free_byte_offset = Some(start + length);
        Ok(start)
    }

    /// Stops adding compressed data to a cluster that has become free.
    pub(super) fn close_compressed(&mut self, geometry: Geometry, cluster: u64) {
        // The end of a full cluster is the start of the next cluster, so the last byte's cluster is
        // compared.
        if self.free_byte_offset.is_some_and(|end| geometry.cluster_of(end - 1) == cluster) {
            self.free_byte_offset = None;
        }
    }
}
