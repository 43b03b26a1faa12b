//! The identity of a file, and of a boot of the host.
//!
//! The kernel reuses the inode number of a removed file, and the device number of a removed disk.
//! So the identity includes a *birth*. The birth of a file is the time at which the file was made,
//! if the file system records that time. The birth of a block device is the number that the kernel
//! gives to only one disk in a boot (`diskseq`, Linux 5.15).
//!
//! When the kernel forgets a file, some file systems on FUSE (sshfs) give the file another inode
//! number, and its number to another file. These file systems record no births. So an identity that
//! outlives the file's opening has a hash of the file's path in place of the birth there.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{AtFlags, FileType, StatxFlags, fstat, fstatfs, major, minor, statx};

/// `FUSE_SUPER_MAGIC` (`statfs(2)`).
const FUSE: u64 = 0x6573_5546;

/// The identity of an image's file under any name. Equal for the same file in the same boot of the
/// host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageIdentity {
    /// The device of the file system that has the file, or the block device itself.
    pub device: u64,
    /// 0 for a block device.
    pub inode: u64,
    /// 0 if the birth is unknown.
    pub birth: u64,
}

impl ImageIdentity {
    /// # Errors
    /// The kernel's.
    pub fn of(file: BorrowedFd<'_>) -> io::Result<Self> {
        let status = fstat(file)?;
        if FileType::from_raw_mode(status.st_mode) == FileType::BlockDevice {
            let birth = disk_sequence(status.st_rdev).unwrap_or(0);
            return Ok(Self { device: status.st_rdev, inode: 0, birth });
        }
        let birth = birth_time(file).unwrap_or(0);
        Ok(Self { device: status.st_dev, inode: status.st_ino, birth })
    }

    /// As [`of`](Self::of), for a file that may be closed and opened again: on FUSE, a file of
    /// unknown birth is another one under another path.
    ///
    /// # Errors
    /// The kernel's.
    pub fn lasting(file: BorrowedFd<'_>) -> io::Result<Self> {
        let identity = Self::of(file)?;
        if !identity.may_change(file)? {
            return Ok(identity);
        }
        let path = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
        Ok(Self { birth: fnv(path.as_os_str().as_bytes()), ..identity })
    }

    /// Whether the file may have another inode number when it is opened the next time.
    ///
    /// # Errors
    /// The kernel's.
    pub fn may_change(self, file: BorrowedFd<'_>) -> io::Result<bool> {
        Ok(self.inode != 0 && self.birth == 0 && is_on_fuse(file)?)
    }

    /// The name of the image's state file.
    pub(crate) fn file_name(self) -> String {
        format!("{:x}-{:x}", self.device, self.inode)
    }
}

/// The 64-bit hash of these bytes (FNV-1a), which is the same in every version of this program.
pub fn fnv(bytes: &[u8]) -> u64 {
    const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x100_0000_01b3;
    bytes.iter().fold(BASIS, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(PRIME))
}

/// Whether a file is on FUSE.
pub fn is_on_fuse(file: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(fstatfs(file)?.f_type as u64 == FUSE)
}

/// The time at which a file was made, in nanoseconds since the Unix epoch.
fn birth_time(file: BorrowedFd<'_>) -> Option<u64> {
    let status = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::BTIME).ok()?;
    let has_birth = status.stx_mask & StatxFlags::BTIME.bits() != 0;
    let birth = status.stx_btime;
    has_birth.then(|| {
        (birth.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(birth.tv_nsec.into())
    })
}

/// The sequence number of a block device, or of the disk of which it is a partition.
fn disk_sequence(device: u64) -> Option<u64> {
    let folder = format!("/sys/dev/block/{}:{}", major(device), minor(device));
    let read = |name: &str| fs::read_to_string(format!("{folder}/{name}")).ok();
    // In sysfs, the folder of a partition is in the folder of its disk.
    let text = read("diskseq").or_else(|| read("../diskseq"))?;
    text.trim().parse().ok()
}

/// The identity of a boot of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BootId(u128);

impl BootId {
    /// # Errors
    /// If the host does not provide the ID (no `/proc`).
    pub fn current() -> io::Result<Self> {
        let text = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        Self::parse(&text).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no boot id"))
    }

    fn parse(text: &str) -> Option<Self> {
        let digits: String = text.trim().chars().filter(|&digit| digit != '-').collect();
        let has_all = digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        has_all.then(|| u128::from_str_radix(&digits, 16).ok().map(Self))?
    }

    /// The ID as two words, the low half first.
    pub(super) fn words(self) -> [u64; 2] {
        [self.0 as u64, (self.0 >> 64) as u64]
    }

    /// The id as bytes.
    pub fn to_bytes(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }

    pub(super) fn of_words([low, high]: [u64; 2]) -> Self {
        Self(u128::from(high) << 64 | u128::from(low))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_boot_is_known_by_its_id() {
        let boot = BootId::current().expect("a host with /proc");
        assert_eq!(boot, BootId::current().expect("again"));
        assert_eq!(boot, BootId::of_words(boot.words()));
        let text = "01234567-89ab-cdef-0123-456789abcdef\n";
        assert_eq!(BootId::parse(text), Some(BootId(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef)));
        for wrong in ["", "01234567", "+1234567-89ab-cdef-0123-456789abcdef"] {
            assert_eq!(BootId::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_file_that_replaced_another_is_another_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("disk.img");
        let identity = || {
            let file = fs::File::create(&path).expect("a file");
            ImageIdentity::of(file.as_fd()).expect("it can be examined")
        };
        let first = identity();
        assert_eq!(first, identity(), "opened again");
        fs::remove_file(&path).expect("it is there");
        // The resolution of birth times is some milliseconds.
        std::thread::sleep(std::time::Duration::from_millis(50));
        let second = identity();
        assert!(first != second || first.birth == 0, "{first:?} {second:?}");
    }
}
