//! The images that runs begin with: an image of each layout is made once, and copied for each run.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use fastrand::Rng;
use lab_images::Backing;
use lab_tools::process::{self, line};
use tempfile::TempDir;

use crate::combination::Image;

/// The name of the image in its folder. The data file of some images, `disk.data`, has a name like
/// it.
pub const IMAGE: &str = "disk.image";
/// The number of compressed clusters.
const COMPRESSED: usize = 6;
/// The number of ordinary writes before the run.
const WRITES: usize = 12;

/// A folder with an image, its backing and data files, and the content of its disk.
pub struct Template {
    folder: TempDir,
    content: Vec<u8>,
}

impl Template {
    /// Makes the image with QEMU's tools. The same `image` always gets the same content.
    pub fn make(image: &Image) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("kill-").tempdir_in("/dev/shm")?;
        let mut random = Rng::with_seed(1);
        let place = folder.path();
        match image {
            Image::Raw => {
                make_raw(&place.join(IMAGE), image.size(), image.size() / 2, &mut random)?
            }
            Image::Qcow2 { .. } => make_qcow2(image, place, &mut random)?,
        }
        let content = content(place, image)?;
        ensure!(content.len() as u64 == image.size(), "{image}: {} bytes", content.len());
        Ok(Self { folder, content })
    }

    /// The content of the disk.
    pub fn content(&self) -> &[u8] {
        &self.content
    }

    /// Copies the files to the folder `to`; returns the path of the image.
    pub fn copy(&self, to: &Path) -> Result<PathBuf> {
        let mut copy = Command::new("cp");
        copy.args(["-r", "--sparse=auto"]).arg(self.folder.path().join(".")).arg(to);
        process::run(copy)?;
        Ok(to.join(IMAGE))
    }
}

/// The disk of the image in `folder` as QEMU reads it.
pub fn content(folder: &Path, image: &Image) -> Result<Vec<u8>> {
    content_of(folder, image.format(), IMAGE)
}

/// The disk of an image of this format and name in `folder` as QEMU reads it.
pub fn content_of(folder: &Path, format: &str, name: &str) -> Result<Vec<u8>> {
    let flat = folder.join("flat");
    quiet(folder, "qemu-img", &["convert", "-f", format, "-O", "raw", name, "flat"])?;
    let content = std::fs::read(&flat).context("no copy of the disk")?;
    std::fs::remove_file(&flat)?;
    Ok(content)
}

/// Runs a program in `folder`; returns its output, or an error with the output.
pub fn quiet(folder: &Path, program: &str, words: &[&str]) -> Result<String> {
    let mut command = Command::new(program);
    command.args(words).current_dir(folder);
    let output = command.output().with_context(|| format!("cannot start {program}"))?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    let has_failed = !output.status.success() || said.contains("failed:");
    ensure!(!has_failed, "{}: {}\n{said}", line(&command), output.status);
    Ok(said)
}

/// A sparse file whose first bytes are random.
fn make_raw(path: &Path, size: u64, written: u64, random: &mut Rng) -> Result<()> {
    let mut bytes = vec![0; written as usize];
    random.fill(&mut bytes);
    std::fs::write(path, &bytes)?;
    std::fs::File::options().write(true).open(path)?.set_len(size)?;
    Ok(())
}

/// The end of the part of the disk that is written. The last quarter gets no data, so that all
/// images have unallocated clusters.
fn reach(size: u64) -> u64 {
    size * 3 / 4
}

fn make_qcow2(image: &Image, folder: &Path, random: &mut Rng) -> Result<()> {
    let Image::Qcow2 { layout, has_snapshot } = image else { return Ok(()) };
    let (size, cluster) = (image.size(), image.cluster_size());
    let size_word = size.to_string();
    // A name without a folder is relative to the image's folder, so each copy has its own data
    // file.
    let mut options = layout.options.replace("PATH/", "");
    if layout.backing != Backing::Nothing {
        make_raw(&folder.join("raw"), size * 2 / 3 / 512 * 512, size / 2, random)?;
        options += ",backing_file=raw,backing_fmt=raw";
    }
    if layout.backing == Backing::Chain {
        let over = "cluster_size=4K,backing_file=raw,backing_fmt=raw";
        quiet(
            folder,
            "qemu-img",
            &["create", "-q", "-f", "qcow2", "-o", over, "middle", &size_word],
        )?;
        qemu_io(folder, "middle", "qcow2", &writes(random, size, 4096, ""))?;
        options = options
            .replace(",backing_file=raw,backing_fmt=raw", ",backing_file=middle,backing_fmt=qcow2");
    }
    quiet(folder, "qemu-img", &["create", "-q", "-f", "qcow2", "-o", &options, IMAGE, &size_word])?;
    if layout.compressed {
        // Whole clusters that are not allocated yet, as compressed writes demand.
        let clusters = reach(size) / cluster;
        let commands: Vec<String> = (0..COMPRESSED as u64)
            .map(|number| {
                let start = number * clusters / COMPRESSED as u64 * cluster;
                format!("write -c -P {} {start} {cluster}", random.u8(1..))
            })
            .collect();
        qemu_io(folder, IMAGE, "qcow2", &commands)?;
    }
    qemu_io(folder, IMAGE, "qcow2", &writes(random, size, cluster, "-z "))?;
    if *has_snapshot {
        quiet(folder, "qemu-img", &["snapshot", "-c", "first", IMAGE])?;
        qemu_io(folder, IMAGE, "qcow2", &writes(random, size, cluster, "-z "))?;
    }
    Ok(())
}

/// Writes for `qemu-io` of about a cluster each; one in four has the option `sometimes`.
fn writes(random: &mut Rng, size: u64, cluster: u64, sometimes: &str) -> Vec<String> {
    let command = |_| {
        let start = random.u64(..reach(size) / 512) * 512;
        let length = (random.u64(..2 * cluster.min(64 << 10) / 512) + 1) * 512;
        let length = length.min(reach(size).next_multiple_of(512) - start);
        match random.u8(..4) {
            0 if !sometimes.is_empty() => format!("write {sometimes}{start} {length}"),
            _ => format!("write -P {} {start} {length}", random.u8(1..)),
        }
    };
    (0..WRITES).map(command).collect()
}

/// Runs commands of `qemu-io` on a file in `folder`.
pub fn qemu_io(folder: &Path, file: &str, format: &str, commands: &[String]) -> Result<()> {
    let mut words = vec!["-f", format];
    for command in commands {
        words.extend(["-c", command]);
    }
    words.push(file);
    quiet(folder, "qemu-io", &words).map(drop)
}
