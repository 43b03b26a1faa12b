//! Reads a replayed disk without a guest: ext4 with its own tools, qcow2 with QEMU's.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::recovery::ReplayTarget;
use super::{Configuration, Layer};
use crate::packages::Packages;
use lab_tools::process::line;

const PAGE: usize = 4096;
/// Exit status of `qemu-img check`: clusters are leaked, which only costs space.
const LEAKS: i32 = 3;

/// A disk in memory.
pub struct Disk<'a> {
    bytes: Vec<u8>,
    layer: Layer,
    packages: &'a Packages,
    folder: PathBuf,
}

impl<'a> Disk<'a> {
    /// A disk of zeros; copies of it go to `folder`.
    pub fn new(configuration: Configuration, packages: &'a Packages, folder: &Path) -> Self {
        let bytes = vec![0; configuration.disk_size() as usize];
        let layer = configuration.layer;
        Self { bytes, layer, packages, folder: folder.to_owned() }
    }

    /// Writes the disk to a sparse file.
    fn copy(&self) -> Result<PathBuf> {
        let path = self.folder.join("copy");
        let write = || -> std::io::Result<()> {
            let file = File::create(&path)?;
            file.set_len(self.bytes.len() as u64)?;
            for (index, page) in self.bytes.chunks(PAGE).enumerate() {
                if page.iter().any(|byte| *byte != 0) {
                    file.write_all_at(page, (index * PAGE) as u64)?;
                }
            }
            Ok(())
        };
        write().with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    }

    /// Lets ext4 recover and extracts the image.
    fn recovered_ext4(&self) -> Result<Result<Vec<u8>, String>> {
        let copy = self.copy()?;
        let image = self.folder.join("image");
        let recover =
            run(self.packages.command("e2fsck")?.args(["-y", "-E", "journal_only"]).arg(&copy))?;
        let clean = run(self.packages.command("e2fsck")?.args(["-f", "-n"]).arg(&copy))?;
        for (what, outcome) in [("recover", recover), ("be clean", clean)] {
            if outcome.status != Some(0) {
                return Ok(Err(format!("ext4 does not {what}: {}", outcome.said)));
            }
        }
        // The image of the mark before must not be taken for that of this mark.
        let _ = std::fs::remove_file(&image);
        let dump = format!("dump /image {}", image.display());
        let dumped = run(self.packages.command("debugfs")?.args(["-R", &dump]).arg(&copy))?;
        if !image.exists() {
            return Ok(Err(format!("the image is gone: {}", dumped.said)));
        }
        Ok(Ok(std::fs::read(&image)?))
    }
}

/// The content of a qcow2 image, which must have no corruptions.
fn content(image: &Path, folder: &Path) -> Result<Result<Vec<u8>, String>> {
    let checked = run(Command::new("qemu-img").args(["check", "-f", "qcow2"]).arg(image))?;
    if !matches!(checked.status, Some(0 | LEAKS)) {
        return Ok(Err(format!("qemu-img check finds: {}", checked.said)));
    }
    let raw = folder.join("raw");
    let convert = ["convert", "-f", "qcow2", "-O", "raw"];
    let converted = run(Command::new("qemu-img").args(convert).arg(image).arg(&raw))?;
    Ok(match converted.status {
        Some(0) => Ok(std::fs::read(&raw)?),
        _ => Err(format!("qemu-img cannot read it: {}", converted.said)),
    })
}

/// A qcow2 image on a disk; [`ReplayTarget::image`] returns its content.
pub struct Qcow2<R> {
    /// Where the image is found.
    pub on: R,
    /// A folder for copies.
    pub folder: PathBuf,
}

impl<R: ReplayTarget> ReplayTarget for Qcow2<R> {
    fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        self.on.write(offset, data)
    }

    fn image(&mut self) -> Result<Result<Vec<u8>, String>> {
        let bytes = match self.on.image()? {
            Ok(bytes) => bytes,
            Err(complaint) => return Ok(Err(complaint)),
        };
        let image = self.folder.join("qcow2");
        std::fs::write(&image, bytes)
            .with_context(|| format!("cannot write {}", image.display()))?;
        content(&image, &self.folder)
    }
}

impl ReplayTarget for Disk<'_> {
    fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        let range =
            self.bytes.get_mut(offset as usize..).and_then(|rest| rest.get_mut(..data.len()));
        range.context("the log goes beyond the disk")?.copy_from_slice(data);
        Ok(())
    }

    fn image(&mut self) -> Result<Result<Vec<u8>, String>> {
        match self.layer {
            Layer::Device => Ok(Ok(self.bytes.clone())),
            Layer::File(_) => self.recovered_ext4(),
        }
    }
}

/// The exit status of a tool, and its last line.
struct Ended {
    status: Option<i32>,
    said: String,
}

fn run(command: &mut Command) -> Result<Ended> {
    let output = command.output().with_context(|| format!("cannot start {}", line(command)))?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).trim().replace('\n', "; ");
    Ok(Ended { status: output.status.code(), said })
}
