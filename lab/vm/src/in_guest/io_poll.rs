//! Polled completions: a server with `--io-poll on` writes and reads disks that have a queue
//! without interrupts.
//!
//! Evidence: the data is right and the interrupt counts of the disk's queues do not rise, while
//! with `off` they rise with every request. Writes to files raise interrupts in any case, and so do
//! durable writes that need a flush. Durable writes reach the disk as without polling. A server
//! without requests sleeps.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::client::{Change, Client};
use super::direct::{BLOCK, STRIDE, WRITES};
use super::images::{SIZE, State};
use super::serve::serve;
use super::system::{self, FileSystem, Mount};
use super::trace::{self, Counts};
use crate::server::{Export, Server};

/// The time between two looks at a server's processor time.
const LOOK: Duration = Duration::from_millis(100);
/// The server's options, and whether it polls with them.
const WAYS: &[(&[&str], bool)] = &[
    (&["--io-poll", "on"], true),
    (&["--io-poll", "on", "--fixed-files", "on"], true),
    (&["--io-poll", "off"], false),
];

/// What was counted while a server was used: the interrupts of the disk's queues, and the disk
/// requests of the durable writes.
struct ServerUse {
    writes: u64,
    reads: u64,
    durable: u64,
    requests: Counts,
}

/// Runs all cases on the disks with these serial numbers.
pub fn run(nvme: &str, virtio: &str) -> Result<()> {
    // With multipath, the requests go to another device than the one that is traced.
    system::load("nvme_core", "multipath=N")?;
    system::load("nvme", "poll_queues=1")?;
    system::load("virtio_pci", "")?;
    system::load("virtio_blk", "poll_queues=1")?;
    system::load_all(&["crc32c_generic", "ext4"])?;
    system::stop_background_writes()?;
    trace::prepare()?;
    for serial in [nvme, virtio] {
        let disk = system::disk_of(serial)?;
        let has_fua = system::has_fua(&disk)?;
        ensure!(has_fua == (serial == nvme), "{serial}: FUA is {has_fua}");
        show("bare", &disk, &disk, "raw")?;
        FileSystem::Ext4.make(&disk)?;
        let mount = Mount::new(FileSystem::Ext4, &disk)?;
        for (state, format) in [(State::RawWritten, "raw"), (State::Qcow2Written, "qcow2")] {
            show(state.name(), &disk, &state.make(mount.place(), "image")?, format)?;
        }
        show_exception(&disk, mount.place())?;
        mount.unmount()?;
    }
    Ok(())
}

/// Serves `image`, which is `disk` or is on it, with all options of [`WAYS`].
fn show(name: &str, disk: &Path, image: &Path, format: &str) -> Result<()> {
    for (way, polls) in WAYS {
        let server = serve(image, &[&["--format", format], *way].concat())?;
        let found = use_server(&server, disk)?;
        server.stop()?;
        let ServerUse { writes, reads, durable, requests } = &found;
        let words = way.join(" ");
        println!(
            "  {}, {name}, {words}: {writes} interrupts for writes, {reads} for reads, {durable} \
             for durable writes ({requests})",
            disk.display()
        );
        found.check(*polls, image == disk, system::has_fua(disk)?)?;
    }
    Ok(())
}

/// A backing file in memory, which cannot be polled, below an image in `folder` on `disk`: reads of
/// it return the right data, the server logs one warning, and reads of the image's own data are
/// polled.
fn show_exception(disk: &Path, folder: &Path) -> Result<()> {
    let (backing, image) =
        (State::RawWritten.make(Path::new("/tmp"), "backing")?, folder.join("overlay"));
    let options = format!("backing_file={},backing_fmt=raw", backing.display());
    let name = image.to_str().context("a folder without a name")?;
    system::tool(
        "blockhouse",
        &["create", "--format", "qcow2", "-o", &options, name, &SIZE.to_string()],
    )?;
    let log = Path::new("/tmp/log");
    let mut command = Command::new("blockhouse");
    command.args(["serve", name, "--format", "qcow2", "--io-poll", "on", "--state", "off"]);
    command.args(["--allow-path", "/tmp"]);
    command.stderr(File::create(log)?);
    let server = Server::start(command, Export::Nbd, Path::new("/tmp/overlay.sock"))?;
    let mut client = Client::connect(server.socket())?;
    read_all(&mut client, Some(0xa5))?;
    write_all(&mut client, 3)?;
    let reads = interrupts_of(disk, || read_all(&mut client, Some(3)))?;
    client.close()?;
    server.stop()?;
    let said = system::read(log)?;
    println!(
        "  {}, qcow2 over a file in memory: {reads} interrupts for reads; {said}",
        disk.display()
    );
    // Standard error also has a line of the loader that starts programs here: it cannot start a
    // launcher.
    let warnings: Vec<_> = said.lines().filter(|line| line.contains(" WARN ")).collect();
    let is_expected = |line: &&str| line.contains(&backing.display().to_string());
    ensure!(warnings.len() == 1 && warnings.iter().all(is_expected), "one warning is expected");
    ensure!(reads == 0, "reads that are not polled for");
    Ok(())
}

fn use_server(server: &Server, disk: &Path) -> Result<ServerUse> {
    let mut client = Client::connect(server.socket())?;
    // The first read loads a table of a qcow2 image.
    read_all(&mut client, None)?;
    rustix::fs::sync();
    let writes = interrupts_of(disk, || write_all(&mut client, 1))?;
    let reads = interrupts_of(disk, || read_all(&mut client, Some(1)))?;
    let mut requests = Counts::default();
    let durable = interrupts_of(disk, || {
        requests = trace::count(disk, || {
            (0..WRITES).try_for_each(|index| {
                let data = vec![2; BLOCK];
                client.change(&Change::WriteFua { offset: index * STRIDE, data })
            })
        })?;
        Ok(())
    })?;
    read_all(&mut client, Some(2))?;
    sleeps(server)?;
    client.close()?;
    Ok(ServerUse { writes, reads, durable, requests })
}

/// Fills all blocks with `mark`, with all writes in flight at once.
fn write_all(client: &mut Client, mark: u8) -> Result<()> {
    let write = |index| Change::Write { offset: index * STRIDE, data: vec![mark; BLOCK] };
    client.together(&(0..WRITES).map(write).collect::<Vec<_>>())
}

/// Reads all blocks, one after the other; they must be full of `mark`.
fn read_all(client: &mut Client, mark: Option<u8>) -> Result<()> {
    for offset in (0..WRITES).map(|index| index * STRIDE) {
        let data = client.read(offset, BLOCK as u32)?;
        let is_right = mark.is_none_or(|mark| data == [mark; BLOCK]);
        ensure!(is_right, "the block at {offset} is not what was written");
    }
    Ok(())
}

impl ServerUse {
    fn check(&self, polls: bool, on_device: bool, has_fua: bool) -> Result<()> {
        let Self { writes, reads, durable, requests } = self;
        let (count, bytes) = (WRITES as u32, WRITES * BLOCK as u64);
        let right = if has_fua {
            Counts { fua: count, bytes, ..Counts::default() }
        } else {
            Counts { plain: count, flushes: count, bytes, ..Counts::default() }
        };
        ensure!(*requests == right, "durable writes became {requests}");
        let expect = |what: &str, polled: bool, interrupts: u64, at_least: u64| {
            let is_right = if polled { interrupts == 0 } else { interrupts >= at_least };
            ensure!(is_right, "{what} that are {}polled for", if polled { "" } else { "not " });
            Ok(())
        };
        // Requests in flight together may share an interrupt.
        expect("writes", polls && on_device, *writes, 1)?;
        expect("reads", polls, *reads, WRITES)?;
        expect("durable writes", polls && on_device && has_fua, *durable, WRITES)
    }
}

/// The number of interrupts of the disk's queues while `work` runs.
fn interrupts_of(disk: &Path, work: impl FnOnce() -> Result<()>) -> Result<u64> {
    let prefix = queue_prefix(disk)?;
    let before = interrupts(&prefix)?;
    work()?;
    Ok(interrupts(&prefix)? - before)
}

/// The name prefix of the interrupts of the disk's queues.
fn queue_prefix(disk: &Path) -> Result<String> {
    let name = disk.file_name().and_then(|name| name.to_str()).context("a nameless disk")?;
    if let Some((controller, _)) = name.strip_prefix("nvme").and_then(|rest| rest.split_once('n')) {
        return Ok(format!("nvme{controller}q"));
    }
    let device = std::fs::canonicalize(format!("/sys/block/{name}/device"))?;
    let device = device.file_name().and_then(|name| name.to_str()).context("no such device")?;
    Ok(format!("{device}-req"))
}

/// The number of all interrupts so far whose names have this prefix.
fn interrupts(prefix: &str) -> Result<u64> {
    let table = system::read(Path::new("/proc/interrupts"))?;
    let is_ours = |line: &&str| line.split_whitespace().any(|word| word.starts_with(prefix));
    let lines: Vec<_> = table.lines().filter(is_ours).collect();
    ensure!(!lines.is_empty(), "no interrupt is called {prefix}:\n{table}");
    // A line has a number, a count for each processor, and words.
    let counts = |line: &&str| {
        line.split_whitespace().skip(1).map_while(|word| word.parse::<u64>().ok()).sum::<u64>()
    };
    Ok(lines.iter().map(counts).sum())
}

/// Waits until the server uses no processor time between two looks; a polling loop always does.
fn sleeps(server: &Server) -> Result<()> {
    let mut before = None;
    system::wait_for("sleep of an idle server", || {
        std::thread::sleep(LOOK);
        let now = server.processor_time().ok()?;
        (before.replace(now) == Some(now)).then_some(())
    })
}
