//! Images with a long chain, many snapshots or many extents; QEMU's tools make them where that
//! takes only seconds.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use lab_tools::process::stdout_of;

use super::subjects::REQUEST;
use crate::interrupt::Interrupt;
use crate::servers::Format;
use crate::storage::{Kind, Storage};

/// Space for the metadata of a qcow2 image, in bytes.
const TABLES: u64 = 64 << 20;
/// Bytes in a cluster of most images.
const CLUSTER: u64 = 64 << 10;
/// Bytes in a cluster of an image with many extents, and so in its shortest extent.
const SMALL_CLUSTER: u64 = 2 << 10;
/// Clusters that each overlay of a chain has.
const OWN_CLUSTERS: u64 = 16;
/// Bytes of the disk of an image with many snapshots: one entry of an L1 table.
const SNAPSHOT_DISK: u64 = 64 << 20;

/// Runs `qemu-img create` for a disk of `size` bytes.
pub fn create(path: &Path, size: u64, cluster: u64) -> Result<()> {
    let options = format!("cluster_size={cluster}");
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "-o", &options]).arg(path).arg(size.to_string());
    stdout_of(create).map(drop)
}

/// Makes an image with the content of a raw one.
pub fn copy(raw: &Path, image: &Path) -> Result<()> {
    let mut convert = Command::new("qemu-img");
    convert.args(["convert", "-f", "raw", "-O", "qcow2"]).args([raw, image]);
    stdout_of(convert).map(drop)
}

/// Makes an image of this format in which every block holds the data that belongs to its offset.
pub fn filled(
    format: Format,
    kind: Kind,
    size: u64,
    disk: &Path,
    interrupt: &Interrupt,
) -> Result<Storage> {
    let whole = Storage::create(kind, size, disk, interrupt)?;
    if format == Format::Raw {
        return Ok(whole);
    }
    let storage = Storage::bare(kind, size + TABLES, disk)?;
    copy(whole.path(), storage.path())?;
    Ok(storage)
}

/// Makes a chain of this many overlays, the last at `top`, over a base image in which all `size`
/// bytes are allocated.
pub fn chain(top: &Path, overlays: u64, size: u64) -> Result<()> {
    let folder = top.parent().context("an image without a folder")?;
    let mut below = folder.join("base.qcow2");
    create(&below, size, CLUSTER)?;
    qemu_io(&below, &format!("write -q -P 186 0 {size}\n"))?;
    for number in 1..=overlays {
        let image = if number == overlays {
            top.to_owned()
        } else {
            folder.join(format!("{number}.qcow2"))
        };
        let mut create = Command::new("qemu-img");
        create.args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"]).args([&below, &image]);
        stdout_of(create)?;
        let clusters = size / CLUSTER;
        let script = (0..OWN_CLUSTERS).fold(String::new(), |mut script, own| {
            // Spread over the disk, and at other offsets in each overlay.
            let at = (own * clusters / OWN_CLUSTERS + number * 7) % clusters * CLUSTER;
            let _ = writeln!(script, "write -q -P {} {at} {CLUSTER}", number % 256);
            script
        });
        qemu_io(&image, &script)?;
        below = image;
    }
    Ok(())
}

/// Makes an image of 8 x [`REQUEST`] bytes. Each range of [`REQUEST`] bytes consists of `count`
/// extents of the same length.
pub fn extents(path: &Path, count: u64) -> Result<()> {
    let size = 8 * u64::from(REQUEST);
    create(path, size, SMALL_CLUSTER)?;
    let length = u64::from(REQUEST) / count;
    let mut script = String::new();
    // Writes every second extent first, then the others: no two adjacent extents of the disk are
    // adjacent in the file.
    for half in if count == 1 { vec![0] } else { vec![0, length] } {
        let step = if count == 1 { length } else { 2 * length };
        for at in (half..size).step_by(step as usize) {
            writeln!(script, "write -q -P 9 {at} {length}")?;
        }
    }
    qemu_io(path, &script)
}

/// Makes an image with this many snapshots of a disk without data, each with an L1 table of its
/// own. QEMU's tool takes a minute for each thousand of them.
pub fn snapshots(path: &Path, count: u64) -> Result<()> {
    create(path, SNAPSHOT_DISK, CLUSTER)?;
    let mut image = std::fs::read(path)?;
    let first = (image.len() as u64).next_multiple_of(CLUSTER);
    let table_at = first + count * CLUSTER;
    let table: Vec<u8> = (0..count).flat_map(|number| entry(number, first)).collect();
    let end = (table_at + table.len() as u64).next_multiple_of(CLUSTER);
    ensure!(end / CLUSTER <= CLUSTER / 2, "one refcount block cannot count {count} snapshots");
    image.resize(end as usize, 0);
    image[table_at as usize..][..table.len()].copy_from_slice(&table);
    image[60..64].copy_from_slice(&(count as u32).to_be_bytes());
    image[64..72].copy_from_slice(&table_at.to_be_bytes());
    let refcount_table = word(&image, 48)?;
    let block = word(&image, refcount_table as usize)?;
    for cluster in first / CLUSTER..end / CLUSTER {
        let at = (block + cluster * 2) as usize;
        image[at..at + 2].copy_from_slice(&1_u16.to_be_bytes());
    }
    std::fs::write(path, image)?;
    let mut check = Command::new("qemu-img");
    check.args(["check", "-q", "-f", "qcow2"]).arg(path);
    stdout_of(check).map(drop)
}

/// The snapshot table entry of a snapshot. Its L1 table has one entry, and is in a cluster of its
/// own; these clusters begin at `first` (QEMU, docs/interop/qcow2.txt).
fn entry(number: u64, first: u64) -> Vec<u8> {
    let text = (number + 1).to_string();
    let length = (text.len() as u16).to_be_bytes();
    let mut entry = Vec::new();
    entry.extend((first + number * CLUSTER).to_be_bytes());
    entry.extend(1_u32.to_be_bytes());
    entry.extend([length, length].concat());
    // The time, the guest's clock, and a VM state of 0 bytes.
    entry.extend([0; 20]);
    entry.extend(16_u32.to_be_bytes());
    entry.extend(0_u64.to_be_bytes());
    entry.extend(SNAPSHOT_DISK.to_be_bytes());
    entry.extend([text.as_bytes(), text.as_bytes()].concat());
    entry.resize(entry.len().next_multiple_of(8), 0);
    entry
}

fn word(image: &[u8], at: usize) -> Result<u64> {
    let bytes = image.get(at..at + 8).context("an image that is too short")?;
    Ok(u64::from_be_bytes(bytes.try_into()?))
}

/// Runs a script of qemu-io commands, one a line.
fn qemu_io(image: &Path, script: &str) -> Result<()> {
    let mut command = Command::new("qemu-io");
    command.args(["-f", "qcow2", "-t", "unsafe"]).arg(image);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
    let mut input = child.stdin.take().context("no input of qemu-io")?;
    input.write_all(script.as_bytes())?;
    drop(input);
    let status = child.wait()?;
    ensure!(status.success(), "qemu-io failed: {status}");
    Ok(())
}
