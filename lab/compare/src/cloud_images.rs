//! `cargo xtask compare --images`: images of the shapes that clouds publish, converted by
//! `qemu-img` and by Blockhouse under that name, with the same arguments.
//!
//! In each round both convert each image to each format in turn, and each copy is durable when its
//! time ends. The two copies are compared by `qemu-img compare`: a difference ends the comparison.
//! Ratios are within a round.

use std::fmt::Write;
use std::io::{Seek, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use blockhouse_figures::Spread;

use crate::config::{Config, Options, chosen, write};
use crate::qcow2::tools::timed;
use crate::report::{kernel, processor};
use crate::servers::Kind;
use lab_tools::process::{run as run_program, stdout_of};
use lab_tools::workspace::Workspace;

/// How an image is made from a raw disk.
#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    format: &'static str,
    /// Arguments of `qemu-img convert`.
    arguments: &'static [&'static str],
    /// The change to the image after that.
    wrapping: Wrapping,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Wrapping {
    Nothing,
    /// The image is a member of a tar file.
    Archive,
    /// The disk's partition table is for sectors of 4096 bytes.
    LargeSectors,
}

const fn shape(
    name: &'static str,
    format: &'static str,
    arguments: &'static [&'static str],
) -> Shape {
    Shape { name, format, arguments, wrapping: Wrapping::Nothing }
}

const SHAPES: &[Shape] = &[
    shape("qcow2-zlib", "qcow2", &["-c"]),
    shape("qcow2-v2", "qcow2", &["-o", "compat=0.10"]),
    shape("qcow2-zstd", "qcow2", &["-c", "-o", "compression_type=zstd"]),
    shape("qcow2-extended-l2", "qcow2", &["-o", "extended_l2=on,cluster_size=128k"]),
    Shape {
        wrapping: Wrapping::Archive,
        ..shape("ova-stream-optimized", "vmdk", &["-o", "subformat=streamOptimized"])
    },
    shape("vhd-fixed", "vpc", &["-o", "subformat=fixed,force_size=on"]),
    shape("vhd-dynamic", "vpc", &["-o", "subformat=dynamic,force_size=on"]),
    shape("vhdx", "vhdx", &[]),
    shape("raw-sparse", "raw", &[]),
    Shape { wrapping: Wrapping::LargeSectors, ..shape("raw-4kn", "raw", &[]) },
];

/// A format of copies, and the arguments for it.
const TARGETS: &[(&str, &[&str])] = &[
    ("raw", &["-O", "raw"]),
    ("qcow2", &["-O", "qcow2"]),
    ("qcow2, compressed", &["-c", "-O", "qcow2"]),
];

/// Wall time and processor time in milliseconds, of each round.
#[derive(Default)]
struct Column {
    wall: Vec<f64>,
    cpu: Vec<f64>,
}

/// Compares, as `options` say.
pub fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    let shapes = chosen(SHAPES, |shape| shape.name, &options.rows)?;
    let config = Config::new(workspace, options, Vec::new(), &[Kind::Blockhouse])?;
    let place = match &options.dir {
        Some(dir) => tempfile::Builder::new().prefix("compare-").tempdir_in(dir),
        None => tempfile::Builder::new().prefix("compare-").tempdir_in(workspace.target()),
    };
    let place = place.context("cannot make a folder for the images")?;
    let folder = place.path();
    let ours = folder.join("qemu-img");
    let program = std::path::absolute(&config.programs.blockhouse)?;
    std::os::unix::fs::symlink(program, &ours).context("cannot make a link")?;
    let mut report = heading(&config, options.mebibytes())?;
    print!("{report}");
    for shape in shapes {
        let raw = folder.join("disk.raw");
        make_disk(&raw, options.bytes()?, shape.wrapping)?;
        let image = shape.make(folder, &raw)?;
        for &(target, arguments) in TARGETS {
            let mut columns = [Column::default(), Column::default()];
            for _ in 0..config.rounds {
                config.interrupt.check()?;
                let programs = [Path::new("qemu-img"), &*ours];
                let copies = ["theirs", "ours"].map(|name| folder.join(name));
                for ((program, copy), column) in programs.into_iter().zip(&copies).zip(&mut columns)
                {
                    convert(program, &shape, arguments, &image, copy, column)?;
                }
                compare(target, &copies)?;
            }
            let line = line(&shape, target, &columns)?;
            print!("{line}");
            report += &line;
        }
        std::fs::remove_file(folder.join("image")).context("cannot remove an image")?;
        std::fs::remove_file(&raw).context("cannot remove a disk")?;
    }
    options.markdown.as_ref().map_or(Ok(()), |file| write(file, &report))
}

impl Shape {
    /// Makes the image, and returns its name for `qemu-img`.
    fn make(&self, folder: &Path, raw: &Path) -> Result<String> {
        let image = folder.join("image");
        let mut command = Command::new("qemu-img");
        command.args(["convert", "-f", "raw", "-O", self.format]).args(self.arguments);
        run_program(quiet(command.args([raw, &image])))?;
        if self.wrapping != Wrapping::Archive {
            return Ok(image.display().to_string());
        }
        let length = std::fs::metadata(&image)?.len();
        let archive = folder.join("image.ova");
        let mut tar = Command::new("tar");
        run_program(quiet(tar.arg("-cf").arg(&archive).arg("-C").arg(folder).arg("image")))?;
        std::fs::rename(&archive, &image).context("cannot rename an archive")?;
        // The image follows the header of the tar file's first member.
        Ok(format!(
            r#"json:{{"driver":"{}","file":{{"driver":"raw","offset":512,"size":{length},"file":{{"driver":"file","filename":"{}"}}}}}}"#,
            self.format,
            image.display()
        ))
    }

    fn is_archive(&self) -> bool {
        self.wrapping == Wrapping::Archive
    }
}

fn quiet(command: &mut Command) -> Command {
    let mut quiet = Command::new(command.get_program());
    quiet.args(command.get_args()).stdout(std::process::Stdio::null());
    quiet
}

fn convert(
    program: &Path,
    shape: &Shape,
    arguments: &[&str],
    image: &str,
    copy: &PathBuf,
    column: &mut Column,
) -> Result<()> {
    if copy.exists() {
        std::fs::remove_file(copy).context("cannot remove a copy")?;
    }
    let mut command = Command::new(program);
    command.arg("convert");
    if !shape.is_archive() {
        command.args(["-f", shape.format]);
    }
    command.args(arguments).arg(image).arg(copy);
    let times = timed(command, || Ok(std::fs::File::open(copy)?.sync_all()?))?;
    let (wall, cpu) = times.in_milliseconds();
    column.wall.push(wall);
    column.cpu.push(cpu);
    Ok(())
}

/// Fails where the two copies are not equal.
fn compare(target: &str, [theirs, ours]: &[PathBuf; 2]) -> Result<()> {
    let format = target.split(',').next().unwrap_or(target);
    // Allocation may differ: only the content counts.
    let mut content = Command::new("qemu-img");
    content.args(["compare", "-f", format, "-F", format]).args([theirs, ours]);
    stdout_of(content).map(drop)
}

/// A disk of `size` bytes like that of a fresh installation: a partition table, scattered data in a
/// third of the disk, which compresses to a half, and holes.
fn make_disk(path: &Path, size: u64, wrapping: Wrapping) -> Result<()> {
    const PIECE: u64 = 4 << 20;
    let failed = || format!("cannot write {}", path.display());
    let mut file = std::fs::File::create(path).with_context(failed)?;
    file.set_len(size).with_context(failed)?;
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut piece = vec![0; PIECE as usize];
    for offset in (0..size).step_by(3 * PIECE as usize) {
        for words in piece.chunks_exact_mut(16) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            words[..8].copy_from_slice(&state.to_le_bytes());
            words[8..].fill(b'a' + (offset / PIECE % 26) as u8);
        }
        file.seek(SeekFrom::Start(offset)).with_context(failed)?;
        let length = PIECE.min(size - offset) as usize;
        file.write_all(&piece[..length]).with_context(failed)?;
    }
    let sector = if wrapping == Wrapping::LargeSectors { 4096 } else { 512 };
    file.seek(SeekFrom::Start(sector)).with_context(failed)?;
    file.write_all(b"EFI PART").with_context(failed)
}

fn heading(config: &Config, size: u64) -> Result<String> {
    let ours = Kind::Blockhouse.version(&config.programs)?;
    let mut command = Command::new("qemu-img");
    command.arg("--version");
    let theirs = stdout_of(command)?;
    let theirs = theirs.lines().next().unwrap_or_default();
    Ok(format!(
        "{}, {}; {theirs}; {ours}\n{size} MiB, {} rounds; median (smallest..largest); all copies are equal\n\n\
         | image | copy | qemu-img ms | blockhouse ms | time, ours to theirs | qemu-img CPU ms | blockhouse CPU ms |\n\
         | --- | --- | --- | --- | --- | --- | --- |\n",
        processor()?,
        kernel(),
        config.rounds
    ))
}

fn line(shape: &Shape, target: &str, [theirs, ours]: &[Column; 2]) -> Result<String> {
    let spread = |values: &[f64]| Spread::of(values.iter().copied()).context("no rounds");
    let ratio = Spread::of_ratios(&ours.wall, &theirs.wall).context("no rounds")?;
    let mut line = String::new();
    writeln!(
        line,
        "| {} | {target} | {} | {} | {ratio:.2} | {:.0} | {:.0} |",
        shape.name,
        spread(&theirs.wall)?,
        spread(&ours.wall)?,
        spread(&theirs.cpu)?.median,
        spread(&ours.cpu)?.median,
    )?;
    Ok(line)
}
