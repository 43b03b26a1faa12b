//! Finds open files and devices that hold the same bytes under different names.
//!
//! A loop device has the bytes of its file, a partition those of its disk, a device of LVM or RAID
//! those of the devices below, a file those of the device with its file system. A lock on one of
//! them is not seen through the others.
//!
//! Guarantees: an image that is opened for writing and locked has no other writer by another name,
//! and no mounted file system is on it ([`check_alone`]); a target shares no bytes with its sources
//! ([`check_apart`]). Each program first claims its own bytes, then looks for other claims. So if
//! two start at the same moment, at least one sees the other. The relations come from sysfs;
//! without it only the same file or device is detected.

use std::fs;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use blockhouse_core::{Error, ErrorKind, Result, Storage};
use blockhouse_engine::{HostFile, device_folder, device_user, is_in_use};
use blockhouse_storage::ImageStorage;
use rustix::fs::{Dev, FileType, Mode, OFlags, Stat, makedev};

use blockhouse_disk::{Access, ImageDisk, Layer};

/// Unit of offsets in sysfs.
const SECTOR: u64 = 512;

/// Maximum number of devices below a device. Only a kernel bug could make a loop of devices.
const MAX_PLACES: usize = 256;

/// A file or device, under any name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holder {
    File { device: Dev, inode: u64 },
    Device(Dev),
}

/// A range of a file or device that has bytes of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Place {
    holder: Holder,
    range: Range<u64>,
    /// Whether the range has these bytes of the image completely and in order. If false, the range
    /// has some of these bytes at unknown offsets.
    is_exact: bool,
    /// The path of the file or device; `None` if none is known.
    path: Option<PathBuf>,
}

impl Place {
    fn overlaps(&self, other: &Self) -> bool {
        self.holder == other.holder
            && (self.is_exact || other.is_exact)
            && self.range.start < other.range.end
            && other.range.start < self.range.end
    }
}

/// The holders of an open file's bytes: the file itself, and all files and devices below it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Places(Vec<Place>);

impl Places {
    /// For a file that is written. The device of its file system is left out: other files there
    /// have other bytes.
    fn of_written(file: BorrowedFd<'_>, name: &str) -> io::Result<Self> {
        let mut places = Self::default();
        places.add_status(&rustix::fs::fstat(file)?, Path::new(name));
        Ok(places)
    }

    /// For a file that is read. The device of its file system is included: writes to it would
    /// destroy the file.
    fn of_read(file: BorrowedFd<'_>, name: &str) -> io::Result<Self> {
        let mut places = Self::of_written(file, name)?;
        let status = rustix::fs::fstat(file)?;
        let is_on_device = device_folder(status.st_dev).exists();
        if FileType::from_raw_mode(status.st_mode) == FileType::RegularFile && is_on_device {
            places.add_device(status.st_dev, 0..u64::MAX, false);
        }
        Ok(places)
    }

    fn of_device(device: Dev) -> Self {
        let mut places = Self::default();
        places.add_device(device, 0..u64::MAX, true);
        places
    }

    fn add_status(&mut self, status: &Stat, path: &Path) {
        let (range, path) = (0..u64::MAX, Some(path.to_owned()));
        match FileType::from_raw_mode(status.st_mode) {
            FileType::RegularFile => {
                let holder = Holder::File { device: status.st_dev, inode: status.st_ino };
                self.0.push(Place { holder, range, is_exact: true, path });
            }
            FileType::BlockDevice => self.add_device(status.st_rdev, range, true),
            _ => {}
        }
    }

    fn add_device(&mut self, device: Dev, range: Range<u64>, is_exact: bool) {
        let folder = device_folder(device);
        let node = folder.canonicalize().ok().and_then(|folder| {
            Some(Path::new("/dev").join(folder.file_name()?.to_string_lossy().replace('!', "/")))
        });
        let place =
            Place { holder: Holder::Device(device), range: range.clone(), is_exact, path: node };
        if self.0.len() >= MAX_PLACES || self.0.contains(&place) {
            return;
        }
        self.0.push(place);
        if folder.join("partition").exists() {
            let (start, size) = (number(&folder, "start"), number(&folder, "size"));
            if let (Some(start), Some(size), Some(disk)) =
                (start, size, device_of(&folder.join("..")))
            {
                let window = start.saturating_mul(SECTOR)..(start + size).saturating_mul(SECTOR);
                self.add_device(disk, shifted(&range, &window), is_exact);
            }
        }
        if let Ok(file) = fs::read_to_string(folder.join("loop/backing_file")) {
            let offset = number(&folder, "loop/offset").unwrap_or(0);
            let end = match number(&folder, "loop/sizelimit") {
                None | Some(0) => u64::MAX,
                Some(limit) => offset.saturating_add(limit),
            };
            self.add_file(
                Path::new(file.trim_end_matches('\n')),
                shifted(&range, &(offset..end)),
                is_exact,
            );
        }
        for below in fs::read_dir(folder.join("slaves")).into_iter().flatten().flatten() {
            if let Some(below) = device_of(&below.path()) {
                self.add_device(below, 0..u64::MAX, false);
            }
        }
    }

    /// Adds the file or device of a loop device. A file that was removed, or is in another mount
    /// namespace, is not found.
    fn add_file(&mut self, path: &Path, range: Range<u64>, is_exact: bool) {
        let Ok(found) = fs::metadata(path) else { return };
        if found.file_type().is_block_device() {
            return self.add_device(found.rdev(), range, is_exact);
        }
        let holder = Holder::File { device: found.dev(), inode: found.ino() };
        self.0.push(Place { holder, range, is_exact, path: Some(path.to_owned()) });
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.0.iter().any(|one| other.0.iter().any(|other| one.overlaps(other)))
    }

    fn has_device(&self, device: Dev) -> bool {
        self.0.iter().any(|place| place.holder == Holder::Device(device))
    }
}

/// Translates a range of a device to the file or device below, of which the device is the range
/// `window`.
fn shifted(range: &Range<u64>, window: &Range<u64>) -> Range<u64> {
    let shift = |offset: u64| window.start.saturating_add(offset).min(window.end);
    shift(range.start)..shift(range.end)
}

fn number(folder: &Path, name: &str) -> Option<u64> {
    fs::read_to_string(folder.join(name)).ok()?.trim().parse().ok()
}

/// The device with this folder in sysfs.
fn device_of(folder: &Path) -> Option<Dev> {
    let text = fs::read_to_string(folder.join("dev")).ok()?;
    let (major, minor) = text.trim().split_once(':')?;
    Some(makedev(major.parse().ok()?, minor.parse().ok()?))
}

fn failed(name: &str) -> impl Fn(io::Error) -> Error {
    move |error| Error::host("cannot examine", error).on(name)
}

/// Refuses an open, locked image that another program uses under another name. `check_below` checks
/// the locks of one file below a loop device. If the image is open for writing, loop devices above
/// it are checked, too.
///
/// # Errors
/// [`ErrorKind::Locked`], with both names; the host's.
pub(crate) fn check_alone(
    file: &HostFile,
    access: Access,
    check_below: impl Fn(BorrowedFd<'_>, &str) -> Result<()>,
) -> Result<()> {
    let name = file.name();
    let places = Places::of_written(file.descriptor(), name).map_err(failed(name))?;
    for place in places.0.iter().skip(1) {
        if let (Holder::File { .. }, Some(path)) = (place.holder, &place.path)
            && let Some(below) = open_below(place.holder, path)
        {
            check_below(below.as_fd(), &path.to_string_lossy())?;
        }
    }
    match access {
        Access::ReadOnly => Ok(()),
        Access::ReadWrite => check_above(name, &places),
    }
}

/// Opens a file below a device, to read its locks. If it cannot be opened, no locks are found.
fn open_below(holder: Holder, path: &Path) -> Option<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).ok()?;
    let found = Places::of_written(file.as_fd(), "").ok()?;
    let is_it = found.0.first().is_some_and(|place| place.holder == holder);
    is_it.then_some(file)
}

/// Fails if a loop device over the bytes of `name` is in use: it is mounted, part of another
/// device, or open exclusively.
fn check_above(name: &str, places: &Places) -> Result<()> {
    let devices = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    for device in devices {
        let folder = device.path();
        if !folder.join("loop/backing_file").exists() {
            continue;
        }
        let Some(number) = device_of(&folder) else { continue };
        if places.has_device(number) || !Places::of_device(number).overlaps(places) {
            continue;
        }
        let user = device_user(number)
            .or_else(|| is_in_use(number).then(|| "a program has it open exclusively".to_owned()));
        if let Some(user) = user {
            let device = device.file_name();
            let device = device.display();
            let what = format!("/dev/{device} has the same bytes, and is in use: {user}");
            return Err(Error::new(ErrorKind::Locked, what).on(name).hint(format!(
                "unmount it, or stop its user, and detach it first (losetup -d /dev/{device})"
            )));
        }
    }
    Ok(())
}

/// Refuses a target that shares bytes with its source, or with a backing file of it: writing would
/// destroy data not yet read. Images on other servers are protected by their servers' locks.
///
/// # Errors
/// `InvalidInput`, with both names; the host's.
pub fn check_apart(target: &ImageDisk, source: &ImageDisk) -> Result<()> {
    let mut read = source.image().layer().layers().flat_map(files_of_layer);
    read.try_for_each(|file| check_apart_from(target, file.descriptor(), file.name()))
}

/// As [`check_apart`], for the file or device that a new image of this name would overwrite, and a
/// source or the backing file of the new image.
///
/// # Errors
/// As [`check_apart`].
pub fn check_new_apart(image: &Path, source: &ImageDisk) -> Result<()> {
    let mut read = source.image().layer().layers().flat_map(files_of_layer);
    read.try_for_each(|file| check_new_apart_from(image, file.descriptor(), file.name()))
}

/// As [`check_new_apart`], for one open file, called `name` in messages.
///
/// # Errors
/// As [`check_apart`].
pub fn check_new_apart_from(image: &Path, source: BorrowedFd<'_>, name: &str) -> Result<()> {
    let Ok(status) = rustix::fs::stat(image) else { return Ok(()) };
    let mut places = Places::default();
    places.add_status(&status, image);
    let read = Places::of_read(source, name).map_err(failed(name))?;
    if places.overlaps(&read) {
        return Err(shared(&image.display().to_string(), name));
    }
    Ok(())
}

/// The error for a target that has bytes of a file that will be read.
fn shared(target: &str, read: &str) -> Error {
    let what = format!("has bytes of {read}, which is still to be read: nothing was written");
    Error::new(ErrorKind::InvalidInput, what).on(target).hint(
        "choose a target that is no other name of the source or backing file, nor a file behind it",
    )
}

/// The files of one image of a chain, with its data file; none for an image on another server.
pub fn files_of_layer(layer: &Layer<ImageStorage>) -> impl Iterator<Item = &HostFile> {
    let format = layer.format();
    [format.storage(), format.data()].into_iter().flat_map(|one| one.storage().files())
}

/// As [`check_apart`], for one open file, called `name` in messages.
///
/// # Errors
/// As [`check_apart`].
pub fn check_apart_from(target: &ImageDisk, source: BorrowedFd<'_>, name: &str) -> Result<()> {
    let read = Places::of_read(source, name).map_err(failed(name))?;
    for file in files_of_layer(target.image().layer()) {
        let places =
            Places::of_written(file.descriptor(), file.name()).map_err(failed(file.name()))?;
        if places.overlaps(&read) {
            return Err(shared(file.name(), name));
        }
    }
    Ok(())
}
