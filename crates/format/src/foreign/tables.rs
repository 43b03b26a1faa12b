//! Metadata in memory: a cache of the file's pages, which evicts the least recently used page.
//!
//! Guarantees: at most [`MAX_PAGES`] pages of [`PAGE_SIZE`] bytes are kept, however large the
//! tables of the image are. An image is only read, so a page never changes.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use blockhouse_core::{Result, Storage, rare};
use parking_lot::Mutex;

use super::patches::Patches;
use super::refusal::corrupt;
use crate::CacheCounts;
use crate::aligned_read::read;

/// Bytes of a page, a multiple of the size of each kind of table entry.
const PAGE_SIZE: u64 = 16 << 10;
/// Maximum number of pages in memory, which take 4 MiB.
const MAX_PAGES: usize = 256;

/// The pages of one image.
#[derive(Default)]
pub(super) struct PageCache {
    pages: Mutex<Pages>,
    hits: AtomicU64,
    misses: AtomicU64,
}

#[derive(Default)]
struct Pages {
    by_number: HashMap<u64, Cached>,
    /// The number of uses so far, from which the least recently used page is determined.
    clock: u64,
}

struct Cached {
    page: Arc<[u8]>,
    last_use: u64,
}

impl Pages {
    fn get(&mut self, number: u64) -> Option<Arc<[u8]>> {
        self.clock += 1;
        let cached = self.by_number.get_mut(&number)?;
        cached.last_use = self.clock;
        Some(Arc::clone(&cached.page))
    }

    fn insert(&mut self, number: u64, page: Arc<[u8]>) {
        if self.by_number.len() >= MAX_PAGES {
            let oldest = self.by_number.iter().min_by_key(|(_, cached)| cached.last_use);
            if let Some((&oldest, _)) = oldest {
                self.by_number.remove(&oldest);
            }
        }
        self.by_number.insert(number, Cached { page, last_use: self.clock });
    }
}

impl PageCache {
    pub(super) fn counts(&self) -> CacheCounts {
        CacheCounts { hits: self.hits.load(Relaxed), misses: self.misses.load(Relaxed) }
    }
}

/// The metadata of an image, addressed by offsets in its file.
pub(super) struct Tables<'a, S> {
    storage: &'a S,
    cache: &'a PageCache,
    patches: Option<&'a Patches>,
}

impl<'a, S: Storage> Tables<'a, S> {
    /// The metadata of a file, to which `patches` are applied.
    pub(super) fn new(storage: &'a S, cache: &'a PageCache, patches: Option<&'a Patches>) -> Self {
        Self { storage, cache, patches }
    }

    /// The bytes of the entry at `offset`, a multiple of `N`; `N` is a power of two.
    ///
    /// # Errors
    /// `Corrupt` if the file ends before the entry does; or errors of the storage.
    pub(super) async fn entry<const N: usize>(&self, offset: u64) -> Result<[u8; N]> {
        self.check_inside(offset, N as u64)?;
        let page = self.page(offset / PAGE_SIZE).await?;
        let start = (offset % PAGE_SIZE) as usize;
        Ok(page[start..start + N].try_into().expect("an entry lies in one page"))
    }

    /// The `length` bytes at `offset`, read from the storage.
    ///
    /// # Errors
    /// As [`entry`](Self::entry).
    pub(super) async fn read(&self, offset: u64, length: usize) -> Result<Vec<u8>> {
        self.check_inside(offset, length as u64)?;
        self.read_host(offset, length).await
    }

    fn check_inside(&self, offset: u64, length: u64) -> Result<()> {
        let host = self.storage.size();
        let size = self.patches.map_or(host, |patches| patches.file_size(host));
        if offset.checked_add(length).is_some_and(|end| end <= size) {
            return Ok(());
        }
        let what = format!("a table lies past the end of the file ({size} bytes)");
        Err(corrupt(what, offset))
    }

    async fn page(&self, number: u64) -> Result<Arc<[u8]>> {
        if let Some(page) = self.cache.pages.lock().get(number) {
            self.cache.hits.fetch_add(1, Relaxed);
            return Ok(page);
        }
        self.cache.misses.fetch_add(1, Relaxed);
        // Boxed, so that the future of a hit stays small.
        let bytes = rare(self.read_host(number * PAGE_SIZE, PAGE_SIZE as usize)).await?;
        let page: Arc<[u8]> = bytes.into();
        self.cache.pages.lock().insert(number, Arc::clone(&page));
        Ok(page)
    }

    /// Reads bytes of the storage, and applies the patches. Bytes past the end are zeros.
    async fn read_host(&self, offset: u64, length: usize) -> Result<Vec<u8>> {
        match self.patches {
            Some(patches) => patches.read(self.storage, offset, length).await,
            None => read(self.storage, offset, length).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use blockhouse_sim::{Config, Sim, SimDisk};

    use super::*;

    #[test]
    fn pages_that_are_used_stay_and_their_number_is_bounded() {
        let sim = Sim::new(1);
        let pages = MAX_PAGES as u64 + 8;
        let bytes = (0..pages * PAGE_SIZE).map(|at| (at / PAGE_SIZE) as u8).collect();
        let storage = SimDisk::new(&sim, Config::default(), bytes);
        sim.block_on(async move {
            let cache = PageCache::default();
            let tables = Tables::new(&storage, &cache, None);
            for number in 0..pages {
                let entry = tables.entry::<4>(number * PAGE_SIZE + 4).await.unwrap();
                assert_eq!(entry, [number as u8; 4]);
                tables.entry::<8>(8).await.unwrap();
                assert!(cache.pages.lock().by_number.len() <= MAX_PAGES);
            }
            assert_eq!(cache.counts(), CacheCounts { hits: pages, misses: pages });
            let beyond = tables.entry::<8>(pages * PAGE_SIZE).await.unwrap_err();
            assert!(beyond.to_string().contains("past the end of the file"), "{beyond}");
        });
    }
}
