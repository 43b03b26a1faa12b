//! Data of a ublk device that stays in the kernel's pages, where the driver can.
//!
//! Evidence: on a kernel whose driver registers pages, the ring moves aligned requests to allocated
//! space from and to these pages, and nothing is copied; on an older kernel nothing moves so. On
//! both, each read finds what was written: through the device and through the image's file, with
//! memory and lengths of any alignment, over holes and zeros, and beside a backup, which has the
//! moment at which it began.

use std::fs::{File, OpenOptions};
use std::io::IoSlice;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use blockhouse_engine::{UblkCommand, UblkControl, ublk_flag};
use fastrand::Rng;
use rustix::fs::{FallocateFlags, OFlags, fallocate};
use rustix::io::{ReadWriteFlags, pwritev2};

use super::system::{self, Mount, tool};
use super::trace;
use super::ublk_user::info;
use crate::server::{Server, control};

/// Bytes of the device.
const SIZE: u64 = 16 << 20;
const DEVICE: &str = "/dev/ublkb0";
const SECTOR: usize = 512;
const PAGE: usize = 4096;
/// The longest request of a program, of which the kernel makes one request to the server.
const MAX_REQUEST: usize = 512 << 10;
/// Requests of one round.
const REQUESTS: u32 = 300;
/// How many requests are counted.
const COUNTED: u64 = 32;
/// Where the moment of a backup is served.
const MOMENT: &str = "nbd+unix:///?socket=/tmp/moment.sock";

/// How a server is started, and whether its disk can gain.
const SERVED: [(&str, &[&str], bool); 4] = [
    ("raw", &["--cache", "none"], true),
    ("raw", &["--cache", "writeback"], true),
    ("qcow2", &["--cache", "none"], true),
    ("qcow2", &["--cache", "none", "--detect-zeroes", "on"], false),
];

/// Uses images on the disk whose serial number is `serial`.
pub fn run(serial: &str) -> Result<()> {
    system::load_all(&["virtio_pci", "virtio_blk", "crc32c_generic", "ext4", "ublk_drv"])?;
    let (_, mount) = Mount::new_ext4(serial)?;
    let mut features = [0; 8];
    UblkControl::open()?.command(UblkCommand::GetFeatures, u32::MAX, 0, &mut features)?;
    let needed = ublk_flag::PAGES | ublk_flag::BATCH_IO;
    let can_register = u64::from_ne_bytes(features) & needed == needed;
    println!("  the driver registers pages: {can_register}");
    for (format, options, can_gain) in SERVED {
        let case = Case { format, options, has_pages: can_register && can_gain };
        case.run(mount.place()).with_context(|| format!("{format} {options:?}"))?;
    }
    mount.unmount()
}

/// Requests that are counted.
type Work = fn(&mut User) -> Result<()>;

/// A server of an image.
struct Case {
    format: &'static str,
    options: &'static [&'static str],
    /// Whether data shall stay in the kernel's pages.
    has_pages: bool,
}

impl Case {
    fn run(&self, folder: &Path) -> Result<()> {
        let image = folder.join(format!("image.{}", self.format));
        let name = image.to_str().context("a folder without a name")?;
        let _ = std::fs::remove_file(&image);
        tool("blockhouse", &["create", "-f", self.format, name, &SIZE.to_string()])?;
        let server = self.serve(&image)?;
        let mut user = User::open()?;
        user.requests(REQUESTS)?;
        self.beside_a_backup(&image, &mut user)?;
        self.count(&mut user)?;
        server.kill()?;
        let server = self.serve(&image)?;
        user = User { content: user.content, ..User::open()? };
        user.check_all().context("after a kill of the server")?;
        user.requests(REQUESTS)?;
        user.device.sync_all()?;
        let content = std::mem::take(&mut user.content);
        // A device that is open stays when its server has ended.
        drop(user);
        server.stop()?;
        ensure!(self.content(name)? == content, "the image has other bytes than the device had");
        self.write_to_image(name, &image, content)
    }

    fn serve(&self, image: &Path) -> Result<Server> {
        let mut command = Command::new("blockhouse");
        command.arg("serve").arg(image).args(["--format", self.format, "--state", "/tmp/state"]);
        command.args(self.options).arg("--control").arg(control(Path::new(DEVICE)));
        let server = Server::start_ublk(command, Path::new(DEVICE))?;
        system::disk("ublkb0")?;
        let flags = info(0)?.context("there is no device")?.flags;
        let has_pages = flags & ublk_flag::PAGES == ublk_flag::PAGES;
        ensure!(has_pages == self.has_pages, "the device has the flags {flags:#x}");
        Ok(server)
    }

    /// The bytes of the image, by its own tool.
    fn content(&self, name: &str) -> Result<Vec<u8>> {
        let raw = "/tmp/content.img";
        let _ = std::fs::remove_file(raw);
        tool("blockhouse", &["convert", "-f", self.format, "-O", "raw", name, raw])?;
        let content = std::fs::read(raw)?;
        std::fs::remove_file(raw)?;
        Ok(content)
    }

    /// The device has what was written to the image.
    fn write_to_image(&self, name: &str, image: &Path, mut content: Vec<u8>) -> Result<()> {
        let raw = "/tmp/content.img";
        content[3 * PAGE..][..MAX_REQUEST].fill(0x3c);
        std::fs::write(raw, &content)?;
        std::fs::remove_file(image)?;
        tool("blockhouse", &["convert", "-f", "raw", "-O", self.format, raw, name])?;
        let server = self.serve(image)?;
        let user = User { content, ..User::open()? };
        user.check_all().context("after a change of the image")?;
        drop(user);
        server.stop()
    }

    /// A backup of a moment has the bytes of this moment, whatever is written meanwhile.
    fn beside_a_backup(&self, image: &Path, user: &mut User) -> Result<()> {
        let control = control(Path::new(DEVICE)).display().to_string();
        let disk = image.file_name().and_then(|name| name.to_str()).context("a name")?;
        let begin = ["ctl", &control, "backup", "begin", disk, "--export", MOMENT, "--backup", "b"];
        user.device.sync_all()?;
        tool("blockhouse", &begin)?;
        let moment = user.content.clone();
        user.requests(REQUESTS)?;
        let address = MOMENT.replace("///", &format!("///{disk}"));
        let copy = "/tmp/moment.img";
        tool("blockhouse", &["convert", "-O", "raw", &address, copy])?;
        ensure!(std::fs::read(copy)? == moment, "the backup is of another moment");
        std::fs::remove_file(copy)?;
        tool("blockhouse", &["ctl", &control, "backup", "end", "b"]).map(drop)
    }

    /// Counts how the data of requests moves.
    fn count(&self, user: &mut User) -> Result<()> {
        // Afterwards the space is written, and the metadata is in memory.
        user.write_run(0, PAGE)?;
        let rows: [(&str, Work); 3] = [
            ("writes of 4 KiB", |user| user.write_run(0, PAGE)),
            ("durable writes of 4 KiB", |user| {
                user.flags = ReadWriteFlags::DSYNC;
                user.write_run(0, PAGE)?;
                user.flags = ReadWriteFlags::empty();
                Ok(())
            }),
            ("reads of 4 KiB", |user| user.read_run(0, PAGE)),
        ];
        for (what, work) in rows {
            let moves = trace::count_moves("blockhouse-0", || work(user))?;
            println!("  {} {:?}: {COUNTED} {what}: {moves:?}", self.format, self.options);
            let expected = if self.has_pages { COUNTED } else { 0 };
            // A server decides by trials whether a thread makes a durable write to a file.
            let is_judged = !what.starts_with("durable") || !self.has_pages;
            ensure!(!is_judged || moves.by_pages == expected, "{what}: not by the pages");
            ensure!(!is_judged || moves.copies == 0, "{what}: copied");
        }
        if !self.has_pages {
            return Ok(());
        }
        // Direct I/O to a virtio disk refuses memory that is not aligned for a sector.
        let moves = trace::count_moves("blockhouse-0", || user.write_run(4, PAGE))?;
        println!("  {} {:?}: odd memory: {moves:?}", self.format, self.options);
        let is_direct = self.options.contains(&"none");
        ensure!((moves.copies == COUNTED) == is_direct, "odd memory: {moves:?}");
        user.zero(0, 4 << 20)?;
        let moves = trace::count_moves("blockhouse-0", || user.read_run(0, PAGE))?;
        println!("  {} {:?}: reads of zeros: {moves:?}", self.format, self.options);
        let is_in_file = self.format == "raw";
        ensure!((moves.copies == COUNTED) != is_in_file, "zeros: {moves:?}");
        Ok(())
    }
}

/// A program that uses the device, and knows what it must find.
struct User {
    /// Open for direct I/O.
    device: File,
    content: Vec<u8>,
    memory: Vec<u8>,
    random: Rng,
    /// How writes are made.
    flags: ReadWriteFlags,
}

impl User {
    fn open() -> Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(OFlags::DIRECT.bits() as i32);
        Ok(Self {
            device: options.open(DEVICE)?,
            content: vec![0; SIZE as usize],
            memory: vec![0; MAX_REQUEST + 2 * PAGE],
            random: Rng::with_seed(11),
            flags: ReadWriteFlags::empty(),
        })
    }

    /// The part of the memory that begins this many bytes after the start of a page.
    fn memory_at(&self, shift: usize, length: usize) -> Range<usize> {
        let start = self.memory.as_ptr().align_offset(PAGE) + shift;
        start..start + length
    }

    fn write(&mut self, offset: usize, length: usize, shift: usize) -> Result<()> {
        let byte = self.random.u8(..);
        let range = self.memory_at(shift, length);
        let bytes = &mut self.memory[range];
        for (sector, bytes) in bytes.chunks_mut(SECTOR).enumerate() {
            bytes.fill(byte ^ sector as u8);
        }
        self.content[offset..][..length].copy_from_slice(bytes);
        let count = pwritev2(&self.device, &[IoSlice::new(bytes)], offset as u64, self.flags)
            .with_context(|| format!("cannot write {length} bytes at {offset}, shift {shift}"))?;
        ensure!(count == length, "a short write");
        Ok(())
    }

    fn read(&mut self, offset: usize, length: usize, shift: usize) -> Result<()> {
        let range = self.memory_at(shift, length);
        let bytes = &mut self.memory[range];
        bytes.fill(0xee);
        self.device
            .read_exact_at(bytes, offset as u64)
            .with_context(|| format!("cannot read {length} bytes at {offset}, shift {shift}"))?;
        let expected = &self.content[offset..][..length];
        let other = bytes.iter().zip(expected).position(|(found, expected)| found != expected);
        ensure!(other.is_none(), "{length} bytes at {offset}, shift {shift}: other at {other:?}");
        Ok(())
    }

    /// Random requests: writes, durable writes, reads, zeros, and changes by the page cache.
    fn requests(&mut self, count: u32) -> Result<()> {
        for _ in 0..count {
            let most = if self.random.u8(..8) == 0 { MAX_REQUEST } else { 8 * PAGE };
            let length = self.random.usize(1..=most / SECTOR) * SECTOR;
            let offset = self.random.usize(0..=(SIZE as usize - length) / SECTOR) * SECTOR;
            let shift = [0, 0, SECTOR, 3 * SECTOR, 4, 1028][self.random.usize(..6)];
            match self.random.u8(..10) {
                0..3 => self.read(offset, length, shift)?,
                3..6 => self.write(offset, length, shift)?,
                6..8 => {
                    self.flags = ReadWriteFlags::DSYNC;
                    self.write(offset, length, shift)?;
                    self.flags = ReadWriteFlags::empty();
                }
                8 => self.zero(offset, length)?,
                _ => self.write_cached(offset, length)?,
            }
        }
        self.check_all()
    }

    fn zero(&mut self, offset: usize, length: usize) -> Result<()> {
        let flags = FallocateFlags::KEEP_SIZE | FallocateFlags::ZERO_RANGE;
        fallocate(&self.device, flags, offset as u64, length as u64).context("cannot zero")?;
        self.content[offset..][..length].fill(0);
        Ok(())
    }

    /// Changes bytes that are no sectors, by the page cache.
    fn write_cached(&mut self, offset: usize, length: usize) -> Result<()> {
        let file = File::options().read(true).write(true).open(DEVICE)?;
        let (start, bytes) = (offset + 7, vec![self.random.u8(..); length - 100]);
        file.write_all_at(&bytes, start as u64)?;
        file.sync_all()?;
        self.content[start..][..bytes.len()].copy_from_slice(&bytes);
        Ok(())
    }

    /// Compares the whole device, by direct I/O in long requests and by the page cache.
    fn check_all(&self) -> Result<()> {
        let mut found = vec![0; SIZE as usize + PAGE];
        let start = found.as_ptr().align_offset(PAGE);
        for (index, bytes) in found[start..][..SIZE as usize].chunks_mut(MAX_REQUEST).enumerate() {
            self.device.read_exact_at(bytes, (index * MAX_REQUEST) as u64)?;
        }
        ensure!(found[start..][..SIZE as usize] == self.content, "direct reads find other bytes");
        ensure!(std::fs::read(DEVICE)? == self.content, "the page cache has other bytes");
        Ok(())
    }

    /// Writes of `length` bytes, one after the other, with a gap between them.
    fn write_run(&mut self, shift: usize, length: usize) -> Result<()> {
        (0..COUNTED as usize).try_for_each(|index| self.write(2 * index * length, length, shift))
    }

    fn read_run(&mut self, shift: usize, length: usize) -> Result<()> {
        (0..COUNTED as usize).try_for_each(|index| self.read(2 * index * length, length, shift))
    }
}
