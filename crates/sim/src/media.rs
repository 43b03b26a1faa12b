//! The content of a disk with a volatile cache: the bytes that reads see, the bytes that are
//! stable, and every version of a sector in between.
//!
//! A sector of 512 bytes is the unit that a crash keeps or drops as a whole. Until a flush covers
//! it, a crash may leave any version written since the last stable one: devices write back their
//! caches in any order and at any time.

use blockhouse_core::ByteRange;
use fastrand::Rng;

/// The unit that a crash does not tear, in bytes.
pub(crate) const SECTOR: usize = 512;

#[derive(Clone)]
pub(crate) struct Media {
    size: u64,
    stable_size: u64,
    /// The version of the size, so that a flush does not restore an older size.
    size_version: u64,
    stable_size_version: u64,
    /// End of the stable bytes that are part of the file. They became stable at
    /// `stable_end_version` or before.
    stable_end: u64,
    stable_end_version: u64,
    /// `visible` and `stable` consist of whole sectors.
    visible: Vec<u8>,
    stable: Vec<u8>,
    sectors: Vec<Sector>,
    /// The number of the newest version of any sector, so that a flush does not replace a newer
    /// version.
    last_version: u64,
}

#[derive(Clone, Default)]
struct Sector {
    stable_version: u64,
    /// The versions that are not stable yet, oldest first.
    versions: Vec<Version>,
}

#[derive(Clone)]
struct Version {
    number: u64,
    write: u64,
    bytes: [u8; SECTOR],
}

/// The sectors that a flush covers: the sectors in the cache when it began, and their newest
/// versions.
pub(crate) struct FlushSet {
    versions: Vec<(usize, u64)>,
    size: u64,
    size_version: u64,
}

/// A write in flight: a crash may leave any part of it.
pub(crate) struct InFlightWrite<'a> {
    pub(crate) write: u64,
    pub(crate) offset: u64,
    pub(crate) bytes: &'a [u8],
}

impl Media {
    /// A medium whose stable content is `content`.
    pub(crate) fn new(mut content: Vec<u8>) -> Self {
        let size = content.len() as u64;
        content.resize(content.len().next_multiple_of(SECTOR), 0);
        let sectors = vec![Sector::default(); content.len() / SECTOR];
        let visible = content.clone();
        Self {
            size,
            stable_size: size,
            size_version: 0,
            stable_size_version: 0,
            stable_end: 0,
            stable_end_version: 0,
            visible,
            stable: content,
            sectors,
            last_version: 0,
        }
    }

    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// The bytes that reads see; zeros past the end.
    pub(crate) fn read(&self, offset: u64, into: &mut [u8]) {
        let start = (offset as usize).min(self.visible.len());
        let count = into.len().min(self.visible.len() - start);
        into[..count].copy_from_slice(&self.visible[start..start + count]);
        into[count..].fill(0);
    }

    /// Stores `bytes` in the cache.
    pub(crate) fn write(&mut self, write: u64, offset: u64, bytes: &[u8]) {
        let end = offset + bytes.len() as u64;
        if end > self.size {
            self.set_size(end);
        }
        self.visible[offset as usize..end as usize].copy_from_slice(bytes);
        for sector in sectors_of(offset, bytes.len()) {
            self.last_version += 1;
            let bytes = *sector_bytes(&self.visible, sector);
            let version = Version { number: self.last_version, write, bytes };
            self.sectors[sector].versions.push(version);
        }
    }

    /// Stores only some of the sectors of a write, as a failed write may do.
    pub(crate) fn write_torn(&mut self, write: u64, offset: u64, bytes: &[u8], random: &mut Rng) {
        for sector in sectors_of(offset, bytes.len()) {
            let start = (sector * SECTOR).max(offset as usize);
            let end = ((sector + 1) * SECTOR).min(offset as usize + bytes.len());
            if random.bool() {
                let part = &bytes[start - offset as usize..end - offset as usize];
                self.write(write, start as u64, part);
            }
        }
    }

    /// The host has allocated new space for these sectors. If their content does not become stable,
    /// a crash may leave the old bytes of that space.
    pub(crate) fn leave_anything_past_end(&mut self, range: ByteRange, random: &mut Rng) {
        for sector in self.present(range) {
            let start = sector * SECTOR;
            if start as u64 >= self.stable_size && self.sectors[sector].stable_version == 0 {
                self.stable[start..start + SECTOR].fill_with(|| random.u8(1..));
            }
        }
    }

    /// Makes the sectors of the range stable, with the content that reads see.
    pub(crate) fn make_stable(&mut self, range: ByteRange) {
        let sectors = self.present(range);
        for sector in sectors.clone() {
            let bytes = *sector_bytes(&self.visible, sector);
            self.stable[sector * SECTOR..][..SECTOR].copy_from_slice(&bytes);
            self.last_version += 1;
            self.sectors[sector] =
                Sector { stable_version: self.last_version, versions: Vec::new() };
        }
        // No version of these sectors is left for a flush, which would persist the size.
        let end = (sectors.end * SECTOR) as u64;
        self.persist_size(end.min(self.size), self.size_version);
    }

    pub(crate) fn set_size(&mut self, size: u64) {
        let length = (size as usize).next_multiple_of(SECTOR);
        let kept = (size as usize).min(self.visible.len());
        self.visible[kept..].fill(0);
        self.visible.resize(length, 0);
        self.stable.resize(length, 0);
        self.sectors.resize(length / SECTOR, Sector::default());
        self.size = size;
        self.size_version += 1;
        self.stable_end = self.stable_end.min(size);
    }

    /// Appends `bytes` to the medium. The bytes and the new size are stable at once.
    pub(crate) fn append(&mut self, bytes: &[u8]) {
        let start = self.size as usize;
        self.set_size(self.size + bytes.len() as u64);
        self.visible[start..start + bytes.len()].copy_from_slice(bytes);
        self.make_stable(ByteRange::between(start as u64, self.size));
    }

    /// The sectors covered by a flush that begins now.
    pub(crate) fn flush_set(&self) -> FlushSet {
        self.flush_set_of(0..self.sectors.len())
    }

    fn flush_set_of(&self, sectors: std::ops::Range<usize>) -> FlushSet {
        let newest = |sector: usize| Some((sector, self.sectors[sector].versions.last()?.number));
        let versions = sectors.filter_map(newest).collect();
        FlushSet { versions, size: self.size, size_version: self.size_version }
    }

    /// Completes a successful flush; `with_size` if the size became stable, too.
    pub(crate) fn complete_flush(&mut self, flush: &FlushSet, with_size: bool) {
        for &(sector, number) in &flush.versions {
            let versions = &mut self.sectors[sector].versions;
            if let Some(found) = versions.iter().position(|version| version.number == number) {
                let version = versions.drain(..=found).next_back().expect("the one found");
                self.persist(sector, &version);
                // The stable size must include the data: otherwise it cannot be read back.
                let end = ((sector + 1) * SECTOR) as u64;
                self.persist_size(end.min(flush.size), flush.size_version);
            }
        }
        if with_size && flush.size_version >= self.stable_size_version {
            // A size that was made stable after the flush had begun is newer.
            let is_older = flush.size_version < self.stable_end_version;
            self.stable_size = flush.size.max(if is_older { self.stable_end } else { 0 });
            self.stable_size_version = flush.size_version;
        }
    }

    /// Makes the size at least `size` after a crash.
    fn persist_size(&mut self, size: u64, version: u64) {
        self.stable_end = self.stable_end.max(size);
        self.stable_end_version = self.stable_end_version.max(version);
        if size > self.stable_size {
            self.stable_size = size;
            self.stable_size_version = self.stable_size_version.max(version);
        }
    }

    /// Fails a flush: the versions that it covered are treated as clean from now on, but only a
    /// random part of them is stable. Reads still see them. The Linux page cache does the same.
    pub(crate) fn fail_flush(&mut self, flush: &FlushSet, random: &mut Rng) {
        for &(sector, number) in &flush.versions {
            let versions = &mut self.sectors[sector].versions;
            let count = versions.iter().take_while(|version| version.number <= number).count();
            let lost: Vec<_> = versions.drain(..count).collect();
            let kept = random.usize(..=lost.len());
            if let Some(version) = lost.get(kept) {
                self.persist(sector, version);
            }
        }
    }

    /// As [`fail_flush`](Self::fail_flush), but only for the sectors of a failed durable write.
    pub(crate) fn fail_durable_write(&mut self, range: ByteRange, random: &mut Rng) {
        let flush = self.flush_set_of(self.present(range));
        self.fail_flush(&flush, random);
    }

    /// The existing sectors of the range: a failed write may have created only some.
    fn present(&self, range: ByteRange) -> std::ops::Range<usize> {
        let wanted = sectors_of(range.offset(), range.length() as usize);
        wanted.start.min(self.sectors.len())..wanted.end.min(self.sectors.len())
    }

    fn persist(&mut self, sector: usize, version: &Version) {
        if version.number > self.sectors[sector].stable_version {
            self.sectors[sector].stable_version = version.number;
            self.stable[sector * SECTOR..][..SECTOR].copy_from_slice(&version.bytes);
        }
    }

    /// Possible content after a crash at this moment. Each sector is its stable version, any
    /// version in the cache, or the result of a write in flight.
    pub(crate) fn crash(&self, in_flight: &[InFlightWrite<'_>], random: &mut Rng) -> Vec<u8> {
        let outcome = CrashOutcome::pick(random);
        let mut image = self.stable.clone();
        for (index, sector) in self.sectors.iter().enumerate() {
            let mut candidates: Vec<(u64, [u8; SECTOR])> =
                sector.versions.iter().map(|version| (version.write, version.bytes)).collect();
            for write in in_flight {
                candidates.extend(self.overlay(index, write).map(|bytes| (write.write, bytes)));
            }
            if let Some(bytes) = outcome.choose(&candidates, random) {
                image[index * SECTOR..][..SECTOR].copy_from_slice(bytes);
            }
        }
        let size = if random.bool() { self.size } else { self.stable_size };
        image.resize(size as usize, 0);
        image
    }

    /// The sector after a write in flight; `None` if the write does not touch it.
    fn overlay(&self, sector: usize, write: &InFlightWrite<'_>) -> Option<[u8; SECTOR]> {
        let start = sector * SECTOR;
        let from = (write.offset as usize).max(start);
        let to = (write.offset as usize + write.bytes.len()).min(start + SECTOR);
        if from >= to {
            return None;
        }
        let mut bytes = if start < self.visible.len() {
            *sector_bytes(&self.visible, sector)
        } else {
            [0; SECTOR]
        };
        let source = &write.bytes[from - write.offset as usize..to - write.offset as usize];
        bytes[from - start..to - start].copy_from_slice(source);
        Some(bytes)
    }
}

/// How a crash treats data that is not stable.
enum CrashOutcome {
    /// All of it is lost.
    Nothing,
    /// The newest version of each sector is kept.
    Everything,
    /// Whole writes are kept or lost.
    Writes(u64),
    /// Each sector independently keeps one of its versions.
    Sectors,
}

impl CrashOutcome {
    fn pick(random: &mut Rng) -> Self {
        match random.u8(..8) {
            0 => Self::Nothing,
            1 => Self::Everything,
            2..5 => Self::Writes(random.u64(..)),
            _ => Self::Sectors,
        }
    }

    fn choose<'a>(
        &self,
        candidates: &'a [(u64, [u8; SECTOR])],
        random: &mut Rng,
    ) -> Option<&'a [u8; SECTOR]> {
        let chosen = match self {
            Self::Nothing => None,
            Self::Everything => candidates.last(),
            Self::Writes(salt) => {
                let is_kept = |write: u64| Rng::with_seed(salt ^ write).bool();
                candidates.iter().rev().find(|(write, _)| is_kept(*write))
            }
            Self::Sectors => candidates.get(random.usize(..=candidates.len())),
        };
        chosen.map(|(_, bytes)| bytes)
    }
}

fn sectors_of(offset: u64, length: usize) -> std::ops::Range<usize> {
    let end = offset as usize + length;
    offset as usize / SECTOR..end.div_ceil(SECTOR)
}

fn sector_bytes(bytes: &[u8], sector: usize) -> &[u8; SECTOR] {
    bytes[sector * SECTOR..][..SECTOR].try_into().expect("a whole sector")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sector(byte: u8) -> Vec<u8> {
        vec![byte; SECTOR]
    }

    /// The first bytes that crashes leave behind in the first sector, over many seeds.
    fn survivors(media: &Media, in_flight: &[InFlightWrite<'_>]) -> Vec<u8> {
        let seen: std::collections::BTreeSet<u8> =
            (0..200).map(|seed| media.crash(in_flight, &mut Rng::with_seed(seed))[0]).collect();
        seen.into_iter().collect()
    }

    #[test]
    fn every_version_since_the_stable_one_may_survive() {
        let mut media = Media::new(sector(0));
        media.write(1, 0, &sector(1));
        media.write(2, 0, &sector(2));
        assert_eq!(survivors(&media, &[]), [0, 1, 2]);
        let bytes = sector(3);
        let in_flight = [InFlightWrite { write: 3, offset: 0, bytes: &bytes }];
        assert_eq!(survivors(&media, &in_flight), [0, 1, 2, 3]);
    }

    #[test]
    fn a_flush_covers_what_was_written_before_it_began() {
        let mut media = Media::new(sector(0));
        media.write(1, 0, &sector(1));
        let flush = media.flush_set();
        media.write(2, 0, &sector(2));
        media.complete_flush(&flush, false);
        assert_eq!(survivors(&media, &[]), [1, 2]);
    }

    #[test]
    fn a_durable_write_is_not_undone_by_an_older_flush() {
        let mut media = Media::new(sector(0));
        media.write(1, 0, &sector(1));
        let flush = media.flush_set();
        media.write(2, 0, &sector(2));
        media.make_stable(ByteRange::between(0, 512));
        media.complete_flush(&flush, false);
        assert_eq!(survivors(&media, &[]), [2]);
    }

    #[test]
    fn what_a_failed_flush_covered_is_gone_for_the_next_one() {
        let outcomes: std::collections::BTreeSet<u8> = (0..50)
            .map(|seed| {
                let mut media = Media::new(sector(0));
                media.write(1, 0, &sector(1));
                let flush = media.flush_set();
                media.fail_flush(&flush, &mut Rng::with_seed(seed));
                media.complete_flush(&media.flush_set(), false);
                let mut seen = [0];
                media.read(0, &mut seen);
                assert_eq!(seen, [1], "reads go on to see it");
                media.crash(&[], &mut Rng::with_seed(seed))[0]
            })
            .collect();
        assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [0, 1]);
    }

    #[test]
    fn a_flush_of_data_keeps_the_size_that_it_needs() {
        let mut media = Media::new(sector(0));
        media.write(1, 512, &[1; 100]);
        media.complete_flush(&media.flush_set(), false);
        for seed in 0..50 {
            let image = media.crash(&[], &mut Rng::with_seed(seed));
            assert_eq!((image.len(), image[511], image[611]), (612, 0, 1));
        }
    }

    #[test]
    fn a_durable_write_keeps_all_of_its_sectors_for_flushes_that_cover_them() {
        let mut media = Media::new(sector(0));
        media.write(1, 512, &sector(1));
        let flush = media.flush_set();
        media.write(2, 600, &[2; 14]);
        media.make_stable(ByteRange::between(600, 614));
        media.complete_flush(&flush, false);
        for seed in 0..50 {
            let image = media.crash(&[], &mut Rng::with_seed(seed));
            assert_eq!((image.len(), image[613], image[1023]), (1024, 2, 1));
        }
    }

    #[test]
    fn what_the_host_had_there_shows_until_prepared_zeros_are_flushed() {
        let mut media = Media::new(sector(7));
        let (range, mut random) = (ByteRange::between(512, 1536), Rng::with_seed(1));
        media.write(1, 512, &[0; 1024]);
        media.leave_anything_past_end(range, &mut random);
        let leaves_anything = |media: &Media| {
            (0..50).any(|seed| {
                let image = media.crash(&[], &mut Rng::with_seed(seed));
                image.iter().skip(512).any(|&byte| byte != 0)
            })
        };
        assert!(leaves_anything(&media));
        media.complete_flush(&media.flush_set(), true);
        assert!(!leaves_anything(&media));
        assert_eq!(media.crash(&[], &mut random)[..512], sector(7));
    }

    #[test]
    fn a_new_size_survives_only_a_full_flush() {
        let mut media = Media::new(sector(0));
        media.set_size(1024);
        media.complete_flush(&media.flush_set(), false);
        let sizes = |media: &Media| -> std::collections::BTreeSet<usize> {
            (0..50).map(|seed| media.crash(&[], &mut Rng::with_seed(seed)).len()).collect()
        };
        assert_eq!(sizes(&media), [512, 1024].into());
        media.complete_flush(&media.flush_set(), true);
        assert_eq!(sizes(&media), [1024].into());
    }
}
