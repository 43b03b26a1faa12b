//! Backups: the content of disks at one moment, served for reading while the disks stay in use.
//!
//! Guarantees: a backup begins with all of its disks at one moment, or it fails and undoes its
//! changes. While it lasts, its disks are not closed, resized or moved. A failure of the backup is
//! logged, and does not reach the guests. A backup ends with the process at the latest; the bitmaps
//! that it has begun remain.
//!
//! Order of the beginning: the new bitmaps record changes first, then the disks are frozen, then
//! the older bitmaps are read. So a bitmap never lacks a change, but may have extra ones from
//! between these steps. Guests' writes are paused only during the freeze, in which nothing is read
//! or written.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use blockhouse_config::disk::DiskConfig;
use blockhouse_config::export_address::ExportAddress;
use blockhouse_config::limits::LimitsConfig;
use blockhouse_config::offers::ExportOptions;
use blockhouse_core::{ByteRange, Error, ErrorKind, rare};
use blockhouse_disk::{
    Access, Bitmap, BitmapAction, DirtyMap, Disk, ImageFormat, NewBitmap, Options,
};
use blockhouse_engine::{sleep, timeout};
use blockhouse_jobs::{FreezeOptions, FrozenDisk, freeze};
use blockhouse_nbd::ExportBitmap;
use blockhouse_nbd::uri::NbdUri;
use blockhouse_storage::{ImageStorage, ViewStorage};
use parking_lot::Mutex;

use super::Running;
use super::backup_list::{BackupDisk, NewName, RunningBackup};
use super::disk::RunningDisk;
use super::recording::{ensure_side_file, remove_empty_side_file};
use crate::events::{Event, Events};
use crate::running::claims::Name;
use crate::running::scratch::open_scratch;

/// Maximum time that changes are paused until all disks are frozen.
pub(super) const MAX_FREEZE_TIME: Duration = Duration::from_secs(3);
/// Maximum wait of a guest's change without progress of its copy; then the backup fails.
const MAX_COPY_TIME: Duration = Duration::from_secs(30);
/// Bytes of memory of each disk for data not yet in its scratch file.
const COPY_MEMORY: u64 = 16 << 20;
/// Maximum bytes of memory of each disk for the locations of single blocks in its scratch file. The
/// locations take a thousandth of the copied data.
const MAX_INDEX_BYTES: u64 = 64 << 20;
/// Maximum bytes of memory for a copy of a bitmap. A larger copy is made coarser.
const MAX_BITMAP_BYTES: u64 = 16 << 20;

/// Maximum bytes for the bits of a bitmap that begins with a backup; a large disk at
/// `MAX_GRANULARITY` takes more. Finer bits make increments smaller, but their changes are kept in
/// memory.
const MAX_FINE_BITS: u64 = 4 << 20;
/// Minimum bytes of a disk per bit of such a bitmap.
const MIN_GRANULARITY: u64 = 4 << 10;
const MAX_GRANULARITY: u64 = 64 << 10;

/// The parameters of a new backup.
#[derive(Clone, Debug)]
pub(crate) struct BackupSetup {
    /// The name; `None`: any name.
    pub(crate) name: Option<String>,
    /// The names of the disks.
    pub(crate) disks: Vec<String>,
    /// Where to serve the disks, each under its own name; a single disk under the URI's export
    /// name, if given. `None`: the disks are not served yet.
    pub(crate) export: Option<NbdUri>,
    /// The bitmap that begins on each disk.
    pub(crate) bitmap: Option<String>,
    /// The bitmap of each disk that clients may query for changes.
    pub(crate) since: Option<String>,
    /// The folder of the scratch files; `None`: the folder of each disk's image.
    pub(crate) scratch: Option<PathBuf>,
    /// Bytes that each scratch file may take; `None`: the size of its disk, rounded up to 4 KiB.
    pub(crate) scratch_size: Option<u64>,
}

/// A disk to be backed up.
struct Source {
    disk: Arc<RunningDisk>,
    /// The setup's bitmap, if the disk has it. In that case the backup of the disk is incremental.
    since: Option<String>,
}

/// The changes to undo if a backup cannot begin.
#[derive(Default)]
struct Begun {
    /// Raw disks that got a side file for bitmaps.
    recorded: Vec<Arc<RunningDisk>>,
    /// Disks with their new bitmap.
    bitmaps: Vec<(Arc<RunningDisk>, String)>,
    disks: Vec<BackupDisk>,
}

/// Begins a backup. When this returns, its disks are served, if the setup names an export.
///
/// # Errors
/// There is no such disk or bitmap; a job or another backup uses a disk; a scratch file cannot be
/// made; an address cannot be used; the freeze times out. After an error the changes are undone,
/// and a failure to undo one is logged.
pub(crate) async fn begin_backup(
    running: &Running,
    setup: BackupSetup,
) -> Result<Arc<RunningBackup>> {
    let new_name = running.backups.new_name(setup.name.clone())?;
    let name = new_name.name.clone();
    let addresses = addresses(&setup)?;
    let names = setup.disks.iter().flat_map(|disk| [disk.clone(), frozen_name(disk, &name)]);
    let mut names: Vec<_> = names.map(Name::Disk).collect();
    names.extend(addresses.first().map(|address| Name::Socket(address.socket())));
    let _claim = running.claims.claim(names).await;
    let mut begun = Begun::default();
    match begin_claimed(running, &setup, &name, addresses, &mut begun).await {
        Ok(pause) => {
            let BackupSetup { bitmap, since, .. } = setup;
            let disks = begun.disks;
            let backup = RunningBackup { name, bitmap, since, pause, disks };
            let backup = Arc::new(backup);
            running.backups.push(Arc::clone(&backup));
            tracing::info!(
                "the backup {:?} began; changes were held off for {pause:?}",
                backup.name
            );
            running.events.tell(Event::BackupBegan { backup: backup.name.clone() });
            Ok(backup)
        }
        Err(error) => {
            undo(running, begun).await;
            Err(error)
        }
    }
}

async fn begin_claimed(
    running: &Running,
    setup: &BackupSetup,
    name: &str,
    addresses: Vec<ExportAddress>,
    begun: &mut Begun,
) -> Result<Duration> {
    let sources = sources(running, setup, name).await?;
    let mut frozen = Vec::new();
    for source in &sources {
        let scratch = (setup.scratch.as_deref(), setup.scratch_size);
        frozen.push(prepare(running, scratch, name, &source.disk).await?);
    }
    if let Some(bitmap) = &setup.bitmap {
        for Source { disk: source, .. } in &sources {
            let granularity = Some(granularity(source.disk.size()));
            let new = NewBitmap { name: bitmap.clone(), granularity, is_enabled: true };
            if ensure_side_file(running, source).await?.is_some() {
                begun.recorded.push(Arc::clone(source));
            }
            source.disk.bitmaps().add(&new).await?;
            begun.bitmaps.push((Arc::clone(source), bitmap.clone()));
        }
    }
    let views: Vec<_> = frozen.iter().map(|(view, _)| &**view).collect();
    let pause = timeout(MAX_FREEZE_TIME, freeze(&views)).await.with_context(|| {
        format!(
            "the disks do not come to rest in {MAX_FREEZE_TIME:?}: changes in flight take longer; try again"
        )
    })??;
    let mut addresses = addresses.into_iter();
    for (source, (view, scratch_limit)) in sources.into_iter().zip(frozen) {
        let frozen = adopt_frozen(running, name, &source, &view).await?;
        let (Source { disk: source, since }, served) = (source, Arc::clone(&frozen));
        begun.disks.push(BackupDisk { source, frozen, since, view, scratch_limit });
        if let Some(address) = addresses.next() {
            running.serve(&served, address, ExportOptions::default()).await?;
        }
    }
    Ok(pause)
}

/// Lists a frozen disk as a separate backup, which is not served yet.
///
/// # Errors
/// The host has no memory for the disk.
pub(super) async fn adopt_backup(
    running: &Running,
    name: &NewName<'_>,
    source: Arc<RunningDisk>,
    (view, scratch_limit): (Arc<FrozenDisk<ImageStorage>>, u64),
    pause: Duration,
) -> Result<()> {
    let name = name.name.clone();
    let source = Source { disk: source, since: None };
    let frozen = adopt_frozen(running, &name, &source, &view).await?;
    let disk = BackupDisk { source: source.disk, frozen, since: None, view, scratch_limit };
    let begun = Event::BackupBegan { backup: name.clone() };
    let backup = RunningBackup { name, bitmap: None, since: None, pause, disks: vec![disk] };
    running.backups.push(Arc::new(backup));
    running.events.tell(begun);
    Ok(())
}

/// The claimed disks of a backup. A disk without the bitmap is backed up in full, if another disk
/// has the bitmap.
async fn sources(running: &Running, setup: &BackupSetup, name: &str) -> Result<Vec<Source>> {
    let mut sources = Vec::new();
    for disk in &setup.disks {
        let source = running.disks.get(disk)?;
        running.check_free(disk)?;
        check_frozen_name(running, disk, name)?;
        let since = match &setup.since {
            Some(since) if has_bitmap(&source, since).await? => Some(since.clone()),
            _ => None,
        };
        sources.push(Source { disk: source, since });
    }
    if let Some(since) = &setup.since
        && sources.iter().all(|source| source.since.is_none())
    {
        let disk = sources.first().map_or("", |source| source.disk.name());
        bail!("the disk {disk:?} has no bitmap {since:?}; 'bitmap.list' tells which it has");
    }
    Ok(sources)
}

/// Prepares the freeze of a disk. Returns the disk to freeze, and the limit of its scratch file in
/// bytes. `folder` and `scratch_size` are the folder and the limit of that file.
pub(super) async fn prepare(
    running: &Running,
    (folder, scratch_size): (Option<&Path>, Option<u64>),
    name: &str,
    source: &RunningDisk,
) -> Result<(Arc<FrozenDisk<ImageStorage>>, u64)> {
    let folder = match folder {
        Some(folder) => folder.to_owned(),
        None => usual_folder(source)?,
    };
    running.sandbox().check(&folder.join("x"))?;
    let size = FrozenDisk::<ImageStorage>::scratch_size(source.disk.size());
    let scratch = open_scratch(&folder, size).await?;
    let scratch_limit = scratch_size.unwrap_or(size);
    let options = FreezeOptions {
        scratch_limit,
        memory: COPY_MEMORY,
        max_index_bytes: MAX_INDEX_BYTES,
        timer: Some(Box::new(|| Box::pin(sleep(MAX_COPY_TIME)))),
    };
    let teller = teller(name.to_owned(), source.name().to_owned(), running.events.clone());
    let frozen = FrozenDisk::new(Arc::clone(&source.disk), scratch, options, teller)?;
    let frozen = Arc::new(frozen);
    let view = Arc::clone(&frozen);
    // The task ends with the backup, or with the loop.
    drop(running.jobs.handle()?.spawn(move || view.write_behind()));
    Ok((frozen, scratch_limit))
}

/// Lists a frozen disk.
async fn adopt_frozen(
    running: &Running,
    name: &str,
    Source { disk: source, since }: &Source,
    view: &Arc<FrozenDisk<ImageStorage>>,
) -> Result<Arc<RunningDisk>> {
    let bitmap = match since {
        Some(since) => Some(copy_bitmap(source, since).await?),
        None => None,
    };
    let storage = ImageStorage::View(Box::new(ViewStorage::new(Arc::clone(view))));
    let disk = Disk::raw(storage, Options { access: Access::ReadOnly, ..Options::default() })?;
    let frozen = DiskConfig {
        name: Some(frozen_name(source.name(), name)),
        format: Some(ImageFormat::Raw),
        read_only: true,
        create: None,
        snapshot: None,
        bitmaps: Vec::new(),
        bitmaps_in: None,
        trust_bitmaps: false,
        threshold: None,
        limits: LimitsConfig::default(),
        exports: Vec::new(),
        ..source.setup.clone()
    };
    Ok(running.adopt_with(frozen, Arc::new(disk), None, bitmap.into_iter().collect()))
}

/// A disk that offers these bitmaps. They are its own, or copies: a frozen disk of a backup has
/// those of its source or of another disk (`of`), and a read-only disk those of another read-only
/// disk. The copies have all changes up to the freeze, and perhaps later ones.
///
/// # Errors
/// The disk of a copy may change, or there is no such bitmap.
pub(super) async fn with_bitmaps(
    running: &Running,
    name: &str,
    (bitmaps, of): (&[String], Option<&str>),
) -> Result<Arc<RunningDisk>> {
    let served = running.disks.get(name)?;
    let backups = running.backups.list();
    let mut disks = backups.iter().flat_map(|backup| &backup.disks);
    let frozen = disks.find(|disk| disk.frozen.name() == name);
    let source = match (of, frozen) {
        (Some(other), _) => running.disks.get(other)?,
        (None, Some(disk)) => Arc::clone(&disk.source),
        (None, None) => {
            for bitmap in bitmaps {
                // Fails if the bitmap is missing or inconsistent.
                served.disk.bitmaps().extents(bitmap, ByteRange::between(0, 0), 0).await?;
            }
            let own = bitmaps.iter().cloned().map(ExportBitmap::OfDisk).collect();
            return Ok(offering(&served, own));
        }
    };
    let mut changing = [&served, &source].into_iter().filter(|disk| !disk.setup.is_read_only());
    if frozen.is_none()
        && let Some(disk) = changing.next()
    {
        bail!(
            "bitmaps of another disk are offered by read-only disks, and {:?} is writable: open it with read-only",
            disk.name()
        );
    }
    if source.disk.size() != served.disk.size() {
        bail!("the disks {name:?} and {:?} have different sizes", source.name());
    }
    let mut copies = Vec::new();
    for bitmap in bitmaps {
        copies.push(copy_bitmap(&source, bitmap).await?);
    }
    Ok(offering(&served, copies))
}

/// A disk for an export that offers these bitmaps.
fn offering(served: &RunningDisk, bitmaps: Vec<ExportBitmap>) -> Arc<RunningDisk> {
    let RunningDisk { setup, path, moved, disk, room, .. } = served;
    let (setup, path, moved, disk, room) =
        (setup.clone(), path.clone(), moved.clone(), Arc::clone(disk), Arc::clone(room));
    let (configured, group) = (Mutex::default(), Mutex::default());
    Arc::new(RunningDisk { setup, path, moved, disk, bitmaps, room, configured, group })
}

/// Ends a backup: stops serving its frozen disks and copying old data. Its bitmaps stay.
///
/// # Errors
/// There is no such backup.
pub(crate) async fn end_backup(running: &Running, name: &str) -> Result<()> {
    let find = || running.backups.list().into_iter().find(|backup| backup.name == name);
    let missing =
        || anyhow::anyhow!("no backup is called {name:?}; 'backup.list' tells which there are");
    let backup = find().ok_or_else(missing)?;
    let of_disk = |disk: &BackupDisk| {
        let exports = running.exports.of_disk(disk.frozen.name()).into_iter();
        let names = [disk.source().to_owned(), disk.frozen.name().to_owned()].map(Name::Disk);
        let sockets = exports.map(|export| Name::Socket(export.address.socket()));
        names.into_iter().chain(sockets).collect::<Vec<_>>()
    };
    let names: Vec<_> = backup.disks.iter().flat_map(of_disk).collect();
    let _claim = running.claims.claim(names).await;
    // The backup may have ended during the wait for the claim.
    find().ok_or_else(missing)?;
    for disk in &backup.disks {
        end_frozen(running, disk).await?;
    }
    running.backups.forget(&backup);
    running.events.tell(Event::BackupEnded { backup: name.to_owned() });
    Ok(())
}

async fn end_frozen(running: &Running, disk: &BackupDisk) -> Result<()> {
    // The exports end before the thaw, because their reads get the old bytes only until then.
    for export in running.exports.of_disk(disk.frozen.name()) {
        running.exports.end(&export).await?;
    }
    disk.view.thaw();
    running.forget(&disk.frozen).await
}

/// Undoes the steps of a backup that cannot begin.
async fn undo(running: &Running, begun: Begun) {
    for disk in &begun.disks {
        if let Err(error) = end_frozen(running, disk).await {
            tracing::error!("{}: {error:#}", disk.frozen.name());
        }
    }
    for (source, bitmap) in begun.bitmaps {
        if let Err(error) = source.disk.bitmaps().change(&bitmap, BitmapAction::Remove).await {
            tracing::error!("{}: the bitmap {bitmap:?} stays: {error}", source.name());
        }
    }
    for source in begun.recorded {
        remove_empty_side_file(running, &source).await;
    }
}

/// A copy of a bitmap, for clients.
async fn copy_bitmap(disk: &RunningDisk, name: &str) -> Result<ExportBitmap> {
    let dirty = Arc::new(copied(disk, name).await?);
    Ok(ExportBitmap::Fixed { name: name.to_owned(), dirty })
}

/// A copy of a bitmap in memory.
pub(super) async fn copied(disk: &RunningDisk, bitmap: &str) -> Result<DirtyMap> {
    let least = DirtyMap::min_granularity(disk.disk.size(), MAX_BITMAP_BYTES);
    Ok(rare(disk.disk.bitmaps().copy(bitmap, least)).await?)
}

/// Whether a disk has this bitmap. Fails if the bitmap lacks changes or is not enabled.
async fn has_bitmap(disk: &RunningDisk, name: &str) -> Result<bool> {
    match complete_bitmap(disk, name).await? {
        Some(bitmap) if !bitmap.is_enabled => Err(lacks_changes(disk, name, "it is not enabled")),
        found => Ok(found.is_some()),
    }
}

/// The bitmap of this name, if the disk has one.
///
/// # Errors
/// The bitmap lacks changes.
pub(super) async fn complete_bitmap(disk: &RunningDisk, name: &str) -> Result<Option<Bitmap>> {
    let bitmaps = match disk.disk.bitmaps().list().await {
        // A raw image without bitmaps.
        Err(error) if error.kind() == ErrorKind::Unsupported => return Ok(None),
        bitmaps => bitmaps?,
    };
    match bitmaps.into_iter().find(|bitmap| bitmap.name == name) {
        Some(bitmap) if bitmap.is_inconsistent => {
            let why = "they could not be recorded, or its last writer died";
            Err(lacks_changes(disk, name, why))
        }
        found => Ok(found),
    }
}

fn lacks_changes(disk: &RunningDisk, name: &str, why: &str) -> anyhow::Error {
    let what = format!("the bitmap {name:?} of the disk {:?} lacks changes: {why}", disk.name());
    Error::new(ErrorKind::LacksChanges, what).hint("make a full backup of it").into()
}

/// Fails if a disk has the name of the frozen disk.
pub(super) fn check_frozen_name(running: &Running, disk: &str, backup: &str) -> Result<()> {
    let name = frozen_name(disk, backup);
    if running.disks.find(&name).is_some() {
        bail!("a disk is called {name:?} already; give the backup another name");
    }
    Ok(())
}

pub(super) fn frozen_name(disk: &str, backup: &str) -> String {
    format!("{disk}@{backup}")
}

/// Bytes of a disk per bit of a bitmap that begins with a backup.
fn granularity(size: u64) -> u64 {
    DirtyMap::min_granularity(size, MAX_FINE_BITS).clamp(MIN_GRANULARITY, MAX_GRANULARITY)
}

/// The address at which each disk is served; empty without an export.
fn addresses(setup: &BackupSetup) -> Result<Vec<ExportAddress>> {
    let name_of = |disk: &String, uri: &NbdUri| match (&setup.disks[..], &*uri.export) {
        (_, "") => Ok(disk.clone()),
        ([_], name) => Ok(name.to_owned()),
        _ => bail!("several disks are served under their own names; leave the name out of the URI"),
    };
    let mut addresses = Vec::new();
    for (index, disk) in setup.disks.iter().enumerate() {
        if setup.disks[..index].contains(disk) {
            bail!("the disk {disk:?} is named twice; name it once");
        }
        if let Some(uri) = &setup.export {
            let export = NbdUri { export: name_of(disk, uri)?, ..uri.clone() };
            addresses.push(ExportAddress::Nbd(export));
        }
    }
    if setup.disks.is_empty() {
        bail!("a backup has one disk at least; name it");
    }
    Ok(addresses)
}

/// The folder of a disk's image.
fn usual_folder(disk: &RunningDisk) -> Result<PathBuf> {
    let image = disk.path();
    let is_file = image.metadata().is_ok_and(|found| found.is_file());
    let folder = image.parent().filter(|_| is_file).map(ToOwned::to_owned);
    folder.with_context(|| {
        format!(
            "the image of the disk {:?} is no file in a folder; name a folder for the scratch file",
            disk.name()
        )
    })
}

fn teller(backup: String, disk: String, events: Events) -> blockhouse_jobs::FailureTeller {
    Box::new(move |why| {
        tracing::error!("{disk}: the backup {backup} failed, the guest goes on: {why}");
        let (backup, disk, error) = (backup.clone(), disk.clone(), why.to_owned());
        events.tell(Event::BackupFailed { backup, disk, error });
    })
}
