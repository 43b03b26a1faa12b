//! What durable writes cost: requests to the disk for the same writes by the bare kernel and by our
//! server, on every kind of disk, file system and image.
//!
//! Two judgements on each row. Not more than the bare kernel: neither more requests that make durable
//! (FUA and flushes) nor more writes. And not less than durability needs: every acknowledged write was
//! FUA or has a flush behind it. The second is itself tested, on a server that ignores flushes.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use super::client::{Change, Client};
use super::direct::{self, BLOCK, STRIDE, WRITES, Way};
use super::images::{State, TABLES};
use super::serve::serve;
use super::system::{self, FileSystem, Mount};
use super::trace::{self, Counts};
use crate::vm::server::Server;

/// The rows for images in a file system.
const ROWS: &[(State, Way)] = &[
    (State::RawWritten, Way::Each),
    (State::RawWritten, Way::Together),
    (State::RawWritten, Way::FlushEach),
    (State::RawWritten, Way::FlushOnce),
    (State::RawUnwritten, Way::Each),
    (State::RawHole, Way::Each),
    (State::Qcow2Written, Way::Each),
    (State::Qcow2Written, Way::Together),
    (State::Qcow2Unwritten, Way::Each),
    (State::Qcow2New, Way::Each),
    (State::Qcow2New, Way::Together),
    (State::Qcow2New, Way::FlushOnce),
];
const DEVICE_WAYS: [Way; 4] = [Way::Each, Way::Together, Way::FlushEach, Way::FlushOnce];

/// Which kinds of disk are asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Kinds {
    /// Every kind.
    #[default]
    All,
    /// NVMe, which has FUA, and virtio-blk, which has not.
    OneOfEach,
}

/// A disk of the guest.
struct Disk {
    name: &'static str,
    node: PathBuf,
}

/// Measures and prints everything.
pub fn run(kinds: Kinds) -> Result<()> {
    let disks = disks(kinds)?;
    trace::prepare()?;
    let mut report = Report::default();
    for disk in &disks {
        let kind = if system::has_fua(&disk.node)? { "FUA" } else { "no FUA" };
        let title = format!("{} ({kind})", disk.name);
        for file_system in [FileSystem::Ext4, FileSystem::Xfs] {
            report.section(&format!("{title}, {}", file_system.name()));
            on_file_system(disk, file_system, &mut report)?;
        }
        report.section(&format!("{title}, raw device"));
        on_device(disk, &mut report)?;
    }
    control(&disks[0])?;
    report.finish()
}

/// Every kind of disk that the guest has, as the host attached it or as a module makes it.
fn disks(kinds: Kinds) -> Result<Vec<Disk>> {
    // With multipath the disk that is traced is not the one that the requests go to.
    system::load("nvme_core", "multipath=N")?;
    for module in ["nvme", "virtio_pci", "virtio_blk", "virtio_scsi", "sd_mod"] {
        system::load(module, "")?;
    }
    for module in ["crc32c_generic", "ext4", "xfs"] {
        system::load(module, "")?;
    }
    system::stop_background_writes()?;
    let nvme = Disk { name: "NVMe", node: system::disk_of("Nvme")? };
    let virtio = Disk { name: "virtio-blk", node: system::disk_of("Virtio")? };
    if kinds == Kinds::OneOfEach {
        return Ok(vec![nvme, virtio]);
    }
    let scsi = Disk { name: "SCSI dpofua", node: system::scsi_disk("QEMU")? };
    let attached = [nvme, scsi, virtio];
    system::load("scsi_debug", "dev_size_mb=320 delay=0 lbpu=1")?;
    system::load("null_blk", "nr_devices=0")?;
    let made = [
        Disk { name: "scsi_debug", node: system::scsi_disk("Linux")? },
        Disk { name: "null_blk fua=1", node: null_blk("nullb0", "1")? },
        Disk { name: "null_blk fua=0", node: null_blk("nullb1", "0")? },
    ];
    Ok(attached.into_iter().chain(made).collect())
}

/// A disk in memory with a write cache of its own.
fn null_blk(name: &str, fua: &str) -> Result<PathBuf> {
    let config = Path::new("/sys/kernel/config");
    if !config.join("nullb").exists() {
        system::tool("mount", &["-t", "configfs", "config", "/sys/kernel/config"])?;
    }
    let folder = config.join("nullb").join(name);
    std::fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let settings = [
        ("size", "320"),
        ("memory_backed", "1"),
        ("cache_size", "64"),
        ("fua", fua),
        ("power", "1"),
    ];
    for (setting, value) in settings {
        system::write(folder.join(setting), value)?;
    }
    system::disk(name)
}

fn on_file_system(disk: &Disk, file_system: FileSystem, report: &mut Report) -> Result<()> {
    file_system.make(&disk.node)?;
    let mount = Mount::new(file_system, &disk.node)?;
    let mut floors = Vec::new();
    let mut images = Vec::new();
    for (state, way) in ROWS {
        let bare = state.bare().make(mount.place(), &format!("bare{}", floors.len()))?;
        settle();
        floors.push(trace::count(&disk.node, || match state {
            State::Qcow2New => direct::run_allocating(&bare, *way, TABLES),
            _ => direct::run(&bare, *way),
        })?);
        std::fs::remove_file(bare)?;
        images.push(state.make(mount.place(), &format!("ours{}.qcow2", images.len()))?);
    }
    for (index, (state, way)) in ROWS.iter().enumerate() {
        let format = if *state < State::Qcow2Written { "raw" } else { "qcow2" };
        let server = serve(&images[index], &["--format", format])?;
        warm_up(&server, *state)?;
        settle();
        let ours = trace::count(&disk.node, || ask(&server, *way))?;
        let name = format!("{}: {}", state.name(), way.name());
        report.row(&name, *way, ours, floors[index]);
        server.stop()?;
    }
    mount.unmount()
}

fn on_device(disk: &Disk, report: &mut Report) -> Result<()> {
    for way in DEVICE_WAYS {
        let floor = trace::count(&disk.node, || direct::run(&disk.node, way))?;
        for engine in ["io_uring", "linux-aio", "threads"] {
            let server = serve(&disk.node, &["--format", "raw", "--engine", engine])?;
            let ours = trace::count(&disk.node, || ask(&server, way))?;
            report.row(&format!("{}: {engine}", way.name()), way, ours, floor);
            server.stop()?;
        }
    }
    Ok(())
}

/// The first cluster of an image needs tables of its own; those to be counted are others.
fn warm_up(server: &Server, state: State) -> Result<()> {
    if state != State::Qcow2New {
        return Ok(());
    }
    let mut client = Client::connect(server.socket())?;
    client.change(&Change::WriteFua { offset: TABLES, data: vec![0xc3; BLOCK] })?;
    client.close()
}

/// Lets nothing of what prepared the images be counted.
fn settle() {
    rustix::fs::sync();
}

/// Does the writes by the server.
fn ask(server: &Server, way: Way) -> Result<()> {
    let mut client = Client::connect(server.socket())?;
    let data = |_| vec![0xc3; BLOCK];
    let plain = |index| Change::Write { offset: index * STRIDE, data: data(index) };
    let durable = |index| Change::WriteFua { offset: index * STRIDE, data: data(index) };
    match way {
        Way::Each => (0..WRITES).try_for_each(|index| client.change(&durable(index)))?,
        Way::Together => client.together(&(0..WRITES).map(durable).collect::<Vec<_>>())?,
        Way::FlushEach => (0..WRITES).try_for_each(|index| {
            client.change(&plain(index))?;
            client.change(&Change::Flush)
        })?,
        Way::FlushOnce => {
            (0..WRITES).try_for_each(|index| client.change(&plain(index)))?;
            client.change(&Change::Flush)?;
        }
    }
    client.close()
}

/// A server that ignores flushes must be found out.
fn control(disk: &Disk) -> Result<()> {
    FileSystem::Ext4.make(&disk.node)?;
    let mount = Mount::new(FileSystem::Ext4, &disk.node)?;
    let image = State::RawWritten.make(mount.place(), "control")?;
    let server = serve(&image, &["--format", "raw", "--cache", "unsafe"])?;
    settle();
    let counts = trace::count(&disk.node, || ask(&server, Way::Each))?;
    server.stop()?;
    mount.unmount()?;
    ensure!(!is_durable(Way::Each, counts), "--cache unsafe passed for durable: {counts}");
    println!("control: --cache unsafe is found out ({counts})");
    Ok(())
}

/// Whether these requests can have made all writes durable before they were answered.
fn is_durable(way: Way, counts: Counts) -> bool {
    let written = u64::from(counts.fua + counts.plain);
    let needed = match way {
        Way::Each | Way::FlushEach => WRITES,
        Way::Together | Way::FlushOnce => 1,
    };
    written >= WRITES && u64::from(counts.fua + counts.flushes) >= needed
}

/// Whether the server asks the disk for more than the bare kernel does.
///
/// How much the kernel's threads share when they write at the same time depends on who comes first;
/// there a write and a flush for each are no worse. What of a journal is merged into one request is
/// chance as well: a little more counts as the same.
fn is_worse(way: Way, ours: Counts, floor: Counts) -> bool {
    let at_least = if way == Way::Together { WRITES as u32 } else { 0 };
    let expensive = |counts: Counts| counts.fua + counts.flushes;
    let all = |counts: Counts| counts.total() - counts.metadata;
    expensive(ours) > expensive(floor).max(at_least)
        || all(ours) > all(floor).max(2 * at_least)
        || ours.metadata > floor.metadata + floor.metadata / 10 + 2
}

/// The table, and what is wrong in it.
#[derive(Default)]
struct Report {
    wrong: Vec<String>,
    section: String,
}

impl Report {
    fn section(&mut self, title: &str) {
        println!("{title}");
        title.clone_into(&mut self.section);
    }

    fn row(&mut self, name: &str, way: Way, ours: Counts, floor: Counts) {
        let verdict = if !is_durable(way, ours) {
            "NOT DURABLE"
        } else if is_worse(way, ours, floor) {
            "WORSE"
        } else if ours.total() - ours.metadata < floor.total() - floor.metadata {
            "better"
        } else {
            ""
        };
        println!("  {name:40} {ours:44} {floor:44} {verdict}");
        if verdict.chars().all(char::is_uppercase) && !verdict.is_empty() {
            self.wrong.push(format!("{}: {name}: {ours} against {floor}", self.section));
        }
    }

    fn finish(self) -> Result<()> {
        if !self.wrong.is_empty() {
            bail!("{} rows are wrong:\n{}", self.wrong.len(), self.wrong.join("\n"));
        }
        Ok(())
    }
}
