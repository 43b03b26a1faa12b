//! First durable writes to space that was prepared as written zeros: the requests that they cause
//! to the disk, on kernels with and without `FALLOC_FL_WRITE_ZEROES`, and the state of the prepared
//! space after a kill.
//!
//! The disk is a namespace of the kernel's NVMe target over a SCSI disk in memory, which writes
//! zeros without a data transfer; FUA writes and flushes are counted at the NVMe disk.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::client::{Change, Client};
use super::direct::{BLOCK, STRIDE, WRITES};
use super::images::{SIZE, TABLES};
use super::serve::{serve, serve_without_state};
use super::system::{self, FileSystem, Mount, tool};
use super::trace::{self, Counts};
use crate::server::Server;

const CONFIG: &str = "/sys/kernel/config";
const SUBSYSTEM: &str = "first";

/// Bytes of an image with space for a long run of new clusters, and the offset of new clusters that
/// are not adjacent.
const LONG_SIZE: u64 = 40 * WRITES * STRIDE;
const SCATTERED: u64 = LONG_SIZE / 2;

/// Whether kernel and disk support written zeros.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WrittenZeros {
    Yes,
    No,
}

/// Counts all requests and prints the results.
pub fn run() -> Result<()> {
    system::load_all(&["crc32c_generic", "ext4", "xfs"])?;
    system::stop_background_writes()?;
    trace::prepare()?;
    let disk = nvme_disk()?;
    ensure!(system::has_fua(&disk)?, "the disk has no FUA");
    let zeros = written_zeros(&disk)?;
    println!(
        "NVMe over scsi_debug: {} zeros without being sent them",
        if zeros == WrittenZeros::Yes { "writes" } else { "writes no" }
    );
    for file_system in [FileSystem::Ext4, FileSystem::Xfs] {
        on_file_system(&disk, file_system, zeros)?;
    }
    Ok(())
}

/// A disk of the kernel's NVMe target, over a SCSI disk in memory.
fn nvme_disk() -> Result<PathBuf> {
    system::load("sd_mod", "")?;
    system::load("scsi_debug", "dev_size_mb=384 delay=0 lbpu=1 lbpws=1 lbprz=1")?;
    let below = system::scsi_disk("Linux")?;
    system::load("nvme_core", "multipath=N")?;
    system::load("nvme-loop", "")?;
    if !Path::new(CONFIG).join("nvmet").exists() {
        tool("mount", &["-t", "configfs", "config", CONFIG])?;
    }
    let target = Path::new(CONFIG).join("nvmet");
    let subsystem = target.join("subsystems").join(SUBSYSTEM);
    let namespace = subsystem.join("namespaces/1");
    let port = target.join("ports/1");
    for folder in [&subsystem, &namespace, &port] {
        std::fs::create_dir(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    system::write(subsystem.join("attr_allow_any_host"), "1")?;
    system::write(namespace.join("device_path"), below.to_str().context("a nameless disk")?)?;
    system::write(namespace.join("enable"), "1")?;
    system::write(port.join("addr_trtype"), "loop")?;
    std::os::unix::fs::symlink(&subsystem, port.join("subsystems").join(SUBSYSTEM))?;
    system::write("/dev/nvme-fabrics", &format!("transport=loop,nqn={SUBSYSTEM}"))?;
    let disk = system::disk("nvme0n1")?;
    // The device node exists before the attributes of its queue do.
    system::wait_for("the disk's queue", || system::has_fua(&disk).ok())?;
    Ok(disk)
}

/// Whether the disk writes zeros without a transfer, from its queue's attribute, which older
/// kernels lack.
fn written_zeros(disk: &Path) -> Result<WrittenZeros> {
    let name = disk.file_name().and_then(|name| name.to_str()).context("a nameless disk")?;
    let limit = format!("/sys/block/{name}/queue/write_zeroes_unmap_max_bytes");
    let has_limit = system::read(Path::new(&limit)).is_ok_and(|limit| limit != "0");
    Ok(if has_limit { WrittenZeros::Yes } else { WrittenZeros::No })
}

fn on_file_system(disk: &Path, file_system: FileSystem, zeros: WrittenZeros) -> Result<()> {
    println!("{}:", file_system.name());
    file_system.make(disk)?;
    let mount = Mount::new(file_system, disk)?;
    let folder = mount.place();
    preallocated(disk, folder, "raw", zeros)?;
    preallocated(disk, folder, "qcow2", zeros)?;
    set_aside(disk, folder)?;
    longer(disk, folder)?;
    allocating(disk, folder, zeros)?;
    killed(folder, zeros)?;
    mount.unmount()
}

/// An image of `preallocation=full`: its space is written, with or without
/// `FALLOC_FL_WRITE_ZEROES`.
fn preallocated(disk: &Path, folder: &Path, format: &str, zeros: WrittenZeros) -> Result<()> {
    let image = folder.join(format!("full.{format}"));
    let made = trace::count_synced(disk, || create(&image, format, "preallocation=full"))?;
    let is_sent = made.bytes >= SIZE;
    ensure!(
        is_sent == (zeros == WrittenZeros::No),
        "preallocation=full costs {made}: {} B",
        made.bytes
    );
    row(&format!("{format}, making it with preallocation=full"), made);
    let written = of_new_server(disk, &image, format, 0)?;
    row(&format!("{format}, preallocation=full"), written);
    ensure!(is_fua_alone(written, 1), "{written} for {WRITES} writes");
    let said = tool("blockhouse", &["info", "--format", format, name(&image)?])?;
    let line = said.lines().find(|line| line.starts_with("written zeroes ahead: "));
    let expected = if zeros == WrittenZeros::Yes { "yes" } else { "no" };
    ensure!(line.is_some_and(|line| line.ends_with(expected)), "info says {line:?}");
    Ok(())
}

/// An image of `preallocation=falloc`, for comparison: its space consists of unwritten extents.
fn set_aside(disk: &Path, folder: &Path) -> Result<()> {
    let image = folder.join("falloc.raw");
    create(&image, "raw", "preallocation=falloc")?;
    let written = of_new_server(disk, &image, "raw", 0)?;
    row("raw, preallocation=falloc", written);
    ensure!(written.metadata >= WRITES as u32, "{written}: unwritten extents cost the journal");
    Ok(())
}

/// The space that `resize --preallocation=full` has added.
fn longer(disk: &Path, folder: &Path) -> Result<()> {
    for format in ["raw", "qcow2"] {
        let image = folder.join(format!("longer.{format}"));
        tool("blockhouse", &["create", "--format", format, name(&image)?, &TABLES.to_string()])?;
        let words = ["resize", "--format", format, "--preallocation=full", name(&image)?];
        tool("blockhouse", &[&words[..], &[&SIZE.to_string()]].concat())?;
        let written = of_new_server(disk, &image, format, TABLES)?;
        row(&format!("{format}, resize --preallocation=full"), written);
        ensure!(is_fua_alone(written, 1), "{written} for {WRITES} writes");
    }
    Ok(())
}

/// Writes to new clusters, one after the other.
fn allocating(disk: &Path, folder: &Path, zeros: WrittenZeros) -> Result<()> {
    let image = folder.join("new.qcow2");
    tool("blockhouse", &["create", "--format", "qcow2", name(&image)?, &LONG_SIZE.to_string()])?;
    let server = serve(&image, &["--format", "qcow2"])?;
    write(&server, SCATTERED, 1)?;
    let second = trace::count_synced(disk, || write(&server, SCATTERED + 2 * STRIDE, 1))?;
    let written = trace::count_synced(disk, || write(&server, 0, WRITES))?;
    row("qcow2, the second new cluster, with what is prepared", second);
    row("qcow2, new clusters in a row, the first of them", written);
    match zeros {
        WrittenZeros::Yes => {
            ensure!(second.other > 0, "nothing was prepared: {second}");
            mapped_ahead(disk, &server, written)?;
        }
        WrittenZeros::No => {
            let Counts { fua, plain, metadata, flushes, other, .. } = written;
            let writes = WRITES as u32;
            let is_as_before = (fua, plain, flushes, other) == (writes, 2 * writes, writes, 0);
            ensure!(is_as_before && metadata >= writes, "{written}: not as without the call");
        }
    }
    server.stop()?;
    check(&image)
}

/// For a run of adjacent new clusters, a few of the writes write the refcounts and L2 entries of
/// many clusters. For new clusters that are not adjacent, each write writes its own.
fn mapped_ahead(disk: &Path, server: &Server, first: Counts) -> Result<()> {
    // The range that is mapped ahead doubles each time: the first, second, fifth and eleventh write
    // extend it.
    ensure!(is_fua_alone_and(first, 4), "{first} for the first {WRITES} of a run");
    ensure!(first.bytes <= 28 * BLOCK as u64, "{} bytes: each is a block", first.bytes);
    let next = trace::count(disk, || write(server, WRITES * STRIDE, WRITES))?;
    row("qcow2, the next of them", next);
    ensure!(is_fua_alone_and(next, 1), "{next} for the next {WRITES}");
    write(server, 2 * WRITES * STRIDE, 2 * WRITES)?;
    let later = trace::count_synced(disk, || write(server, 4 * WRITES * STRIDE, WRITES))?;
    row("qcow2, of those where 64 are mapped at once", later);
    ensure!(is_fua_alone(later, 1), "{later} for {WRITES} that are mapped");
    let many = trace::count(disk, || write(server, 5 * WRITES * STRIDE, 10 * WRITES))?;
    row("qcow2, ten times as many, with what they prepare", many);
    let Counts { fua, plain, .. } = many;
    let limit = 10 * WRITES as u32 + 2 * 5;
    ensure!(fua <= limit && plain == 0, "{many}: more than two for 64 beside their own");
    write(server, SCATTERED + 4 * STRIDE, 1)?;
    let scattered = trace::count_synced(disk, || {
        let offsets = (3..).map(|index| SCATTERED + 2 * index * STRIDE);
        write_at(server, offsets.take(WRITES as usize))
    })?;
    row("qcow2, new clusters, none after another", scattered);
    ensure!(is_fua_alone(scattered, 3), "{scattered} for {WRITES} new clusters");
    // One block each of data, refcounts and L2 entries.
    let bytes = scattered.bytes;
    ensure!(bytes <= 3 * WRITES * BLOCK as u64, "{bytes} bytes");
    Ok(())
}

/// The prepared space of a killed server is neither an error nor a leak; the next server uses it,
/// and frees the rest.
fn killed(folder: &Path, zeros: WrittenZeros) -> Result<()> {
    let image = folder.join("killed.qcow2");
    create(&image, "qcow2", "preallocation=off")?;
    let server = serve_without_state(&image, &["--format", "qcow2"])?;
    write(&server, TABLES, 2)?;
    server.kill()?;
    let left = length(&image)?;
    check(&image)?;
    // The file's length is larger in any case; only prepared space makes its allocated blocks
    // larger.
    let taken = image.metadata()?.blocks() * 512;
    let is_prepared = taken > left / 2;
    ensure!(is_prepared == (zeros == WrittenZeros::Yes), "{taken} of {left} bytes have space");
    let server = serve_without_state(&image, &["--format", "qcow2"])?;
    write(&server, 0, WRITES)?;
    ensure!(length(&image)? == left, "the space that was left is not used");
    server.stop()?;
    check(&image)?;
    let after = length(&image)?;
    ensure!(after < SIZE, "{after} bytes after an orderly end");
    println!(
        "  killed: {left} bytes, {taken} of them with space, no error and no leak; {after} after the next server's end"
    );
    Ok(())
}

fn create(image: &Path, format: &str, option: &str) -> Result<()> {
    let words = ["create", "--format", format, "-o", option, name(image)?, &SIZE.to_string()];
    tool("blockhouse", &words)?;
    Ok(File::open(image)?.sync_all()?)
}

/// Checks that the image has no errors and no leaks.
fn check(image: &Path) -> Result<()> {
    tool("blockhouse", &["check", "--format", "qcow2", name(image)?]).map(drop)
}

fn name(path: &Path) -> Result<&str> {
    path.to_str().context("a folder without a name")
}

fn length(image: &Path) -> Result<u64> {
    Ok(image.metadata().context("the image is gone")?.len())
}

/// Counts the writes of a new server, from `start` on, without those of the session mark.
fn of_new_server(disk: &Path, image: &Path, format: &str, start: u64) -> Result<Counts> {
    let server = serve(image, &["--format", format])?;
    if format == "qcow2" {
        write(&server, if start == 0 { TABLES } else { 0 }, 1)?;
    }
    let counts = trace::count_synced(disk, || write(&server, start, WRITES))?;
    server.stop()?;
    Ok(counts)
}

/// Durable writes of a block each, one for each cluster.
fn write(server: &Server, start: u64, count: u64) -> Result<()> {
    write_at(server, (0..count).map(|index| start + index * STRIDE))
}

fn write_at(server: &Server, offsets: impl Iterator<Item = u64>) -> Result<()> {
    let mut client = Client::connect(server.socket())?;
    for offset in offsets {
        let data = vec![0x5a; BLOCK];
        client.change(&Change::WriteFua { offset, data })?;
    }
    client.close()
}

/// Whether there were `each` FUA writes for each durable write, and nothing else: no flush, no
/// journal write.
fn is_fua_alone(counts: Counts, each: u32) -> bool {
    counts.fua == each * WRITES as u32 && counts.total() == counts.fua
}

/// Whether there was a FUA write for each durable write, two more for each of `batches` writebacks
/// of metadata, and nothing else.
fn is_fua_alone_and(counts: Counts, batches: u32) -> bool {
    counts.fua == WRITES as u32 + 2 * batches && counts.total() == counts.fua
}

fn row(name: &str, counts: Counts) {
    println!("  {name:56} {counts}");
}
