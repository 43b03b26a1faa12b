//! The cost of durable writes: requests to the disk for the same writes by the bare kernel and by
//! our server, on every kind of disk, file system, image, engine and cache mode.
//!
//! [`Report`] judges each row. A server that ignores flushes tests the judgement: it must fail.

use std::path::Path;

use anyhow::{Result, ensure};

use super::client::{Change, Client};
use super::direct::{self, BLOCK, Caching, STRIDE, WRITES, WriteMethod};
use super::disk::Kind;
use super::images::{State, TABLES, put};
use super::report::{Report, Tolerance, is_durable};
use super::serve::serve;
use super::system::{self, FileSystem, Mount};
use super::trace::{self, Counts};
use crate::server::Server;

/// The writes, and how the server makes them.
#[derive(Clone, Copy)]
struct Row {
    state: State,
    method: WriteMethod,
    cache: &'static str,
    engine: &'static str,
}

const fn row(state: State, method: WriteMethod) -> Row {
    Row { state, method, cache: "none", engine: "io_uring" }
}

const fn cached(state: State, method: WriteMethod, cache: &'static str) -> Row {
    Row { cache, ..row(state, method) }
}

const fn by(engine: &'static str, method: WriteMethod) -> Row {
    Row { engine, ..row(State::RawWritten, method) }
}

/// The rows for images in a file system, on every disk.
const ROWS: &[Row] = &[
    row(State::RawWritten, WriteMethod::Each),
    row(State::RawWritten, WriteMethod::Together),
    row(State::RawWritten, WriteMethod::FlushEach),
    row(State::RawWritten, WriteMethod::FlushOnce),
    row(State::RawUnwritten, WriteMethod::Each),
    row(State::RawHole, WriteMethod::Each),
    row(State::Qcow2Written, WriteMethod::Each),
    row(State::Qcow2Written, WriteMethod::Together),
    row(State::Qcow2Unwritten, WriteMethod::Each),
    row(State::Qcow2New, WriteMethod::Each),
    row(State::Qcow2New, WriteMethod::Together),
    row(State::Qcow2New, WriteMethod::FlushOnce),
];
/// The same on the disk itself.
const DEVICE_ROWS: &[Row] = &[
    row(State::RawWritten, WriteMethod::Each),
    by("linux-aio", WriteMethod::Each),
    by("threads", WriteMethod::Each),
    row(State::RawWritten, WriteMethod::Together),
    by("linux-aio", WriteMethod::Together),
    by("threads", WriteMethod::Together),
    row(State::RawWritten, WriteMethod::FlushEach),
    row(State::RawWritten, WriteMethod::FlushOnce),
    row(State::Qcow2Written, WriteMethod::Each),
    row(State::Qcow2New, WriteMethod::Each),
    row(State::Qcow2New, WriteMethod::Together),
];
/// Rows for which only the disk's FUA support matters: counted on one disk with FUA and one
/// without, in a file system.
const MORE_ROWS: &[Row] = &[
    by("linux-aio", WriteMethod::Each),
    by("linux-aio", WriteMethod::Together),
    by("threads", WriteMethod::Each),
    by("threads", WriteMethod::Together),
    cached(State::RawWritten, WriteMethod::Write, "directsync"),
    cached(State::Qcow2Written, WriteMethod::Write, "directsync"),
    cached(State::RawWritten, WriteMethod::Each, "writeback"),
    cached(State::RawWritten, WriteMethod::Together, "writeback"),
    cached(State::RawWritten, WriteMethod::FlushOnce, "writeback"),
    cached(State::RawWritten, WriteMethod::Write, "writethrough"),
];
/// The same on the disk itself.
const MORE_DEVICE_ROWS: &[Row] = &[
    cached(State::RawWritten, WriteMethod::Write, "directsync"),
    cached(State::RawWritten, WriteMethod::Each, "writeback"),
    cached(State::RawWritten, WriteMethod::FlushOnce, "writeback"),
    cached(State::RawWritten, WriteMethod::Write, "writethrough"),
];

impl Row {
    fn name(self) -> String {
        let mut name = format!("{}: {}", self.state.name(), self.method.name());
        let usual = row(self.state, self.method);
        for (word, usual) in [(self.cache, usual.cache), (self.engine, usual.engine)] {
            if word != usual {
                name += &format!(", {word}");
            }
        }
        name
    }

    fn tolerance(self) -> Tolerance {
        match (self.method, self.state) {
            (WriteMethod::Together, State::Qcow2New) => Tolerance::Metadata,
            (WriteMethod::Together, _) => Tolerance::FlushSharing,
            _ => Tolerance::None,
        }
    }

    fn format(self) -> &'static str {
        if self.state < State::Qcow2Written { "raw" } else { "qcow2" }
    }

    /// Starts a server of `image`.
    fn serve(self, image: &Path) -> Result<Server> {
        let words = ["--format", self.format(), "--cache", self.cache, "--engine", self.engine];
        serve(image, &words)
    }

    /// Runs the baseline on the file or disk `path`: the minimum of system calls.
    fn run_baseline(self, path: &Path) -> Result<()> {
        let caching = match self.cache {
            "none" | "directsync" => Caching::Direct,
            _ => Caching::PageCache,
        };
        match self.state {
            State::Qcow2New => direct::run_allocating(path, self.method, TABLES),
            _ => direct::run(path, self.method, caching),
        }
    }
}

/// Measures and prints everything on disks of these kinds.
pub fn run(kinds: &[Kind]) -> Result<()> {
    system::load_all(&["crc32c_generic", "ext4", "xfs"])?;
    system::stop_background_writes()?;
    trace::prepare()?;
    let mut report = Report::default();
    for kind in kinds {
        let disk = kind.find()?;
        let fua = if system::has_fua(&disk)? { "FUA" } else { "no FUA" };
        let title = format!("{} ({fua})", kind.name());
        let (more, more_of_device) = match kind {
            Kind::Nvme | Kind::Virtio => (MORE_ROWS, MORE_DEVICE_ROWS),
            _ => (&[][..], &[][..]),
        };
        for file_system in [FileSystem::Ext4, FileSystem::Xfs] {
            report.section(&format!("{title}, {}", file_system.name()));
            on_file_system(&disk, file_system, &[ROWS, more].concat(), &mut report)?;
        }
        report.section(&format!("{title}, raw device"));
        on_device(&disk, &[DEVICE_ROWS, more_of_device].concat(), &mut report)?;
        control(&disk)?;
    }
    report.finish()
}

/// Counts the rows in a file system. All images are made first, so that the file system has the
/// same state for all rows.
fn on_file_system(
    disk: &Path,
    file_system: FileSystem,
    rows: &[Row],
    report: &mut Report,
) -> Result<()> {
    file_system.make(disk)?;
    let mount = Mount::new(file_system, disk)?;
    let mut baselines = Vec::new();
    let mut images = Vec::new();
    for row in rows {
        let bare = row.state.bare().make(mount.place(), &format!("bare{}", baselines.len()))?;
        settle();
        baselines.push(trace::count(disk, || row.run_baseline(&bare))?);
        std::fs::remove_file(bare)?;
        images.push(row.state.make(mount.place(), &format!("ours{}.qcow2", images.len()))?);
    }
    for (index, row) in rows.iter().enumerate() {
        let ours = count_ours(disk, *row, &images[index])?;
        report.row(&row.name(), row.method, row.tolerance(), ours, baselines[index]);
    }
    let image = State::Qcow2Written.make(mount.place(), "first")?;
    count_first(disk, &image)?;
    mount.unmount()
}

fn on_device(disk: &Path, rows: &[Row], report: &mut Report) -> Result<()> {
    for row in rows {
        let baseline = trace::count(disk, || row.run_baseline(disk))?;
        if row.format() == "qcow2" {
            put(&row.state.make(Path::new("/tmp"), "image")?, disk)?;
        }
        let ours = count_ours(disk, *row, disk)?;
        report.row(&row.name(), row.method, row.tolerance(), ours, baseline);
    }
    Ok(())
}

/// Counts the requests to the disk by a server of `image`.
fn count_ours(disk: &Path, row: Row, image: &Path) -> Result<Counts> {
    let server = row.serve(image)?;
    if row.format() == "qcow2" {
        warm_up(&server)?;
    }
    settle();
    let counts = trace::count(disk, || ask(&server, row.method))?;
    server.stop()?;
    Ok(counts)
}

/// Makes one write that is not counted: the first change of an opened image writes the session
/// mark, and the first cluster of an image needs new tables.
fn warm_up(server: &Server) -> Result<()> {
    let mut client = Client::connect(server.socket())?;
    client.change(&Change::WriteFua { offset: TABLES, data: vec![0xc3; BLOCK] })?;
    client.close()
}

/// Counts the first durable write to an opened image: the session mark costs one more write and one
/// more flush.
fn count_first(disk: &Path, image: &Path) -> Result<()> {
    let server = row(State::Qcow2Written, WriteMethod::Each).serve(image)?;
    settle();
    let counts = trace::count(disk, || warm_up(&server))?;
    server.stop()?;
    let writes = counts.fua + counts.plain;
    ensure!(writes <= 2 && counts.flushes <= 2, "the first durable write costs {counts}");
    println!("  qcow2, written: the first FUA of a session    {counts}");
    Ok(())
}

/// Writes back the preparation of the images, so that it is not counted.
fn settle() {
    rustix::fs::sync();
}

/// Sends the writes to the server.
fn ask(server: &Server, method: WriteMethod) -> Result<()> {
    let mut client = Client::connect(server.socket())?;
    let data = |_| vec![0xc3; BLOCK];
    let plain = |index| Change::Write { offset: index * STRIDE, data: data(index) };
    let durable = |index| Change::WriteFua { offset: index * STRIDE, data: data(index) };
    match method {
        WriteMethod::Each => (0..WRITES).try_for_each(|index| client.change(&durable(index)))?,
        WriteMethod::Together => client.together(&(0..WRITES).map(durable).collect::<Vec<_>>())?,
        WriteMethod::Write => (0..WRITES).try_for_each(|index| client.change(&plain(index)))?,
        WriteMethod::FlushEach => (0..WRITES).try_for_each(|index| {
            client.change(&plain(index))?;
            client.change(&Change::Flush)
        })?,
        WriteMethod::FlushOnce => {
            (0..WRITES).try_for_each(|index| client.change(&plain(index)))?;
            client.change(&Change::Flush)?;
        }
    }
    client.close()
}

/// The control: the judgement must reject a server that ignores flushes.
fn control(disk: &Path) -> Result<()> {
    FileSystem::Ext4.make(disk)?;
    let mount = Mount::new(FileSystem::Ext4, disk)?;
    let image = State::RawWritten.make(mount.place(), "control")?;
    let row = cached(State::RawWritten, WriteMethod::Each, "unsafe");
    let counts = count_ours(disk, row, &image)?;
    mount.unmount()?;
    ensure!(!is_durable(WriteMethod::Each, counts), "--cache unsafe passed for durable: {counts}");
    println!("control: --cache unsafe is found out ({counts})");
    Ok(())
}
