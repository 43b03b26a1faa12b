//! The identity of a raw disk on any storage, and the evidence of changes to it, for the file that
//! has its bitmaps (`side_file`).
//!
//! | disk | identity, besides its size | evidence of changes without its bitmaps |
//! | --- | --- | --- |
//! | a file | inode and birth | its time of change |
//! | a block device | its driver's id | the kernel's count of bytes written |
//! | an image in Ceph | pool, namespace and the image's id there | none |
//! | an export of an NBD server | its name | none |
//!
//! The driver's id of a device is the id of LVM, RAID or multipath, the serial number, the disk,
//! number and start of a partition, or the file of a loop device. Without any of these it is the
//! device's number in this boot of the host (`diskseq`). The kernel's count restarts when the host
//! restarts or the device is attached anew.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use blockhouse_core::{Error, ErrorKind, Result, Storage};
use blockhouse_engine::{DeviceWrites, FileKind, HostFile, device_folder};
use blockhouse_storage::ImageStorage;

use crate::restore::{Clock, change_time, clock_of, identity_of, status_of};

/// The identity and state of a raw disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Volume {
    pub(crate) identity: [u8; 16],
    pub(crate) size: u64,
    /// The current state, as far as it can be determined.
    pub(crate) seen: Seen,
}

/// The evidence of changes to a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// The time of the last change.
    Time(Duration),
    /// The amount that was written to the device ([`DeviceWrites`]).
    Writes(Duration),
    /// There is no evidence.
    Unknown,
}

impl Volume {
    /// # Errors
    /// Errors of the host or cluster; `Unsupported` for a storage that is not a single disk.
    pub(crate) async fn of(storage: &ImageStorage) -> Result<Self> {
        let size = storage.size();
        let (identity, seen) = match storage {
            ImageStorage::File(file) => (identity_of_file(file)?, seen_of_file(file).await?),
            ImageStorage::Nbd(nbd) => (hash(&["nbd", nbd.export_name()]), Seen::Unknown),
            ImageStorage::Rbd(rbd) => (hash(&["rbd", &rbd.id().await?]), Seen::Unknown),
            ImageStorage::Concat(_) | ImageStorage::View(_) | ImageStorage::Null(_) => {
                let what = "is no volume that can have bitmaps beside it";
                return Err(Error::new(ErrorKind::Unsupported, what).on(storage.name()));
            }
        };
        Ok(Self { identity, size, seen })
    }

    /// As [`of`](Self::of), of a file or block device.
    pub(crate) async fn of_file(file: &HostFile) -> Result<Self> {
        let (identity, seen) = (identity_of_file(file)?, seen_of_file(file).await?);
        Ok(Self { identity, size: file.size(), seen })
    }
}

/// Compares the state that the disk's side file recorded when it was closed (`noted`) with the
/// state now (`seen`).
pub(crate) fn told_by_close(noted: Duration, seen: Seen) -> Told {
    match seen {
        Seen::Time(now) => Told::of(now == noted),
        Seen::Writes(now) if !DeviceWrites::is_same_era_of_times(now, noted) => Told::Nothing,
        Seen::Writes(now) => Told::of(now == noted),
        Seen::Unknown => Told::Nothing,
    }
}

/// Compares counts of a device whose server was killed. `sent` is the amount that the server had
/// sent, or was about to, as a word of [`DeviceWrites`]; 0 if unknown. `now` is the amount written
/// to the device.
pub(crate) fn told_by_count(sent: u64, now: u64) -> Told {
    if sent != 0 && DeviceWrites::is_same_era(sent, now) {
        Told::of(now <= sent)
    } else {
        Told::Nothing
    }
}

/// The verdict about other programs' changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    /// No other program has changed the disk.
    Unchanged,
    /// Another program has changed the disk.
    Changed,
    /// There is no evidence: another program may have changed the disk.
    Nothing,
}

impl Told {
    pub(crate) fn of(is_unchanged: bool) -> Self {
        if is_unchanged { Self::Unchanged } else { Self::Changed }
    }
}

async fn seen_of_file(file: &HostFile) -> Result<Seen> {
    Ok(match file.kind() {
        FileKind::Regular if clock_of(file)? == Clock::ThisHost => {
            Seen::Time(change_time(&status_of(file)?))
        }
        FileKind::Regular => Seen::Unknown,
        FileKind::BlockDevice => {
            let writes = file.device_writes().await?;
            writes.map_or(Seen::Unknown, |writes| Seen::Writes(writes.to_time()))
        }
    })
}

/// The identity of an image's file, for its side file. The device number is not part of it, because
/// that may differ after a restart of the host.
///
/// # Errors
/// The host's.
pub(crate) fn identity(file: &HostFile) -> Result<[u8; 16]> {
    let identity = identity_of(file)?;
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&identity.inode.to_be_bytes());
    bytes[8..].copy_from_slice(&identity.birth.to_be_bytes());
    Ok(bytes)
}

fn identity_of_file(file: &HostFile) -> Result<[u8; 16]> {
    if file.kind() == FileKind::Regular {
        return identity(file);
    }
    let device = status_of(file)?.st_rdev;
    let folder = device_folder(device);
    let id = device_id(&folder).ok_or_else(|| {
        let what = "nothing tells which device it is: its driver has no id of it, and the kernel no number";
        Error::new(ErrorKind::Unsupported, what).on(file.name())
    })?;
    Ok(hash(&["device", &id]))
}

/// The name of a block device, independent of its device number: the most stable identifier that
/// exists.
fn device_id(folder: &Path) -> Option<String> {
    let read = |name: &str| {
        let text = fs::read_to_string(folder.join(name)).ok()?;
        let text = text.trim().to_owned();
        (!text.is_empty()).then_some(text)
    };
    if let Some(number) = read("partition") {
        let disk = device_id(folder.canonicalize().ok()?.parent()?)?;
        return Some(format!("{disk} partition {number} at {}", read("start")?));
    }
    if let Some(file) = read("loop/backing_file") {
        let found = fs::metadata(&file).ok()?;
        let offset = read("loop/offset").unwrap_or_default();
        return Some(format!("loop {} {} {offset}", found.dev(), found.ino()));
    }
    for name in ["dm/uuid", "md/uuid", "wwid", "device/wwid", "uuid", "serial", "device/serial"] {
        if let Some(id) = read(name) {
            return Some(format!("{name} {id}"));
        }
    }
    // `diskseq` is unique in this boot of the host.
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(format!("boot {} disk {}", boot.trim(), read("diskseq")?))
}

/// FNV-1a of 128 bits.
fn hash(parts: &[&str]) -> [u8; 16] {
    const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let bytes = parts.iter().flat_map(|part| part.bytes().chain([0]));
    let hash = bytes.fold(BASIS, |hash, byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME));
    hash.to_be_bytes()
}

#[cfg(test)]
mod histories;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_known_by_the_best_word_that_its_driver_has() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let id = || device_id(folder.path());
        assert_eq!(id(), None, "nothing tells");
        write("diskseq", "7\n");
        let numbered = id().expect("it has a number");
        assert!(numbered.starts_with("boot ") && numbered.ends_with(" disk 7"), "{numbered}");
        write("serial", "\n");
        assert_eq!(id().as_ref(), Some(&numbered), "an empty serial number");
        write("serial", "volume-1\n");
        assert_eq!(id().as_deref(), Some("serial volume-1"));
        write("dm/uuid", "LVM-abc\n");
        assert_eq!(id().as_deref(), Some("dm/uuid LVM-abc"));
        write("part/partition", "3\n");
        write("part/start", "2048\n");
        let part = device_id(&folder.path().join("part"));
        assert_eq!(part.as_deref(), Some("dm/uuid LVM-abc partition 3 at 2048"));
    }

    #[test]
    fn other_words_are_another_volume() {
        assert_eq!(hash(&["nbd", "a"]), hash(&["nbd", "a"]));
        for other in [["nbd", "b"], ["nb", "da"], ["nbda", ""]] {
            assert_ne!(hash(&["nbd", "a"]), hash(&other));
        }
    }

    #[test]
    fn times_and_counts_tell_and_another_era_tells_nothing() {
        let [one, two] = [1, 2].map(Duration::from_secs);
        assert_eq!(told_by_close(one, Seen::Time(one)), Told::Unchanged);
        assert_eq!(told_by_close(one, Seen::Time(two)), Told::Changed);
        assert_eq!(told_by_close(one, Seen::Writes(one)), Told::Unchanged);
        assert_eq!(told_by_close(one, Seen::Writes(two)), Told::Changed);
        let later = Duration::new(1 << 50, 7);
        assert_eq!(told_by_close(one, Seen::Writes(later)), Told::Nothing);
        assert_eq!(told_by_close(one, Seen::Unknown), Told::Nothing);
    }
}
