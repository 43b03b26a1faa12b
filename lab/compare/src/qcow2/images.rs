//! The images of the comparison: mapped ones are made at the start, others when first needed.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use tempfile::TempDir;

use super::CLUSTER;
use super::rows::{Fill, Task, Work};
use super::tools::{self, Times, Tool};
use crate::interrupt::Interrupt;
use crate::servers::{Format, Programs};
use crate::storage::{Kind, Storage};
use lab_nbd::pattern;
use lab_tools::process::stdout_of;

/// Space for the metadata beside the data.
const TABLES: u64 = 64 << 20;
/// The disk of scattered writes is this many times as large as the space for its image.
const SCATTER: u64 = 16;
const HUGE: u64 = 4 << 40;
/// The half-full image alternates between this many bytes of data and a hole of the same length.
const STRETCH: u64 = 8 << 20;

/// All images on one storage.
pub struct Images {
    kind: Kind,
    disk: PathBuf,
    size: u64,
    description: String,
    raw: Option<Storage>,
    qcow2: Option<Storage>,
    scratch: Option<Storage>,
    huge: Option<(Storage, Storage)>,
    halves: Option<Halves>,
}

/// A half-full image in both formats, and the folder of the copies.
struct Halves {
    folder: TempDir,
    raw: PathBuf,
    qcow2: PathBuf,
}

impl Images {
    /// Makes the mapped images, of `size` bytes, a multiple of 1 MiB, and the storage of the empty
    /// ones, as far as `tasks` need them.
    pub fn new(
        kind: Kind,
        size: u64,
        disk: &Path,
        tasks: &[Task],
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let any = |wanted: fn(&Work) -> bool| tasks.iter().any(|task| wanted(&task.work));
        let bare = || Storage::bare(kind, size + TABLES, disk);
        let (mut raw, mut qcow2, mut scratch) = (None, None, None);
        if any(|work| matches!(work, Work::Mapped(_))) {
            let source = Storage::create(kind, size, disk, interrupt)?;
            let target = bare()?;
            let mut convert = Command::new("qemu-img");
            convert.args(["convert", "-f", "raw", "-O", "qcow2"]);
            stdout_of(into(convert, &[source.path(), target.path()]))?;
            (raw, qcow2) = (Some(source), Some(target));
        }
        if any(|work| matches!(work, Work::Empty(..))) {
            scratch = Some(bare()?);
        }
        let some = scratch.as_ref().or(raw.as_ref());
        let description = match some {
            Some(storage) => storage.description().to_owned(),
            None => Storage::bare(kind, 1 << 20, disk)?.description().to_owned(),
        };
        let disk = disk.to_owned();
        Ok(Self { kind, disk, size, description, raw, qcow2, scratch, huge: None, halves: None })
    }

    /// Describes the storage of the images, for reports.
    pub fn description(&self) -> String {
        self.description.clone()
    }

    /// Bytes of the disk that is mapped whole, and bytes that may be allocated in an empty image.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether the images are files: the size of a device is fixed.
    pub fn are_files(&self) -> bool {
        self.kind != Kind::Loop
    }

    /// Whether all ways of caching do the same work here.
    pub fn any_caching(&self) -> bool {
        self.kind == Kind::Tmpfs
    }

    /// The image in which all data is allocated.
    pub fn mapped(&self, format: Format) -> Result<&Storage> {
        let image = match format {
            Format::Raw => &self.raw,
            Format::Qcow2 => &self.qcow2,
        };
        image.as_ref().context("no task asked for a mapped image")
    }

    /// A new image without data.
    pub fn empty(&self, format: Format, fill: Fill) -> Result<&Storage> {
        let scratch = self.scratch.as_ref().context("no task asked for an empty image")?;
        scratch.clear()?;
        let size = match fill {
            Fill::Whole => self.size,
            Fill::Scattered(_) => self.size * SCATTER,
        };
        if format == Format::Qcow2 {
            create(scratch.path(), size)?;
        }
        Ok(scratch)
    }

    /// An image of 4 TiB without data.
    pub fn huge(&mut self, format: Format) -> Result<&Storage> {
        if self.huge.is_none() {
            let (raw, qcow2) = (self.one()?, self.one()?);
            std::fs::File::options().write(true).open(raw.path())?.set_len(HUGE)?;
            create(qcow2.path(), HUGE)?;
            self.huge = Some((raw, qcow2));
        }
        let (raw, qcow2) = self.huge.as_ref().context("no image of 4 TiB")?;
        Ok(if format == Format::Raw { raw } else { qcow2 })
    }

    fn one(&self) -> Result<Storage> {
        Storage::bare(self.kind, 1 << 20, &self.disk)
    }

    /// How long the `info` command of `tool` takes on the image of 4 TiB.
    pub fn tell(&mut self, format: Format, tool: Tool, programs: &Programs) -> Result<Times> {
        let image = self.huge(format)?.path().to_owned();
        tools::info(tool, programs, format, &image)
    }

    /// How long `tool` takes to copy the half-full image to the format `to`. The source is in the
    /// page cache; the target is durable in the end.
    pub fn convert(&mut self, to: Format, tool: Tool, programs: &Programs) -> Result<Times> {
        if self.halves.is_none() {
            self.halves = Some(self.make_halves()?);
        }
        let halves = self.halves.as_ref().context("no half-full image")?;
        let (from, source) = match to {
            Format::Raw => (Format::Qcow2, &halves.qcow2),
            Format::Qcow2 => (Format::Raw, &halves.raw),
        };
        std::io::copy(&mut std::fs::File::open(source)?, &mut std::io::sink())?;
        let target = halves.folder.path().join("copy");
        let spent = tools::convert(tool, programs, (from, source), (to, &target))?;
        std::fs::remove_file(&target).context("the copy is not there")?;
        Ok(spent)
    }

    fn make_halves(&self) -> Result<Halves> {
        // Beside the other images: on the same file system.
        let parent = self.one()?.path().ancestors().nth(2).map(Path::to_owned);
        let folder = tempfile::Builder::new()
            .prefix("blockhouse-compare-")
            .tempdir_in(parent.context("an image without a folder")?)?;
        let (raw, qcow2) = (folder.path().join("half.raw"), folder.path().join("half.qcow2"));
        let file = std::fs::File::create_new(&raw)?;
        file.set_len(self.size)?;
        let mut chunk = vec![0; 1 << 20];
        pattern::fill(&mut chunk, 0, 0);
        let step = chunk.len();
        for offset in (0..self.size).step_by(step) {
            if offset % (2 * STRETCH) < STRETCH {
                pattern::move_to(&mut chunk, offset);
                std::os::unix::fs::FileExt::write_all_at(&file, &chunk, offset)?;
            }
        }
        file.sync_all()?;
        let mut convert = Command::new("qemu-img");
        convert.args(["convert", "-f", "raw", "-O", "qcow2"]);
        stdout_of(into(convert, &[&raw, &qcow2]))?;
        std::fs::File::open(&qcow2)?.sync_all()?;
        Ok(Halves { folder, raw, qcow2 })
    }
}

fn create(path: &Path, size: u64) -> Result<()> {
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "-o"]).arg(format!("cluster_size={CLUSTER}"));
    create.arg(path).arg(size.to_string());
    stdout_of(create).map(drop)
}

fn into(mut command: Command, paths: &[&Path]) -> Command {
    command.args(paths);
    command
}
