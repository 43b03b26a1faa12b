//! How much room a device with a qcow2 image has, read from its bytes and from a redo log.

use std::collections::BTreeSet;

use blockhouse_core::StateMemory;
use blockhouse_format::qcow2::{self, Qcow2};
use blockhouse_sim::{Sim, SimDisk};

use super::layout::plain_config;
use crate::storages::log_words::{FIRST_RECORD, HEAD, KIND_SHIFT, SET, TAIL, WORDS_PER_RECORD};

/// Where an entry of the standard kind has its host offset, and what says that it is compressed.
const HOST_OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const IS_COMPRESSED: u64 = 1 << 62;

/// Whether the device may lack room for the refcount blocks and L2 tables that the next process
/// needs.
pub fn is_full(device: &[u8], log: &dyn StateMemory) -> bool {
    let image = Image(device);
    let clusters = (device.len() as u64) >> image.cluster_bits();
    let mut used =
        if image.is_dirty() { Image(&recounted(device)).counted() } else { image.counted() };
    used.extend(logged(log, image.cluster_bits()));
    let free = (0..clusters).filter(|cluster| !used.contains(cluster)).count() as u64;
    free < clusters.div_ceil(image.refcounts_per_block()) + image.be32(36)
}

/// An image whose refcounts are late, as it is when they have been counted in a file that may grow.
fn recounted(image: &[u8]) -> Vec<u8> {
    let sim = Sim::new(0);
    let disk = SimDisk::new(&sim, plain_config(), image.to_vec());
    let opened = disk.clone();
    sim.block_on(
        async move { Qcow2::open(opened, qcow2::OpenOptions::default()).await.map(|_| ()) },
    )
    .expect("an image that a dead process left");
    disk.content()
}

/// The host clusters that the records of a log name.
fn logged(log: &dyn StateMemory, cluster_bits: u64) -> BTreeSet<u64> {
    let mut clusters = BTreeSet::new();
    if log.words() < FIRST_RECORD {
        return clusters;
    }
    let capacity = ((log.words() - FIRST_RECORD) / WORDS_PER_RECORD) as u64;
    for number in log.load(TAIL)..log.load(HEAD) {
        let first = FIRST_RECORD + (number % capacity) as usize * WORDS_PER_RECORD;
        let (kind, entry) = (log.load(first + 1), log.load(first + 2));
        let count = kind & u64::from(u32::MAX);
        if kind >> KIND_SHIFT != SET || entry & HOST_OFFSET == 0 {
            continue;
        }
        let start = match entry & IS_COMPRESSED {
            0 => (entry & HOST_OFFSET) >> cluster_bits,
            _ => (entry & ((1 << (70 - cluster_bits)) - 1)) >> cluster_bits,
        };
        clusters.extend(start..start + count + u64::from(entry & IS_COMPRESSED != 0));
    }
    clusters
}

/// The bytes of an image, where the header says that things are.
struct Image<'a>(&'a [u8]);

impl Image<'_> {
    fn be32(&self, at: usize) -> u64 {
        u32::from_be_bytes(self.0[at..at + 4].try_into().expect("four bytes")).into()
    }

    fn be64(&self, at: usize) -> u64 {
        u64::from_be_bytes(self.0[at..at + 8].try_into().expect("eight bytes"))
    }

    fn cluster_bits(&self) -> u64 {
        self.be32(20)
    }

    fn is_dirty(&self) -> bool {
        self.be32(4) >= 3 && self.be64(72) & 1 == 1
    }

    fn refcount_bits(&self) -> u64 {
        if self.be32(4) >= 3 { 1 << self.be32(96) } else { 16 }
    }

    fn refcounts_per_block(&self) -> u64 {
        (8 << self.cluster_bits()) / self.refcount_bits()
    }

    /// The clusters whose refcount is not 0.
    fn counted(&self) -> BTreeSet<u64> {
        let (table, table_clusters) = (self.be64(48) as usize, self.be32(56));
        let entries = (table_clusters << self.cluster_bits()) / 8;
        let bits = self.refcount_bits() as usize;
        let mut counted = BTreeSet::new();
        for index in 0..entries {
            let block = self.be64(table + index as usize * 8) as usize;
            if block == 0 {
                continue;
            }
            for entry in 0..self.refcounts_per_block() {
                let first = entry as usize * bits;
                let is_set =
                    (first..first + bits).any(|bit| self.0[block + bit / 8] >> (bit % 8) & 1 == 1);
                if is_set {
                    counted.insert(index * self.refcounts_per_block() + entry);
                }
            }
        }
        counted
    }
}
