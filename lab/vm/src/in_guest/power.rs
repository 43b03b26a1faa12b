//! The guest's part of the test of power loss: a server on a disk that logs, and the recovery of a
//! file system by the kernel.
//!
//! Only the kernel can recover XFS, so a second guest replays the log, and recovers each mark on a
//! snapshot, which is dropped with the changes of recovery. The log of a volume with a side file is
//! replayed in a second guest, too: whether its bitmaps are valid is decided on a host that has
//! booted since.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use lab_tools::control::Control;
use serde_json::json;

use super::client::Client;
use super::images::put;
use super::serve::serve_without_state;
use super::system::{self, FileSystem, Mount, tool};
use crate::power::history::{AckMeaning, History, SIZE};
use crate::power::mark_images::ImageSlots;
use crate::power::recovery::{self, ReplayTarget};
use crate::power::{Bitmaps, Configuration, Fua, Layer, MARKS, SEED, mark};

const LOGGED: &str = "logged";
const SNAPSHOT: &str = "snapshot";
/// The name of the side file, and the options that name it, where the file system is mounted.
const SIDE_FILE: &str = "side";
const BITMAPS: [&str; 2] = ["--bitmaps", "/mnt/side"];
const BITMAP: &str = "changes";
/// Bytes of the disk for each bit.
const GRANULARITY: usize = 4096;

/// Lets a server write to `disk` and marks each acknowledgement in the log on `log`.
pub fn record(configuration: Configuration, disk: &str, log: &str) -> Result<()> {
    prepare()?;
    let (disk, log) = (system::disk_of(disk)?, system::disk_of(log)?);
    let has_fua = system::has_fua(&disk)?;
    ensure!(has_fua == (configuration.fua == Fua::Taken), "the disk is of the wrong kind");
    let table = format!("log-writes {} {}", disk.display(), log.display());
    let logged = map(LOGGED, &disk, &table)?;
    let mount = match configuration.layer {
        Layer::File(file_system) => {
            file_system.make(&logged)?;
            Some(Mount::new(file_system, &logged)?)
        }
        Layer::Device => None,
    };
    let image = match &mount {
        Some(mount) => new_image(mount.place(), configuration.format)?,
        None => {
            // A raw image needs no preparation: the disk is all zeros.
            if configuration.format == "qcow2" {
                put(&new_image(Path::new("/tmp"), "qcow2")?, &logged)?;
            }
            logged
        }
    };
    if configuration.bitmaps == Bitmaps::SideFile {
        add_bitmap(&image)?;
    }
    live(configuration, &image)?;
    if let Some(mount) = mount {
        mount.unmount()?;
    }
    remove(LOGGED)
}

fn prepare() -> Result<()> {
    system::load_nvme()?;
    system::load_all(&["virtio_pci", "virtio_blk", "crc32c_generic", "ext4", "xfs"])?;
    system::load_all(&["dm-log-writes", "dm-snapshot"])
}

/// A device-mapper device over the whole of `disk`.
fn map(name: &str, disk: &Path, target: &str) -> Result<PathBuf> {
    let size = tool("blockdev", &["--getsz", &disk.display().to_string()])?;
    tool("dmsetup", &["create", name, "--table", &format!("0 {size} {target}")])?;
    system::disk(&format!("mapper/{name}"))
}

fn remove(name: &str) -> Result<()> {
    tool("dmsetup", &["remove", "--retry", name]).map(drop)
}

/// Makes a new image, whose directory entry is durable.
fn new_image(folder: &Path, format: &str) -> Result<PathBuf> {
    let path = folder.join("image");
    let name = path.to_str().context("a folder without a name")?;
    tool("blockhouse", &["create", "--format", format, name, &SIZE.to_string()])?;
    File::open(&path)?.sync_all()?;
    File::open(folder)?.sync_all()?;
    Ok(path)
}

/// Adds a bitmap of a new raw image to its side file, durably.
fn add_bitmap(image: &Path) -> Result<()> {
    let name = image.to_str().context("an image without a name")?;
    let granularity = GRANULARITY.to_string();
    let words = ["bitmap", "add", "--granularity", &granularity, name, BITMAP];
    tool("blockhouse", &[&words[..], &BITMAPS].concat())?;
    let folder = image.parent().context("an image in no folder")?;
    File::open(folder.join(SIDE_FILE))?.sync_all()?;
    Ok(File::open(folder)?.sync_all()?)
}

/// Runs rounds of the history until enough of them were acknowledged.
fn live(configuration: Configuration, image: &Path) -> Result<()> {
    let Configuration { format, cache, engine, .. } = configuration;
    let mut options = vec!["--format", format, "--cache", cache, "--engine", engine];
    if configuration.bitmaps == Bitmaps::SideFile {
        options.extend(BITMAPS);
    }
    let server = serve_without_state(image, &options)?;
    let mut client = Client::connect(server.socket())?;
    let mut history = History::new(SEED, configuration.writes());
    let mut marks = 0;
    for index in 0.. {
        let round = history.next_round();
        for step in &round.steps {
            client.together(step)?;
        }
        if round.acknowledged == AckMeaning::Durable {
            tool("dmsetup", &["message", LOGGED, "0", "mark", &mark(index)])?;
            marks += 1;
        }
        if marks == MARKS {
            break;
        }
    }
    server.kill()
}

/// The disks of a replay, by their serial numbers.
#[derive(clap::Args)]
pub struct Replay {
    /// The disk with the log
    log: String,
    /// A disk of zeros, as large as the one that was logged
    disk: String,
    /// A disk for what recovery changes
    changes: String,
    /// A disk of zeros for the images
    found: String,
}

/// Replays a log, and stores the image in the XFS at each mark.
pub fn recover_xfs(replay: &Replay) -> Result<()> {
    replay.run(|disk| {
        let mount = Mount::new(FileSystem::Xfs, disk)?;
        let image = std::fs::read(mount.place().join("image"));
        mount.unmount()?;
        tool("xfs_repair", &["-n", &disk.display().to_string()])?;
        image.context("the image is gone")
    })
}

/// Replays a log, and stores the volume in the file system at each mark, or how an incremental
/// backup by its bitmap differs from the volume.
pub fn recover_bitmaps(replay: &Replay, file_system: FileSystem) -> Result<()> {
    // The content of the volume when its bitmap began.
    File::create(BASE)?.set_len(SIZE)?;
    let mut excesses = Vec::new();
    replay.run(|disk| {
        let mount = Mount::new(file_system, disk)?;
        let found = increment(&mount.place().join("image"));
        mount.unmount()?;
        let (image, excess) = found?;
        excesses.push(excess);
        Ok(image)
    })?;
    excesses.sort_unstable();
    let (count, kib) = (excesses.len(), |at: usize| excesses.get(at).map_or(0, |it| it >> 10));
    println!(
        "  {count} increments; bitmaps say too much of {} KiB (median), {} KiB (most)",
        kib(count / 2),
        kib(count.saturating_sub(1))
    );
    Ok(())
}

const BASE: &str = "/tmp/base";
const INCREMENT: &str = "/tmp/increment.qcow2";
const FLAT: &str = "/tmp/flat";
const CONTROL: &str = "/tmp/control";

/// The content of a volume after a loss of power, if an incremental backup by its bitmap equals it;
/// and how many bytes the bitmap marks that have not changed, as a server finds it.
fn increment(image: &Path) -> Result<(Vec<u8>, u64)> {
    let bytes = std::fs::read(image).context("the image is gone")?;
    for left in [INCREMENT, FLAT] {
        // These files exist from the second mark on.
        let _ = std::fs::remove_file(left);
    }
    let name = image.to_str().context("an image without a name")?;
    let words = ["backup", name, INCREMENT, "--incremental", BITMAP];
    tool("blockhouse", &[&words[..], &["--base", BASE], &BITMAPS].concat())?;
    tool("blockhouse", &["convert", "-O", "raw", INCREMENT, FLAT])?;
    let flat = std::fs::read(FLAT).context("no copy of the increment")?;
    let blocks = bytes.chunks(GRANULARITY).zip(flat.chunks(GRANULARITY));
    let wrong = blocks.filter(|(one, other)| one != other).count();
    ensure!(
        wrong == 0 && bytes.len() == flat.len(),
        "the increment of {} bytes lacks {wrong} changed blocks",
        flat.len()
    );
    let is_changed = |block: &&[u8]| block.iter().any(|byte| *byte != 0);
    let changed = bytes.chunks(GRANULARITY).filter(is_changed).count() * GRANULARITY;
    let options = [&["--format", "raw", "--name", "disk", "--control", CONTROL][..], &BITMAPS];
    let server = serve_without_state(image, &options.concat())?;
    let mut control = Control::connect(Path::new(CONTROL))?;
    let listed = control.call("bitmap.list", &json!({ "disk": "disk" }))?;
    let listed = listed.map_err(anyhow::Error::msg)?;
    drop(control);
    server.stop()?;
    ensure!(listed[0]["recording"] == true, "the bitmap does not record: {listed}");
    let count = listed[0]["count"].as_u64().context("no count of the bitmap")?;
    Ok((bytes, count.saturating_sub(changed as u64)))
}

impl Replay {
    /// Rebuilds the disk up to each mark, and stores what `found` returns for it.
    fn run(&self, found: impl FnMut(&Path) -> Result<Vec<u8>>) -> Result<()> {
        prepare()?;
        let (log, changes) = (system::disk_of(&self.log)?, system::disk_of(&self.changes)?);
        let open = |path: &Path| File::options().write(true).open(path);
        let path = system::disk_of(&self.disk)?;
        let mut slots = ImageSlots::new(open(&system::disk_of(&self.found)?)?);
        let mut disk = Replayed { file: open(&path)?, path, changes, found };
        recovery::replay(&log, &mut disk, |_, image| slots.store(&image))?;
        rustix::fs::sync();
        Ok(())
    }
}

/// A rebuilt disk with a file system on it.
struct Replayed<F> {
    file: File,
    path: PathBuf,
    changes: PathBuf,
    /// Returns the image, given a snapshot of the disk.
    found: F,
}

impl<F: FnMut(&Path) -> Result<Vec<u8>>> ReplayTarget for Replayed<F> {
    fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        self.file.write_all_at(data, offset).context("cannot write to the disk")
    }

    fn image(&mut self) -> Result<Result<Vec<u8>, String>> {
        // A snapshot reads the disk, not its page cache, so the cache is written back before.
        self.file.sync_all()?;
        let chunk = 8;
        let (path, changes) = (self.path.display(), self.changes.display());
        let snapshot = format!("snapshot {path} {changes} N {chunk}");
        let snapshot = map(SNAPSHOT, &self.path, &snapshot)?;
        let image = (self.found)(&snapshot).map_err(|error| format!("{error:#}"));
        remove(SNAPSHOT)?;
        Ok(image)
    }
}
