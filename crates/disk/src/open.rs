//! How an image on the host is opened: which format, which cache mode, which lock; and new images.
//!
//! A format is never guessed from an image's content: a guest writes what it likes to the start of a
//! raw disk. The file's name decides unless the caller does, and an image that is opened as raw but
//! looks like something else is refused.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::str::FromStr;

use blockhouse_core::{Durability, Error, ErrorKind, Result, Storage};
use blockhouse_engine::{HostFile, OpenMode, PageCache};
use blockhouse_format::{ImageFormat, initial_file_size, probe};

use crate::publish::sync_folder;
use crate::{Access, DetectZeroes, Discard, FlushPolicy};

/// QEMU's cache modes: presets of page cache, default durability and flushes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheMode {
    /// Direct I/O; the guest flushes.
    #[default]
    None,
    /// Through the page cache; the guest flushes.
    Writeback,
    /// Through the page cache; every write is durable.
    Writethrough,
    /// Direct I/O; every write is durable.
    Directsync,
    /// Through the page cache; nothing is ever flushed.
    Unsafe,
}

impl CacheMode {
    /// All of them, as listed to users.
    pub const ALL: [Self; 5] =
        [Self::None, Self::Writeback, Self::Writethrough, Self::Directsync, Self::Unsafe];

    /// The name on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Writeback => "writeback",
            Self::Writethrough => "writethrough",
            Self::Directsync => "directsync",
            Self::Unsafe => "unsafe",
        }
    }

    pub(crate) fn page_cache(self) -> PageCache {
        match self {
            Self::None | Self::Directsync => PageCache::Bypassed,
            Self::Writeback | Self::Writethrough | Self::Unsafe => PageCache::Used,
        }
    }

    pub(crate) fn durability(self) -> Durability {
        match self {
            Self::Writethrough | Self::Directsync => Durability::Data,
            Self::None | Self::Writeback | Self::Unsafe => Durability::None,
        }
    }

    pub(crate) fn flush(self) -> FlushPolicy {
        match self {
            Self::Unsafe => FlushPolicy::Ignore,
            _ => FlushPolicy::Honor,
        }
    }
}

impl FromStr for CacheMode {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|mode| mode.as_str() == name);
        found.ok_or_else(|| {
            let names = Self::ALL.map(Self::as_str).join(", ");
            format!("there is no cache mode '{name}'; use one of {names}")
        })
    }
}

/// How an image is opened.
#[derive(Clone, Copy, Debug)]
pub struct ImageOptions {
    /// Its format; `None` goes by the name.
    pub format: Option<ImageFormat>,
    /// Whether it may be changed.
    pub access: Access,
    /// How the host's page cache is used.
    pub cache: CacheMode,
    /// What becomes of discards.
    pub discard: Discard,
    /// What becomes of writes of zeros.
    pub detect_zeroes: DetectZeroes,
    /// Whether other programs are kept away.
    pub locking: Locking,
}

impl Default for ImageOptions {
    /// The format by the name, read and write, direct I/O, discards passed on, zeros written, locked.
    fn default() -> Self {
        Self {
            format: None,
            access: Access::ReadWrite,
            cache: CacheMode::None,
            discard: Discard::Unmap,
            detect_zeroes: DetectZeroes::Off,
            locking: Locking::Held,
        }
    }
}

/// Whether an image is locked while it is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Locking {
    /// As long as it is open.
    Held,
    /// Not at all: for a quick look at an image that others may be using.
    None,
}

/// Makes a new image of `size` bytes, all holes, durably. Needs the loop of the current thread.
///
/// # Errors
/// One that names the file: the size is no multiple of 512, the file exists, or the host refuses.
/// A file that could not be finished is removed.
pub async fn create(path: &Path, size: u64, format: ImageFormat) -> Result<()> {
    check_new_name(path)?;
    if !size.is_multiple_of(512) {
        let what = format!("a disk of {size} bytes is no multiple of 512");
        return Err(Error::new(ErrorKind::InvalidInput, what).on(&path.display().to_string()));
    }
    let file = HostFile::create(path, initial_file_size(format, size), PageCache::Used)?;
    let finish = async {
        blockhouse_format::create(&file, format, size).await?;
        sync_folder(path)
    };
    finish.await.inspect_err(|_| {
        // The error that counts is the first one.
        let _ = std::fs::remove_file(path);
    })
}

/// Refuses the name of a new file in the folder of devices: it is a mistyped device, mostly, and the file
/// would take memory and be gone after a restart. File systems mounted below (`/dev/shm`) are none.
///
/// # Errors
/// `InvalidInput`.
pub fn check_new_name(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let devices = Path::new("/dev");
    let is_among_devices = || {
        let folder = folder.unwrap_or(Path::new(".")).canonicalize().ok()?;
        let is_one_file_system = folder.metadata().ok()?.dev() == devices.metadata().ok()?.dev();
        Some(folder.starts_with(devices) && is_one_file_system)
    };
    if !is_among_devices().unwrap_or(false) {
        return Ok(());
    }
    let what = "there is no such device, and a new file among the devices would be lost";
    Err(Error::new(ErrorKind::InvalidInput, what)
        .on(&path.display().to_string())
        .hint("check the name of the device, or choose a path outside /dev"))
}

/// Refuses a file that has the format `format` only by its name: it does not begin as one, or looks like
/// another one.
pub(crate) async fn check_not_misnamed(
    file: &HostFile,
    path: &Path,
    format: ImageFormat,
) -> Result<()> {
    let found = probe::probe_file(file, path).await?;
    let (what, hint) = match (format.has_signature(), found) {
        (true, Some(name)) if name == format.as_str() => return Ok(()),
        (false, None) => return Ok(()),
        (false, Some(name)) => (
            format!("would be opened as a {} image but looks like {name}", format.as_str()),
            advice_for(name, file.name()),
        ),
        (true, Some(name)) => (
            format!("is no {} image in spite of its name", format.as_str()),
            advice_for(name, file.name()),
        ),
        (true, None) => (
            format!("is no {} image in spite of its name", format.as_str()),
            format!(
                "if it was made as a raw image, say --format raw; if it was made as a {} image, its \
                 header is damaged: restore it from a copy",
                format.as_str()
            ),
        ),
    };
    Err(Error::new(ErrorKind::InvalidInput, what).on(file.name()).hint(hint))
}

/// What to do about an image that looks like the format `name`. A guest can write any bytes to its raw
/// disk, and an image of another format can name files of the host. So the advice is for those who know
/// how the image was made.
fn advice_for(name: &str, path: &str) -> String {
    let known = match name {
        "qcow2" => "if it was made as a qcow2 image, say --format qcow2".to_owned(),
        _ => format!(
            "the format {name} is not supported: if the image was made as one and is from a source \
             that you trust, 'qemu-img convert -f {name} -O qcow2 {path} NEW.qcow2' makes a qcow2 image \
             of it"
        ),
    };
    format!("{known}; if it is a raw disk whose guest wrote these bytes, say --format raw")
}

/// Refuses a file that is to stand behind an image as a raw one but looks like something else: the guest
/// would see the tables of that image instead of its disk.
///
/// # Errors
/// `InvalidInput` that names the file; what opening it answers. Needs the loop of the current thread.
pub async fn check_raw_backing(path: &Path) -> Result<()> {
    let file = HostFile::open(path, OpenMode::ReadOnly, PageCache::Used)?;
    let Some(name) = probe::probe(&file).await? else { return Ok(()) };
    let what = format!("is to be a raw backing file but looks like {name}");
    let hint = match name {
        "qcow2" => "the guest would see the tables of that image instead of its disk: name the format \
                    qcow2; if it is a raw disk whose guest wrote these bytes, 'rebase -u -F raw' stores \
                    that"
            .to_owned(),
        _ => format!(
            "the format {name} is not supported behind an image; if it is a raw disk whose guest wrote \
             these bytes, 'rebase -u -F raw' stores that"
        ),
    };
    Err(Error::new(ErrorKind::InvalidInput, what).on(file.name()).hint(hint))
}
