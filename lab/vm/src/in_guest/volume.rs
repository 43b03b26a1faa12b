//! Incremental backups of a logical volume, a device of the device mapper: its bitmap is in a side
//! file, servers are killed while a client writes, and backups are killed and resumed. Each
//! incremental backup equals the device.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use fastrand::Rng;

use super::client::{Change, Client};
use super::serve::serve;
use super::system::{self, tool};
use crate::server::Server;

const SECTOR: u64 = 512;
/// Where the volume begins on its disk, in sectors: a volume manager has its metadata before it.
const START: u64 = 2048;
/// Bytes of a write.
const BLOCK: usize = 16 << 10;
const STATE: &str = "/tmp/state";
const BITMAPS: [&str; 4] = ["--bitmaps", "/tmp/side", "--state", STATE];
/// The longest time until a server, or a backup, is killed, in milliseconds.
const SERVER_TIME: u64 = 1500;
const BACKUP_TIME: u64 = 1000;

struct Volume {
    device: PathBuf,
    name: String,
    random: Rng,
    /// The number that was written last to each block. The last write may not be on the device.
    blocks: Vec<u64>,
    writes: u64,
    killed_servers: u32,
    killed_backups: u32,
}

/// Makes this number of incremental backups of a volume on the disk `serial`.
pub fn run(serial: &str, increments: u32) -> Result<()> {
    system::load_nvme()?;
    system::load_all(&["crc32c_generic", "dm-log-writes"])?;
    let disk = system::disk_of(serial)?;
    let size: u64 = tool("blockdev", &["--getsz", &disk.display().to_string()])?.parse()?;
    let sectors = size - START;
    let table = format!("0 {sectors} linear {} {START}", disk.display());
    // The UUID by which volume managers and other programs identify a volume.
    tool("dmsetup", &["create", "volume", "--uuid", "LVM-blockhouse", "--table", &table])?;
    let device = system::disk("mapper/volume")?;
    let name = device.to_str().context("a device without a name")?.to_owned();
    let blocks = vec![0; (sectors * SECTOR) as usize / BLOCK];
    let random = Rng::with_seed(7);
    let mut volume =
        Volume { device, name, random, blocks, writes: 0, killed_servers: 0, killed_backups: 0 };
    // A server would make this folder, but a command needs it before.
    std::fs::DirBuilder::new().mode(0o700).create(STATE)?;
    volume.tool(&["bitmap", "add"], &["b0"])?;
    File::create(copy(0))?.set_len(sectors * SECTOR)?;
    for number in 1..=increments {
        volume.write_and_kill().with_context(|| format!("before increment {number}"))?;
        volume.increment(number).with_context(|| format!("increment {number}"))?;
    }
    println!(
        "  {increments} increments of a device of the device mapper equal it: {} writes, {} servers killed, {} backups killed",
        volume.writes, volume.killed_servers, volume.killed_backups
    );
    tool("dmsetup", &["remove", "--retry", "volume"]).map(drop)
}

/// The name of a copy. The first one is a raw file of zeros.
fn copy(number: u32) -> String {
    format!("/tmp/copy{number}.{}", if number == 0 { "img" } else { "qcow2" })
}

impl Volume {
    /// Runs a command on the volume.
    fn tool(&self, words: &[&str], more: &[&str]) -> Result<()> {
        let volume = [&self.name[..]];
        let all = [words, &volume, more, &BITMAPS].concat();
        tool("blockhouse", &all).map(drop)
    }

    fn serve(&self) -> Result<Server> {
        serve(&self.device, &["--format", "raw", BITMAPS[0], BITMAPS[1]])
    }

    /// Lets a client write until its server is killed. Acknowledged writes must be on the device.
    fn write_and_kill(&mut self) -> Result<()> {
        let server = self.serve()?;
        let client = Client::connect(server.socket())?;
        let random = self.random.fork();
        let time = Duration::from_millis(self.random.u64(..SERVER_TIME));
        let (blocks, first) = (self.blocks.clone(), self.writes);
        let writer = Mutex::new(Writer { blocks, last: None, number: first });
        std::thread::scope(|scope| {
            let writing = scope.spawn(|| write_until_end(client, &writer, random));
            std::thread::sleep(time);
            let killed = server.kill();
            writing.join().expect("it does not panic");
            killed
        })?;
        self.killed_servers += 1;
        let Writer { blocks, last, number } = writer.into_inner().expect("no panic");
        self.writes = number;
        let found = self.read()?;
        for (index, block) in found.chunks_exact(BLOCK).enumerate() {
            let is_there = block.chunks_exact(8).all(|word| word == blocks[index].to_le_bytes());
            ensure!(is_there || last == Some(index), "block {index} is not what was answered");
        }
        self.blocks = blocks;
        if let Some(index) = last {
            // The block keeps this content until it is written again.
            let word = found[index * BLOCK..].first_chunk().context("a block")?;
            self.blocks[index] = u64::from_le_bytes(*word);
            let torn = found[index * BLOCK..][..BLOCK].chunks_exact(8).any(|other| other != word);
            if torn {
                self.overwrite(index)?;
            }
        }
        Ok(())
    }

    /// Writes a block again whose last write was torn by a kill.
    fn overwrite(&mut self, index: usize) -> Result<()> {
        let server = self.serve()?;
        let mut client = Client::connect(server.socket())?;
        self.writes += 1;
        self.blocks[index] = self.writes;
        client.change(&change(index, self.writes, true))?;
        drop(client);
        server.stop()
    }

    fn read(&self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        File::open(&self.device)?.read_to_end(&mut bytes).context("cannot read the device")?;
        Ok(bytes)
    }

    /// Makes an incremental backup, whose process is killed first and then resumed, and compares it
    /// with the device.
    fn increment(&mut self, number: u32) -> Result<()> {
        let (since, base, target) = (format!("b{}", number - 1), copy(number - 1), copy(number));
        let words = [&target[..], "--incremental", &since, "--base", &base];
        let part = format!("{target}.part");
        let mut killed = Command::new("blockhouse");
        killed.arg("backup").arg(&self.name).args(words).args(BITMAPS);
        killed.stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = killed.spawn().context("cannot start blockhouse")?;
        std::thread::sleep(Duration::from_millis(self.random.u64(..BACKUP_TIME)));
        let has_ended = child.try_wait()?.is_some();
        child.kill()?;
        child.wait()?;
        if !has_ended {
            self.killed_backups += 1;
        }
        if !Path::new(&target).exists() {
            let resumed = [&words[..], &["--resume"]].concat();
            if !Path::new(&part).exists() || self.tool(&["backup"], &resumed).is_err() {
                // The backup was killed before it had begun.
                let _ = std::fs::remove_file(&part);
                self.tool(&["backup"], &words)?;
            }
        }
        tool("blockhouse", &["convert", "-O", "raw", &target, "/tmp/flat"])?;
        let (flat, device) = (std::fs::read("/tmp/flat")?, self.read()?);
        std::fs::remove_file("/tmp/flat")?;
        let pairs = flat.chunks(BLOCK).zip(device.chunks(BLOCK));
        let wrong = pairs.filter(|(one, other)| one != other).count();
        ensure!(flat.len() == device.len() && wrong == 0, "{wrong} blocks differ from the device");
        self.tool(&["bitmap", "add"], &[&format!("b{number}")])?;
        self.tool(&["bitmap", "remove"], &[&since])
    }
}

/// A client that writes.
struct Writer {
    blocks: Vec<u64>,
    /// The block of a write that was not answered.
    last: Option<usize>,
    number: u64,
}

/// Writes one block after the other until the server is gone.
fn write_until_end(mut client: Client, writer: &Mutex<Writer>, mut random: Rng) {
    loop {
        let change = {
            let mut writer = writer.lock().expect("no panic");
            let index = random.usize(..writer.blocks.len());
            writer.number += 1;
            writer.last = Some(index);
            change(index, writer.number, random.bool())
        };
        if client.change(&change).is_err() {
            return;
        }
        let mut writer = writer.lock().expect("no panic");
        let number = writer.number;
        if let Some(index) = writer.last.take() {
            writer.blocks[index] = number;
        }
    }
}

fn change(index: usize, number: u64, is_durable: bool) -> Change {
    let (offset, data) = ((index * BLOCK) as u64, number.to_le_bytes().repeat(BLOCK / 8));
    if is_durable { Change::WriteFua { offset, data } } else { Change::Write { offset, data } }
}
