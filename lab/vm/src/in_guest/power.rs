//! The guest's part in losing power: a server on a disk that logs, and XFS's recovery.
//!
//! Only the kernel can recover XFS, so its replay happens in a second guest, each mark on a
//! snapshot that takes the changes of recovery away again.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::client::Client;
use super::images::put;
use super::serve::serve_without_state;
use super::system::{self, FileSystem, Mount, tool};
use crate::power::history::{AckMeaning, History, SIZE};
use crate::power::mark_images::ImageSlots;
use crate::power::recovery::{self, ReplayTarget};
use crate::power::{Configuration, Fua, Layer, MARKS, SEED, mark};

const LOGGED: &str = "logged";
const SNAPSHOT: &str = "snapshot";

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
            // A raw image is there, as all zeros.
            if configuration.format == "qcow2" {
                put(&new_image(Path::new("/tmp"), "qcow2")?, &logged)?;
            }
            logged
        }
    };
    live(configuration, &image)?;
    if let Some(mount) = mount {
        mount.unmount()?;
    }
    remove(LOGGED)
}

fn prepare() -> Result<()> {
    system::load("nvme_core", "multipath=N")?;
    let modules = ["nvme", "virtio_pci", "virtio_blk", "crc32c_generic", "ext4", "xfs"];
    for module in modules.iter().chain(&["dm-log-writes", "dm-snapshot"]) {
        system::load(module, "")?;
    }
    Ok(())
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

/// A new image with a name that is durable.
fn new_image(folder: &Path, format: &str) -> Result<PathBuf> {
    let path = folder.join("image");
    let name = path.to_str().context("a folder without a name")?;
    tool("blockhouse", &["create", "--format", format, name, &SIZE.to_string()])?;
    File::open(&path)?.sync_all()?;
    File::open(folder)?.sync_all()?;
    Ok(path)
}

/// The rounds of the history, until enough of them were acknowledged.
fn live(configuration: Configuration, image: &Path) -> Result<()> {
    let Configuration { format, cache, engine, .. } = configuration;
    let options = ["--format", format, "--cache", cache, "--engine", engine];
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

/// Replays the log on `log` to `disk` and stores the image of the XFS there on `found`, with the
/// changes of each recovery going to `changes`.
pub fn recover_xfs(log: &str, disk: &str, changes: &str, found: &str) -> Result<()> {
    prepare()?;
    let (log, changes) = (system::disk_of(log)?, system::disk_of(changes)?);
    let open = |path: &Path| File::options().write(true).open(path);
    let path = system::disk_of(disk)?;
    let mut slots = ImageSlots::new(open(&system::disk_of(found)?)?);
    let mut disk = Xfs { file: open(&path)?, path, changes };
    recovery::replay(&log, &mut disk, |_, image| slots.store(&image))?;
    rustix::fs::sync();
    Ok(())
}

/// A disk with XFS on it.
struct Xfs {
    file: File,
    path: PathBuf,
    changes: PathBuf,
}

impl ReplayTarget for Xfs {
    fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        self.file.write_all_at(data, offset).context("cannot write to the disk")
    }

    fn image(&mut self) -> Result<Result<Vec<u8>, String>> {
        // A snapshot reads the disk itself, not what the page cache has for it.
        self.file.sync_all()?;
        let chunk = 8;
        let (path, changes) = (self.path.display(), self.changes.display());
        let snapshot = format!("snapshot {path} {changes} N {chunk}");
        let snapshot = map(SNAPSHOT, &self.path, &snapshot)?;
        let image = recover(&snapshot).map_err(|error| format!("{error:#}"));
        remove(SNAPSHOT)?;
        Ok(image)
    }
}

fn recover(disk: &Path) -> Result<Vec<u8>> {
    let mount = Mount::new(FileSystem::Xfs, disk)?;
    let image = std::fs::read(mount.place().join("image"));
    mount.unmount()?;
    tool("xfs_repair", &["-n", &disk.display().to_string()])?;
    image.context("the image is gone")
}
