//! An image in a format that is only read (VDI, VHD, VHDX or VMDK): the functions that the rest of
//! the crate calls.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use blockhouse_core::sync::{Coalescer, Turn};
use blockhouse_core::{ByteRange, Error, ErrorKind, Extent, ExtentState, Result, Storage, rare};

use super::overlap::Survey;
use super::piece::Piece;
use super::refusal::corrupt;
use super::tables::{PageCache, Tables};
use super::vdi::Vdi;
use super::vhdx::Vhdx;
use super::vmdk::{Vmdk, VmdkFacts, grain};
use super::vpc::Vpc;
use crate::{Backing, CacheCounts, CheckReport, Intent};

/// The maximum number of pieces that are merged into one extent.
const MAX_PIECES: usize = 256;

/// The formats that are only read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForeignKind {
    /// VirtualBox.
    Vdi,
    /// VHD, of Virtual PC and Hyper-V.
    Vpc,
    /// Hyper-V's newer format.
    Vhdx,
    /// VMware.
    Vmdk,
}

impl ForeignKind {
    /// All formats that are only read.
    pub const ALL: [Self; 4] = [Self::Vdi, Self::Vpc, Self::Vhdx, Self::Vmdk];

    /// The format with this name, or whose files have this suffix.
    pub fn by_name(name: &str) -> Option<Self> {
        let name = if name == "vhd" { "vpc" } else { name };
        Self::ALL.into_iter().find(|kind| kind.as_str() == name)
    }

    /// The name on the command line and in images, as in QEMU.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Vdi => "vdi",
            Self::Vpc => "vpc",
            Self::Vhdx => "vhdx",
            Self::Vmdk => "vmdk",
        }
    }
}

/// Replays the log of the VHDX image in `storage` into the file, and empties the log. No other
/// program may have the image open. `write_id` is a new random GUID. Returns whether there was a
/// log.
///
/// # Errors
/// As [`Foreign::open`]; `NoSpace`; errors of the storage. After an error the log is still in the
/// file.
pub async fn replay_vhdx_log<S: Storage>(storage: &S, write_id: [u8; 16]) -> Result<bool> {
    Vhdx::repair(storage, write_id).await.map_err(|error| error.on(storage.name()))
}

/// An image of another program's format, for reading.
pub struct Foreign<S: Storage> {
    storage: S,
    /// The storage with all files that a VMDK descriptor names; `None` if `storage` has the data.
    data: Option<S>,
    cache: PageCache,
    mapping: Mapping,
    /// Whether the check for blocks that share data is done: it found no such blocks, or could not
    /// run.
    is_surveyed: AtomicBool,
    /// The check, which runs once for all lookups that wait for it, because it needs much memory.
    surveys: Coalescer<()>,
    /// The blocks that share data, if the check found some.
    shared: OnceLock<Error>,
}

/// The locations of the bytes of the disk.
enum Mapping {
    Vdi(Vdi),
    Vpc(Vpc),
    Vhdx(Box<Vhdx>),
    Vmdk(Vmdk),
}

impl<S: Storage> Foreign<S> {
    /// Reads the image's header.
    ///
    /// # Errors
    /// `Corrupt` or `Unsupported`, with the offset of the fault; or errors of the storage.
    pub async fn open(storage: S, kind: ForeignKind) -> Result<Self> {
        let mapping = match kind {
            ForeignKind::Vdi => Vdi::open(&storage).await.map(Mapping::Vdi),
            ForeignKind::Vpc => Vpc::open(&storage).await.map(Mapping::Vpc),
            ForeignKind::Vhdx => {
                Vhdx::open(&storage).await.map(|vhdx| Mapping::Vhdx(Box::new(vhdx)))
            }
            ForeignKind::Vmdk => Vmdk::open(&storage).await.map(Mapping::Vmdk),
        };
        let mapping = mapping.map_err(|error| error.on(storage.name()))?;
        let (cache, is_surveyed) = (PageCache::default(), AtomicBool::new(false));
        let (surveys, shared) = (Coalescer::new(()), OnceLock::new());
        Ok(Self { storage, data: None, cache, mapping, is_surveyed, surveys, shared })
    }

    /// The format of the image.
    pub fn kind(&self) -> ForeignKind {
        match self.mapping {
            Mapping::Vdi(_) => ForeignKind::Vdi,
            Mapping::Vpc(_) => ForeignKind::Vpc,
            Mapping::Vhdx(_) => ForeignKind::Vhdx,
            Mapping::Vmdk(_) => ForeignKind::Vmdk,
        }
    }

    /// The size of the disk in bytes, a multiple of 512.
    pub fn size(&self) -> u64 {
        match &self.mapping {
            Mapping::Vdi(vdi) => vdi.size(),
            Mapping::Vpc(vpc) => vpc.size(),
            Mapping::Vhdx(vhdx) => vhdx.size(),
            Mapping::Vmdk(vmdk) => vmdk.size(),
        }
    }

    /// Size of an allocation unit in bytes, a power of two; `None` if the image has none, such as a
    /// fixed VHD or a flat VMDK, or if the files of a VMDK are not attached yet.
    pub fn cluster_size(&self) -> Option<u64> {
        match &self.mapping {
            Mapping::Vdi(vdi) => Some(vdi.block_size()),
            Mapping::Vpc(vpc) => vpc.block_size(),
            Mapping::Vhdx(vhdx) => Some(vhdx.block_size()),
            Mapping::Vmdk(vmdk) => vmdk.grain_size(),
        }
    }

    /// Logical sector size of the guest's disk in bytes. The disk's partition table counts in such
    /// sectors.
    pub fn sector_size(&self) -> u64 {
        match &self.mapping {
            Mapping::Vhdx(vhdx) => vhdx.sector_size(),
            Mapping::Vdi(_) | Mapping::Vpc(_) | Mapping::Vmdk(_) => 512,
        }
    }

    /// The image file, or the descriptor of an image whose data is in other files.
    pub fn storage(&self) -> &S {
        &self.storage
    }

    /// The storage that the host offsets of mapped extents refer to: the image file itself, or the
    /// [files](Self::extent_files) that it names.
    pub(crate) fn data(&self) -> &S {
        self.data.as_ref().unwrap_or(&self.storage)
    }

    /// The names of the files with the disk's data, as bytes of the host's file system, relative to
    /// the image's folder; empty if the image is one file.
    pub fn extent_files(&self) -> &[Vec<u8>] {
        match &self.mapping {
            Mapping::Vmdk(vmdk) => vmdk.files(),
            Mapping::Vdi(_) | Mapping::Vpc(_) | Mapping::Vhdx(_) => &[],
        }
    }

    /// The backing file: the parent of a VMDK image, from which ranges are read that this image has
    /// not allocated.
    pub fn backing(&self) -> Option<&Backing> {
        match &self.mapping {
            Mapping::Vmdk(vmdk) => vmdk.parent(),
            Mapping::Vdi(_) | Mapping::Vpc(_) | Mapping::Vhdx(_) => None,
        }
    }

    /// Checks that `backing` can be the parent of this VMDK image: it must be a VMDK image with the
    /// CID that this image recorded. Other formats have no parent and are not checked.
    ///
    /// # Errors
    /// `Corrupt` if the parent was changed since this image was made, `InvalidInput` if the parent
    /// has another format.
    pub(crate) fn check_backing(&self, backing: Option<&Self>) -> Result<()> {
        let Mapping::Vmdk(vmdk) = &self.mapping else { return Ok(()) };
        let parent = match backing.map(|backing| &backing.mapping) {
            Some(Mapping::Vmdk(parent)) => Some(parent),
            _ => None,
        };
        vmdk.check_parent(parent).map_err(|error| error.on(self.storage.name()))
    }

    /// The descriptor of a VMDK image.
    pub fn vmdk_facts(&self) -> Option<VmdkFacts> {
        match &self.mapping {
            Mapping::Vmdk(vmdk) => Some(vmdk.facts()),
            Mapping::Vdi(_) | Mapping::Vpc(_) | Mapping::Vhdx(_) => None,
        }
    }

    /// Attaches the [files](Self::extent_files) that the image names: `data` contains the files one
    /// after the other, each in its range of `ranges`, in the order of their names. Must be called
    /// before any read.
    ///
    /// # Errors
    /// `InvalidInput` if the image names no files, or another number of files; otherwise as
    /// [`open`](Self::open).
    pub(crate) async fn with_extents(mut self, data: S, ranges: &[ByteRange]) -> Result<Self> {
        let opened = match &mut self.mapping {
            Mapping::Vmdk(vmdk) if vmdk.files().len() == ranges.len() => {
                vmdk.open_extents(&data, ranges).await
            }
            _ => Err(Error::new(ErrorKind::InvalidInput, "names another number of files")),
        };
        opened.map_err(|error| error.on(self.storage.name()))?;
        self.data = Some(data);
        Ok(self)
    }

    /// Decompresses the first bytes of a unit into `into`.
    ///
    /// # Errors
    /// The reason why the bytes are not a compressed unit of this image.
    pub(crate) fn decompress(&self, compressed: &[u8], into: &mut [u8]) -> Result<(), String> {
        match &self.mapping {
            Mapping::Vmdk(_) => grain::decompress(compressed, into),
            _ => Err("the format has no compressed units".to_owned()),
        }
    }

    /// Counts of metadata lookups since the image was opened.
    pub(crate) fn cache_counts(&self) -> CacheCounts {
        self.cache.counts()
    }

    /// Looks up the first bytes of `range`, which is not empty and lies inside the disk.
    ///
    /// # Errors
    /// `ReadOnly` for an intent that changes anything; `Corrupt` with the offset of the fault, or
    /// for an extent from a block if any two blocks share data; errors of the storage.
    pub(crate) async fn map(&self, range: ByteRange, intent: Intent) -> Result<Extent> {
        if intent != Intent::Read {
            return Err(self.read_only());
        }
        let found = async {
            let extent = self.find(range).await?;
            if !self.is_surveyed.load(Ordering::Relaxed) && self.is_from_block(extent.state) {
                rare(self.check_apart()).await?;
            }
            Ok::<_, Error>(extent)
        };
        found.await.map_err(|error| error.on(self.storage.name()))
    }

    /// Whether the content or the state of an extent comes from a block of the file. Two entries
    /// may refer to the same block. In a VHD image, the bitmap of a block states which sectors are
    /// zeros.
    fn is_from_block(&self, state: ExtentState) -> bool {
        match state {
            ExtentState::Mapped { .. } | ExtentState::Compressed { .. } => true,
            ExtentState::Hole | ExtentState::Zero | ExtentState::Backing => {
                matches!(self.mapping, Mapping::Vpc(_))
            }
        }
    }

    async fn find(&self, range: ByteRange) -> Result<Extent> {
        let mut piece = self.piece(range).await?;
        if piece.unit.is_none() {
            for _ in 1..MAX_PIECES {
                let rest = range.skip(piece.length);
                if rest.is_empty() {
                    break;
                }
                // An error here only ends the extent; the read that reaches the damaged piece
                // reports the error.
                match self.piece(rest).await {
                    Ok(next) if piece.continues_as(&next) => piece.length += next.length,
                    _ => break,
                }
            }
        }
        Ok(piece.extent(range))
    }

    /// Looks up the first piece of `range`. Fails if its data lies past the end of the file.
    async fn piece(&self, range: ByteRange) -> Result<Piece> {
        let (tables, at) = (self.tables(), range.offset());
        let piece = match &self.mapping {
            Mapping::Vdi(vdi) => vdi.piece(&tables, at).await?,
            Mapping::Vpc(vpc) => vpc.piece(&tables, at).await?,
            Mapping::Vhdx(vhdx) => vhdx.piece(&tables, at).await?,
            Mapping::Vmdk(vmdk) => vmdk.piece(&tables, at).await?,
        };
        let length = piece.length.min(range.length());
        let size = self.data().size();
        if let ExtentState::Mapped { host } = piece.state
            && host.checked_add(length).is_none_or(|end| end > size)
        {
            let what = format!(
                "the data of the disk's offset {at} lies past the end of the file ({size} bytes)"
            );
            return Err(corrupt(what, host));
        }
        Ok(Piece { length, ..piece })
    }

    /// Checks the image's tables for errors.
    ///
    /// # Errors
    /// Errors of the storage; `Unsupported` for more blocks than can be counted.
    pub(crate) async fn check(&self) -> Result<Option<CheckReport>> {
        let survey = rare(self.survey()).await.map_err(|error| error.on(self.storage.name()))?;
        match survey {
            Some(survey) => Ok(Some(rare(survey.finish()).await)),
            None => Ok(None),
        }
    }

    async fn survey(&self) -> Result<Option<Survey>> {
        let (tables, size) = (self.tables(), self.data().size());
        match &self.mapping {
            Mapping::Vdi(vdi) => vdi.survey(&tables, size).await.map(Some),
            Mapping::Vpc(vpc) => vpc.survey(&tables).await,
            Mapping::Vhdx(vhdx) => vhdx.survey(&tables, size).await.map(Some),
            Mapping::Vmdk(vmdk) => vmdk.survey(&tables).await,
        }
    }

    /// Refuses an image in which two blocks share data. Some programs write such tables, and no
    /// entry by itself looks wrong. The check runs when a lookup finds a block for the first time.
    /// Reason: the check reads all tables, and ranges without a block do not depend on it. If the
    /// survey itself fails (too many blocks, or a read error), the image is used unchecked.
    async fn check_apart(&self) -> Result<()> {
        let _guard = loop {
            if let Some(error) = self.shared.get() {
                return Err(error.duplicate());
            }
            match self.surveys.turn(|()| self.is_surveyed.load(Ordering::Relaxed)) {
                Turn::Covered => return Ok(()),
                Turn::Wait(survey) => survey.await,
                Turn::Run(guard) => break guard,
            }
        };
        let survey = rare(self.survey()).await;
        if let Ok(Some(survey)) = survey
            && let Err(error) = rare(survey.check_apart()).await
        {
            return Err(self.shared.get_or_init(|| error).duplicate());
        }
        self.is_surveyed.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn tables(&self) -> Tables<'_, S> {
        let patches = match &self.mapping {
            Mapping::Vhdx(vhdx) => Some(vhdx.patches()),
            Mapping::Vdi(_) | Mapping::Vpc(_) | Mapping::Vmdk(_) => None,
        };
        Tables::new(self.data(), &self.cache, patches)
    }

    /// The error for any operation that would change the image.
    pub(crate) fn read_only(&self) -> Error {
        refuse_writing(self.kind(), self.storage.name())
    }
}

/// The error for an image of this format that is opened for writing.
pub(crate) fn refuse_writing(kind: ForeignKind, name: &str) -> Error {
    let what = format!("{} images can only be read", kind.as_str());
    Error::new(ErrorKind::ReadOnly, what).on(name).hint(
        "serve it with --read-only, or make a qcow2 image of it: blockhouse convert IMAGE NEW.qcow2",
    )
}
