//! A file system on a full thin pool: the kernel accepts writes into its page cache, cannot write
//! them back, and reports that once, as ENOSPC. No flush may succeed afterwards.
//!
//! The pool fails writes that it has no space for (`error_if_no_space`), so that a file system on
//! it gets an error at writeback, and reports its own errno.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::client::{Change, Client};
use super::serve::serve;
use super::system::{self, FileSystem, Mount, tool};

const MIB: u64 = 1 << 20;
const SECTOR: u64 = 512;
/// The pool's space for its metadata and for data, and the size of the thin disk, which is larger.
const TABLES: u64 = 8 * MIB;
const ROOM: u64 = 96 * MIB;
const CLAIMED: u64 = 512 * MIB;
/// Bytes in an image, and in each write.
const SIZE: u64 = 256 * MIB;
const PIECE: u64 = MIB / 4;
/// Bytes that are written: well above the pool's space, and well below the limit of the page cache.
const WRITTEN: u64 = 128 * MIB;
/// The offset of durable writes, after all others.
const DURABLE: u64 = SIZE - PIECE;

/// Fills the pool on the disk `serial` through a server, on each file system.
pub fn run(serial: &str) -> Result<()> {
    system::load_nvme()?;
    system::load_all(&["crc32c_generic", "ext4", "xfs", "dm-thin-pool"])?;
    let disk = system::disk_of(serial)?;
    system::stop_background_writes()?;
    for file_system in [FileSystem::Ext4, FileSystem::Xfs] {
        let thin = make_thin(&disk)?;
        file_system.make(&thin)?;
        let mount = Mount::new(file_system, &thin)?;
        let outcome = fill(&mount.place().join("image"), file_system);
        // Not unmounted in order: the file system has no space to write its metadata.
        drop(mount);
        outcome?;
        for name in ["thin", "pool", "data", "tables"] {
            tool("dmsetup", &["remove", "--force", "--retry", name])?;
        }
    }
    Ok(())
}

/// A thin disk of [`CLAIMED`] bytes, on a new pool with less space.
fn make_thin(disk: &Path) -> Result<PathBuf> {
    let node = disk.display();
    let sectors = |bytes: u64| bytes / SECTOR;
    let part = |name: &str, start: u64, length: u64| {
        let table = format!("0 {} linear {node} {}", sectors(length), sectors(start));
        tool("dmsetup", &["create", name, "--table", &table])?;
        system::disk(&format!("mapper/{name}"))
    };
    let (tables, data) = (part("tables", 0, TABLES)?, part("data", TABLES, ROOM)?);
    // A new pool formats a metadata device that begins with zeros.
    let first = format!("of={}", tables.display());
    tool("dd", &["if=/dev/zero", &first, "bs=4096", "count=1", "conv=fsync"])?;
    let (tables, data) = (tables.display(), data.display());
    let options = "128 0 1 error_if_no_space";
    let pool = format!("0 {} thin-pool {tables} {data} {options}", sectors(ROOM));
    tool("dmsetup", &["create", "pool", "--table", &pool])?;
    let pool = system::disk("mapper/pool")?;
    tool("dmsetup", &["message", "pool", "0", "create_thin 0"])?;
    let thin = format!("0 {} thin {} 0", sectors(CLAIMED), pool.display());
    tool("dmsetup", &["create", "thin", "--table", &thin])?;
    system::disk("mapper/thin")
}

/// Writes more than the pool has space for, and asks for durability after data was lost.
fn fill(image: &Path, file_system: FileSystem) -> Result<()> {
    File::create(image)?.set_len(SIZE)?;
    let server = serve(image, &["--format", "raw", "--cache", "writeback"])?;
    let mut client = Client::connect(server.socket())?;
    let piece = || vec![0x5a; PIECE as usize];
    for offset in (0..WRITTEN).step_by(PIECE as usize) {
        let write = Change::Write { offset, data: piece() };
        client.change(&write).with_context(|| format!("the page cache at {offset}"))?;
    }
    // Starts the writeback that the kernel starts by itself after some time. This open file gets
    // the error once for itself, and the server's open file gets it, too.
    let written_back = File::open(image)?.sync_all();
    let durable = client.change(&Change::WriteFua { offset: DURABLE, data: piece() });
    let flushes = [client.change(&Change::Flush), client.change(&Change::Flush)];
    let name = file_system.name();
    let shown = |outcome: &Result<()>| match outcome {
        Ok(()) => "ok".into(),
        Err(error) => format!("{error:#}"),
    };
    println!(
        "  {name:5} written back: {written_back:?}; a durable write: {}; flushes: {}, {}",
        shown(&durable),
        shown(&flushes[0]),
        shown(&flushes[1]),
    );
    ensure!(written_back.is_err(), "{name}: there was room for everything");
    ensure!(durable.is_err(), "{name}: a durable write succeeded over lost data");
    ensure!(flushes.iter().all(Result::is_err), "{name}: a flush succeeded over lost data");
    drop(client);
    server.kill()
}
