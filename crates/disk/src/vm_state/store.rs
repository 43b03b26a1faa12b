//! Writes clusters of a state: space is allocated in runs, and each run is one operation.

use std::ops::Range;

use blockhouse_core::{Buffer, ByteRange, Durability, Error, ErrorKind, Result, Storage};
use blockhouse_format::{DataPlace, VmStateCluster};
use futures_util::future::join_all;

use crate::disk::Disk;

/// The outcome of a write.
pub(super) struct WriteResult {
    /// The windows of the written clusters.
    pub(super) windows: Vec<u64>,
    pub(super) buffer: Buffer,
    /// Space that was allocated, also if the write failed.
    pub(super) taken: Vec<ByteRange>,
    /// The number in the state and the location of each written cluster.
    pub(super) outcome: Result<Vec<(u64, VmStateCluster)>>,
}

/// A part of a window and its location.
struct Part {
    /// Clusters of the window.
    clusters: Range<u64>,
    host: u64,
}

/// Stores clusters of a window: `plain` lists them in ascending order, with their host offset if
/// they have one. `first` is the number of the window's first cluster in the state.
pub(super) async fn store_plain<S: Storage>(
    disk: &Disk<S>,
    window: u64,
    first: u64,
    plain: Vec<(u64, Option<u64>)>,
    mut buffer: Buffer,
) -> WriteResult {
    let mut taken = Vec::new();
    let outcome = async {
        let parts = place_all(disk, &plain, &mut taken).await?;
        write_parts(disk, &parts, first, &mut buffer).await?;
        let cluster_size = disk.image().cluster_size().unwrap_or(1);
        let placed = |part: &Part| {
            let (start, host) = (part.clusters.start, part.host);
            part.clusters.clone().map(move |number| {
                let host = host + (number - start) * cluster_size;
                (first + number, VmStateCluster::Data(host))
            })
        };
        Ok(parts.iter().flat_map(placed).collect())
    }
    .await;
    WriteResult { windows: vec![window], buffer, taken, outcome }
}

/// Finds a host offset for each cluster; adjacent clusters form one part.
async fn place_all<S: Storage>(
    disk: &Disk<S>,
    plain: &[(u64, Option<u64>)],
    taken: &mut Vec<ByteRange>,
) -> Result<Vec<Part>> {
    let states = disk.format().vm_states()?;
    let cluster_size = states.cluster_size();
    let mut parts: Vec<Part> = Vec::new();
    let mut rest = plain;
    while let Some(&(number, place)) = rest.first() {
        let (count, host) = match place {
            Some(host) => (1, host),
            None => {
                let run = (number..).zip(rest).take_while(|(number, one)| **one == (*number, None));
                let place = states.allocate_clusters(run.count() as u64).await?;
                taken.push(place);
                (place.length() / cluster_size, place.offset())
            }
        };
        rest = &rest[count as usize..];
        match parts.last_mut() {
            Some(last)
                if last.clusters.end == number
                    && last.host + (number - last.clusters.start) * cluster_size == host =>
            {
                last.clusters.end += count;
            }
            _ => parts.push(Part { clusters: number..number + count, host }),
        }
    }
    Ok(parts)
}

async fn write_parts<S: Storage>(
    disk: &Disk<S>,
    parts: &[Part],
    first: u64,
    buffer: &mut Buffer,
) -> Result<()> {
    let states = disk.format().vm_states()?;
    let cluster_size = states.cluster_size();
    let mut vector = buffer.lend();
    let mut at = 0;
    let mut writes = Vec::with_capacity(parts.len());
    for Part { clusters, host } in parts {
        let [start, end] = [clusters.start, clusters.end].map(|number| number * cluster_size);
        vector.advance((start - at) as usize);
        let rest = vector.split_off((end - start) as usize);
        let part = std::mem::replace(&mut vector, rest);
        at = end;
        let guest = states.start() + (first + clusters.start) * cluster_size;
        let place = DataPlace { guest, host: *host };
        writes.push(disk.image().layer().write_data(place, part, Durability::None));
    }
    drop(vector);
    join_all(writes).await.into_iter().collect()
}

/// Stores compressed clusters, one after the other in runs of host clusters.
pub(super) async fn store_compressed<S: Storage>(
    disk: &Disk<S>,
    clusters: Vec<(u64, Vec<u8>)>,
    windows: Vec<u64>,
    mut buffer: Buffer,
) -> WriteResult {
    let mut taken = Vec::new();
    let outcome = write_clusters(disk, &clusters, &mut buffer, &mut taken).await;
    WriteResult { windows, buffer, taken, outcome }
}

async fn write_clusters<S: Storage>(
    disk: &Disk<S>,
    clusters: &[(u64, Vec<u8>)],
    buffer: &mut Buffer,
    taken: &mut Vec<ByteRange>,
) -> Result<Vec<(u64, VmStateCluster)>> {
    let states = disk.format().vm_states()?;
    let mut placed = Vec::with_capacity(clusters.len());
    let mut rest = clusters;
    while !rest.is_empty() {
        let wanted: u64 = rest.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        let limit = wanted.min(buffer.len() as u64).div_ceil(states.cluster_size());
        let place = states.allocate_clusters(limit).await?;
        taken.push(place);
        let length = place.length() as usize;
        let memory = &mut buffer.bytes_mut()[..length];
        let mut at = 0;
        while let Some((cluster, bytes)) = rest.first()
            && at + bytes.len() <= length
        {
            memory[at..at + bytes.len()].copy_from_slice(bytes);
            let range = ByteRange::between(
                place.offset() + at as u64,
                place.offset() + (at + bytes.len()) as u64,
            );
            placed.push((*cluster, VmStateCluster::Compressed(range)));
            at += bytes.len();
            rest = &rest[1..];
        }
        memory[at..].fill(0);
        let from = buffer.lend_range(0, length);
        disk.image().layer().data().write_data(place.offset(), from, Durability::None).await?;
    }
    Ok(placed)
}

/// Fills `buffer` with clusters that were stored, from the cluster `first` of the state on.
pub(super) async fn read_back<S: Storage>(
    disk: &Disk<S>,
    stored: &[Option<VmStateCluster>],
    first: u64,
    mut buffer: Buffer,
) -> Result<Buffer> {
    let cluster_size = disk.image().cluster_size().unwrap_or(1) as usize;
    for (number, place) in stored.iter().enumerate() {
        let start = number * cluster_size;
        match *place {
            None | Some(VmStateCluster::Zero) => {
                buffer.bytes_mut()[start..start + cluster_size].fill(0);
            }
            Some(VmStateCluster::Data(host)) => {
                let into = buffer.lend_range(start, cluster_size);
                let guest = disk.format().vm_states()?.start();
                let guest = guest + (first + number as u64) * cluster_size as u64;
                disk.image().layer().read_data(DataPlace { guest, host }, into).await?;
            }
            Some(VmStateCluster::Compressed(place)) => {
                let outer = place.align_outward(disk.image().layer().block_size());
                let mut compressed = Buffer::new(outer.length() as usize);
                disk.image().layer().data().read_data(outer.offset(), compressed.lend()).await?;
                let skipped = (place.offset() - outer.offset()) as usize;
                let compressed = &compressed.bytes()[skipped..skipped + place.length() as usize];
                let into = &mut buffer.bytes_mut()[start..start + cluster_size];
                disk.format().compressed().decompress(compressed, into).map_err(|why| {
                    let what = format!("cannot decompress what was just stored ({why})");
                    Error::new(ErrorKind::Corrupt, what).on(disk.name()).at(place.offset())
                })?;
            }
        }
    }
    Ok(buffer)
}
