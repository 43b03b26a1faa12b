//! The kernel's block statistics of the device that stores a file.
//!
//! The statistics count the requests of all programs. Flushes are counted only for the whole disk,
//! not for a partition. Durable writes (FUA) are not counted; the kernel reports only whether the
//! device supports them.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// A disk with block statistics in the kernel.
#[derive(Debug)]
pub struct Device {
    folder: PathBuf,
}

/// Requests that reached the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceCounts {
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Flushes of the whole cache.
    pub flushes: u64,
}

impl DeviceCounts {
    /// The difference to `before`.
    pub fn since(self, before: Self) -> Self {
        Self {
            reads: self.reads.wrapping_sub(before.reads),
            writes: self.writes.wrapping_sub(before.writes),
            flushes: self.flushes.wrapping_sub(before.flushes),
        }
    }

    /// The sum of both.
    pub fn plus(self, other: Self) -> Self {
        Self {
            reads: self.reads + other.reads,
            writes: self.writes + other.writes,
            flushes: self.flushes + other.flushes,
        }
    }
}

impl Device {
    /// The disk that stores the file at a path; `None` if there is no single disk (tmpfs, a network
    /// file system, several disks).
    pub fn under(path: &Path) -> Option<Self> {
        let metadata = fs::metadata(path).ok()?;
        let number =
            if metadata.file_type().is_block_device() { metadata.rdev() } else { metadata.dev() };
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        let mut folder = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
        if folder.join("partition").exists() {
            folder.pop();
        }
        let device = Self { folder };
        device.read().map(|_| device)
    }

    /// The disk's name in /sys/block.
    pub fn name(&self) -> String {
        self.folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Whether the device supports FUA, in words; `None` if the kernel does not report it.
    pub fn fua(&self) -> Option<&'static str> {
        match fs::read_to_string(self.folder.join("queue/fua")).ok()?.trim() {
            "0" => Some("unsupported"),
            _ => Some("supported"),
        }
    }

    /// The current counters.
    pub fn read(&self) -> Option<DeviceCounts> {
        parse(&fs::read_to_string(self.folder.join("stat")).ok()?)
    }
}

/// Documentation/block/stat.rst: reads are the 1st field, writes the 5th, flushes the 16th.
fn parse(line: &str) -> Option<DeviceCounts> {
    let fields: Vec<u64> = line.split_whitespace().map_while(|field| field.parse().ok()).collect();
    let field = |number: usize| fields.get(number - 1).copied();
    Some(DeviceCounts { reads: field(1)?, writes: field(5)?, flushes: field(16)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_are_those_of_the_kernels_documentation() {
        let line = " 101 2 3 4 205 6 7 8 9 10 11 12 13 14 15 316 17\n";
        let counts = DeviceCounts { reads: 101, writes: 205, flushes: 316 };
        assert_eq!(parse(line), Some(counts));
        assert_eq!(parse("1 2 3 4 5 6 7 8 9 10 11"), None, "a kernel before 5.5");
    }
}
