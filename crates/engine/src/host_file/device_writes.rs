//! The kernel's count of sectors written to a block device. A higher count later shows a write.
//!
//! Guarantee: the count includes each completed write, discard and zeroing that any process of this
//! host sent to the device itself. It does not include writes that reach the same bytes in another
//! way: a partition through its disk, a loop device through its file, a volume from another host.
//! The count starts from zero when the kernel finds the device again. So it is valid for one *era*:
//! one boot of the host, and one attachment of the disk (`diskseq`, Linux 5.15).

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use rustix::fs::Dev;

use crate::process::device_user::device_folder;

/// Bits of the sector count: enough for 512 TiB.
const COUNT_BITS: u32 = 40;
/// Bits of the era in a word that also has a count.
const ERA_BITS: u32 = 64 - COUNT_BITS;
/// Bits of the era in the nanoseconds of a `Duration`.
const REST_BITS: u32 = 29;

/// Words of `/sys/dev/block/M:N/stat`: sectors written, sectors discarded.
const WRITTEN: usize = 6;
const DISCARDED: usize = 13;

/// The number of sectors written to a block device in one era.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceWrites {
    era: u64,
    sectors: u64,
}

impl DeviceWrites {
    /// A count of sectors in an era, for tests of comparisons.
    pub fn of(era: u64, sectors: u64) -> Self {
        Self { era, sectors }
    }

    /// Encodes the count as a time, for code that compares times.
    pub fn to_time(self) -> Duration {
        let rest = (self.era >> ERA_BITS) & ((1 << REST_BITS) - 1);
        Duration::new(self.to_word(), rest as u32)
    }

    /// Encodes the count and a part of the era in one word.
    pub fn to_word(self) -> u64 {
        self.era << COUNT_BITS | self.sectors & ((1 << COUNT_BITS) - 1)
    }

    /// Whether two [words](Self::to_word) are of one era.
    pub fn is_same_era(one: u64, other: u64) -> bool {
        one >> COUNT_BITS == other >> COUNT_BITS
    }

    /// Whether two [times](Self::to_time) are of one era.
    pub fn is_same_era_of_times(one: Duration, other: Duration) -> bool {
        Self::is_same_era(one.as_secs(), other.as_secs())
            && one.subsec_nanos() == other.subsec_nanos()
    }
}

/// The open `stat` file of a device. Reads need no path, so a sandbox does not prevent them.
pub(super) struct WriteCounter {
    counts: File,
    era: u64,
}

impl WriteCounter {
    /// Opens the counter; `None` if the kernel does not count, or does not provide the era.
    pub(super) fn of(device: Dev) -> Option<Self> {
        let folder = device_folder(device);
        // The folder of a partition is in the folder of its disk.
        let read = |name: &str| {
            let here = fs::read_to_string(folder.join(name));
            here.or_else(|_| fs::read_to_string(folder.join("..").join(name))).ok()
        };
        if read("queue/iostats")?.trim() == "0" {
            return None;
        }
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let era = hash(&[boot.trim().as_bytes(), read("diskseq")?.trim().as_bytes()]);
        let counts = File::open(folder.join("stat")).ok()?;
        Some(Self { counts, era })
    }

    /// The writes of this era so far; `None` if the count cannot be read.
    pub(super) fn read(&self) -> Option<DeviceWrites> {
        let mut bytes = [0; 512];
        let length = self.counts.read_at(&mut bytes, 0).ok()?;
        let text = str::from_utf8(&bytes[..length]).ok()?;
        let words: Vec<&str> = text.split_ascii_whitespace().collect();
        let word = |index: usize| words.get(index)?.parse::<u64>().ok();
        // Kernels before 4.18 count no discards: the result is `None`.
        let sectors = word(WRITTEN)?.wrapping_add(word(DISCARDED)?);
        Some(DeviceWrites { era: self.era, sectors })
    }
}

/// FNV-1a.
fn hash(parts: &[&[u8]]) -> u64 {
    let bytes = parts.iter().flat_map(|part| part.iter().chain(&[0]));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_comes_back_with_its_era() {
        let era = 0xfedc_ba98_7654_3210;
        let first = DeviceWrites { era, sectors: 5 };
        let later = DeviceWrites { era, sectors: (1 << COUNT_BITS) - 1 };
        let other = DeviceWrites { era: era ^ 1, sectors: 5 };
        let far = DeviceWrites { era: era ^ 1 << 50, sectors: 5 };
        assert_eq!(later.to_word() - first.to_word(), (1 << COUNT_BITS) - 6);
        assert!(DeviceWrites::is_same_era(first.to_word(), later.to_word()));
        assert!(!DeviceWrites::is_same_era(first.to_word(), other.to_word()));
        for (writes, is_same) in [(later, true), (other, false), (far, false)] {
            let times = [first, writes].map(DeviceWrites::to_time);
            assert_eq!(DeviceWrites::is_same_era_of_times(times[0], times[1]), is_same);
            assert_ne!(times[0], times[1]);
        }
    }
}
