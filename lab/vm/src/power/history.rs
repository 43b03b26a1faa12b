//! The guest's changes of its disk, in rounds, and the content that it may find after a loss of
//! power.
//!
//! Rounds follow from a seed, so a later check of the disk knows every request. A round that ends
//! with a durable change or a flush is acknowledged and marked in the log. Each sector names its
//! last write. After a loss of power it must hold the write that was last made durable there, or a
//! later one that was never flushed.

use std::ops::Range;

use crate::in_guest::client::Change;

/// Bytes in the image.
pub const SIZE: u64 = 4 << 20;
/// Bytes in a sector, which is written whole or not at all.
const SECTOR: u64 = 512;
const SECTORS: u64 = SIZE / SECTOR;
/// Sectors of each write of the first round.
const STRETCH: u64 = 64;

/// A round's requests: those of one step are sent together.
pub struct Round {
    /// The steps, one after the other.
    pub steps: Vec<Vec<Change>>,
    /// Whether all its changes are durable at its end.
    pub acknowledged: AckMeaning,
}

/// The meaning of a round's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AckMeaning {
    /// The writes are durable.
    Durable,
    /// Nothing.
    Nothing,
}

/// The meaning of the answer to a plain write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writes {
    /// The write may get lost until a flush.
    Volatile,
    /// The write is durable, as if it had FUA.
    Durable,
}

/// The rounds of a seed, and the state of the disk after them.
pub struct History {
    writes: Writes,
    random: u64,
    version: u32,
    sectors: Vec<Sector>,
}

#[derive(Clone, Default)]
struct Sector {
    /// The version of the durable content; 0: zeros.
    durable: u32,
    /// The versions that were written since, oldest first.
    later: Vec<u32>,
}

impl History {
    /// The history before the first round: a disk of zeros.
    pub fn new(seed: u64, writes: Writes) -> Self {
        let sectors = vec![Sector::default(); SECTORS as usize];
        Self { writes, random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, version: 0, sectors }
    }

    /// Returns the next round, and applies it to the state of the disk.
    pub fn next_round(&mut self) -> Round {
        let steps = match self.version {
            0 => vec![self.first_half(), vec![Change::Flush]],
            _ => {
                let steps = self.any_steps();
                self.with_flush_before_overwrite(steps)
            }
        };
        let mut acknowledged = AckMeaning::Nothing;
        for change in steps.iter().flatten() {
            self.apply(change);
            if self.writes == Writes::Durable || !matches!(change, Change::Write { .. }) {
                acknowledged = AckMeaning::Durable;
            }
        }
        Round { steps, acknowledged }
    }

    /// Writes the first half, so that later rounds change written and unwritten space.
    fn first_half(&mut self) -> Vec<Change> {
        let starts = (0..SECTORS / 2).step_by(STRETCH as usize);
        starts.map(|start| self.write(start, STRETCH)).collect()
    }

    fn any_steps(&mut self) -> Vec<Vec<Change>> {
        match self.below(6) {
            0 | 1 => vec![self.side_by_side(Self::fua)],
            2 => vec![self.side_by_side(Self::write), vec![Change::Flush]],
            3 => vec![self.side_by_side(Self::write)],
            4 => {
                let (start, length) = (self.below(SECTORS / 8) * 8, (1 + self.below(16)) * 8);
                let length = length.min(SECTORS - start);
                vec![vec![Change::ZeroesFua {
                    offset: start * SECTOR,
                    length: (length * SECTOR) as u32,
                }]]
            }
            _ => vec![self.side_by_side(Self::write), self.side_by_side(Self::fua)],
        }
    }

    /// Adds a flush before durable changes of sectors that were written and not flushed.
    /// dm-log-writes logs a write without FUA at the next flush. If FUA has overwritten it before,
    /// the log has the two in the wrong order, which a real disk would not do.
    fn with_flush_before_overwrite(&self, steps: Vec<Vec<Change>>) -> Vec<Vec<Change>> {
        let mut unflushed: Vec<bool> =
            self.sectors.iter().map(|sector| !sector.later.is_empty()).collect();
        let mut ordered = Vec::new();
        for step in steps {
            for change in &step {
                let range = sectors_of(change);
                match change {
                    Change::Write { .. } => unflushed[range].fill(self.writes == Writes::Volatile),
                    Change::Flush => unflushed.fill(false),
                    _ if unflushed[range].contains(&true) => {
                        ordered.push(vec![Change::Flush]);
                        unflushed.fill(false);
                    }
                    _ => {}
                }
            }
            ordered.push(step);
        }
        ordered
    }

    /// One to four changes that do not overlap, each in another eighth of the disk.
    fn side_by_side(&mut self, change: fn(&mut Self, u64, u64) -> Change) -> Vec<Change> {
        let (count, first) = (1 + self.below(4), self.below(8));
        let part = SECTORS / 8;
        let place = |index| (first + index) % 8 * part;
        (0..count)
            .map(|index| {
                // Half of them consist of whole pages, the others of any sectors.
                let unit = if self.below(2) == 0 { 8 } else { 1 };
                let length = unit * (1 + self.below(8));
                let start = self.below((part - length) / unit) * unit;
                change(self, place(index) + start, length)
            })
            .collect()
    }

    fn fua(&mut self, start: u64, length: u64) -> Change {
        let (offset, data) = self.data(start, length);
        Change::WriteFua { offset, data }
    }

    fn write(&mut self, start: u64, length: u64) -> Change {
        let (offset, data) = self.data(start, length);
        Change::Write { offset, data }
    }

    fn data(&mut self, start: u64, length: u64) -> (u64, Vec<u8>) {
        self.version += 1;
        let data = (start..start + length).flat_map(|sector| content(sector, self.version));
        (start * SECTOR, data.collect())
    }

    fn apply(&mut self, change: &Change) {
        let writes = self.writes;
        for sector in &mut self.sectors[sectors_of(change)] {
            match change {
                Change::Write { data, .. } if writes == Writes::Volatile => {
                    sector.later.push(version_of(data));
                }
                Change::Write { data, .. } | Change::WriteFua { data, .. } => {
                    *sector = Sector { durable: version_of(data), later: Vec::new() };
                }
                Change::ZeroesFua { .. } => *sector = Sector::default(),
                Change::Flush => {
                    sector.durable = sector.later.last().copied().unwrap_or(sector.durable);
                    sector.later.clear();
                }
            }
        }
    }

    /// Checks that `image`, found after a loss of power, is a permitted state of this disk.
    ///
    /// # Errors
    /// The error says how many sectors are wrong, and what is wrong with the first.
    pub fn check(&self, image: &[u8]) -> Result<(), String> {
        if image.len() as u64 != SIZE {
            return Err(format!("the image has {} bytes", image.len()));
        }
        let found = image.chunks_exact(SECTOR as usize).zip(&self.sectors).enumerate();
        let wrong: Vec<_> = found
            .filter(|(index, (bytes, sector))| {
                let mut allowed = [sector.durable].into_iter().chain(sector.later.iter().copied());
                !allowed.any(|version| content(*index as u64, version) == **bytes)
            })
            .collect();
        let Some((index, (bytes, sector))) = wrong.first() else { return Ok(()) };
        Err(format!(
            "{} sectors are wrong; sector {index} holds version {}, acknowledged was {}",
            wrong.len(),
            version_of(bytes),
            sector.durable
        ))
    }

    fn below(&mut self, limit: u64) -> u64 {
        // xorshift64
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) % limit
    }
}

/// The sectors of a change.
fn sectors_of(change: &Change) -> Range<usize> {
    let (offset, length) = match change {
        Change::Write { offset, data } | Change::WriteFua { offset, data } => {
            (*offset, data.len() as u64)
        }
        Change::ZeroesFua { offset, length } => (*offset, u64::from(*length)),
        Change::Flush => (0, SIZE),
    };
    (offset / SECTOR) as usize..((offset + length) / SECTOR) as usize
}

/// The content of a sector: its number and the version, repeated; zeros for version 0.
fn content(sector: u64, version: u32) -> [u8; SECTOR as usize] {
    let mut bytes = [0; SECTOR as usize];
    if version > 0 {
        for word in bytes.chunks_exact_mut(8) {
            word[..4].copy_from_slice(&version.to_le_bytes());
            word[4..].copy_from_slice(&(sector as u32).to_le_bytes());
        }
    }
    bytes
}

fn version_of(data: &[u8]) -> u32 {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&data[..4]);
    u32::from_le_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk after a loss of power. Of the writes that nothing made durable, it keeps those for
    /// which `keep` is true.
    fn run(seed: u64, rounds: u32, keep: fn(u32) -> bool) -> (History, Vec<u8>) {
        let mut history = History::new(seed, Writes::Volatile);
        let (mut stable, mut cached) = (vec![0; SIZE as usize], vec![0; SIZE as usize]);
        let mut count = 0;
        for _ in 0..rounds {
            for change in history.next_round().steps.into_iter().flatten() {
                let (offset, data) = match change {
                    Change::Write { offset, data } => {
                        count += 1;
                        cached[offset as usize..][..data.len()].copy_from_slice(&data);
                        if keep(count) {
                            stable[offset as usize..][..data.len()].copy_from_slice(&data);
                        }
                        continue;
                    }
                    Change::WriteFua { offset, data } => (offset, data),
                    Change::ZeroesFua { offset, length } => (offset, vec![0; length as usize]),
                    Change::Flush => {
                        stable.copy_from_slice(&cached);
                        continue;
                    }
                };
                cached[offset as usize..][..data.len()].copy_from_slice(&data);
                stable[offset as usize..][..data.len()].copy_from_slice(&data);
            }
        }
        (history, stable)
    }

    #[test]
    fn honest_disks_pass_whatever_they_keep_of_what_was_not_flushed() {
        for seed in 0..20 {
            for keep in [|_| false, |_| true, |count| count % 3 == 0] as [fn(u32) -> bool; 3] {
                let (history, disk) = run(seed, 60, keep);
                assert_eq!(history.check(&disk), Ok(()), "seed {seed}");
            }
        }
    }

    #[test]
    fn where_plain_writes_are_durable_none_may_be_lost() {
        let (mut volatile, mut durable) =
            (History::new(3, Writes::Volatile), History::new(3, Writes::Durable));
        let zeros = vec![0; SIZE as usize];
        for history in [&mut volatile, &mut durable] {
            // The first half is written, and not flushed.
            let steps = history.first_half();
            steps.iter().for_each(|change| history.apply(change));
        }
        assert_eq!(volatile.check(&zeros), Ok(()));
        assert!(durable.check(&zeros).is_err());
    }

    #[test]
    fn a_lost_sector_is_found() {
        let (history, mut disk) = run(3, 60, |_| true);
        let at = disk.iter().position(|byte| *byte != 0).expect("something was written");
        disk[at / 512 * 512..][..512].fill(0);
        let said = history.check(&disk).expect_err("it is lost");
        assert!(said.starts_with("1 sectors are wrong"), "{said}");
    }

    #[test]
    fn an_older_state_is_found() {
        let (_, old) = run(3, 40, |_| true);
        let (history, _) = run(3, 60, |_| true);
        assert!(history.check(&old).is_err());
    }
}
