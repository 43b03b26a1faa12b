//! Allocates space for compressed clusters, one after the other.
//!
//! Compressed data is shorter than a cluster, so several compressed clusters share a host cluster.
//! Its refcount counts each of them. One may reach into the next host cluster, which counts it,
//! too. One host cluster at a time is open for more data, while any data is in it. Freed space
//! inside a cluster is not reused: the cluster becomes free with its last user.

use blockhouse_core::{Error, ErrorKind};

use crate::qcow2::layout::entry::CompressedDescriptor;
use crate::qcow2::layout::geometry::Geometry;
use crate::qcow2::tables::{Step, Tables};

use super::Allocator;

impl Allocator {
    /// Allocates `length` bytes, less than a cluster, in the open cluster, in it and the next one,
    /// or in a new one. They start at a multiple of `block`.
    pub(crate) fn alloc_bytes(
        &mut self,
        tables: &mut Tables,
        length: u64,
        block: u64,
    ) -> Step<u64> {
        let geometry = tables.geometry();
        let next = self.free_byte_offset.map(|end| end.next_multiple_of(block));
        // At the end of a cluster, no cluster is open.
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

    /// Adds no more compressed data to a cluster, which is free now.
    pub(super) fn close_compressed(&mut self, geometry: Geometry, cluster: u64) {
        // The end of a full cluster lies in the next one.
        if self.free_byte_offset.is_some_and(|end| geometry.cluster_of(end - 1) == cluster) {
            self.free_byte_offset = None;
        }
    }
}
