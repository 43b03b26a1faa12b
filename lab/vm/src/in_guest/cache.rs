//! A disk that grows while the guest runs, and whose write cache the guest switches off and on.
//!
//! Only the host sees what the server makes durable. So each part of the work writes to its own
//! range, in the space that was added.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rustix::fs::OFlags;

use super::direct::{BLOCK, WRITES};
use super::guest::{prepare, print_line};
use super::system;
use lab_nbd::pattern;

/// The line that says that the guest waits for the disk to grow.
pub const SMALL: &str = "waiting for room";
/// The cache type that the guest sets in the kernel, for each part.
pub const PARTS: [&str; 3] = ["write back", "write through", "write back"];

/// The offset of a part's writes, in the space from `start` on.
pub fn place(start: u64, part: usize) -> u64 {
    start + part as u64 * WRITES * BLOCK as u64
}

/// Waits until the disk has grown from `from` to `to` bytes, then writes with each cache type, and
/// flushes once after the last write.
pub fn run(disk: &str, from: u64, to: u64) -> Result<()> {
    let disk = prepare(disk)?;
    let name = disk.file_name().and_then(|name| name.to_str()).context("a nameless disk")?;
    let folder = Path::new("/sys/block").join(name);
    let has_size = |size: u64| -> Result<bool> {
        Ok(system::read(&folder.join("size"))? == (size / 512).to_string())
    };
    ensure!(has_size(from)?, "the disk has not {from} bytes");
    let setting = folder.join("cache_type");
    let flags = OFlags::DIRECT.bits() as i32;
    let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(&disk)?;
    let mut space = vec![0; 2 * BLOCK];
    let aligned = space.as_ptr().align_offset(BLOCK);
    let block = &mut space[aligned..aligned + BLOCK];
    print_line(SMALL)?;
    system::wait_for("the new size", || {
        // QEMU notices only with a request that the server was replaced.
        let is_read = file.read_exact_at(block, 0).is_ok();
        (is_read && has_size(to).is_ok_and(|is| is)).then_some(())
    })?;
    for (part, kind) in PARTS.iter().enumerate() {
        system::write(&setting, kind)?;
        ensure!(system::read(&setting)? == *kind, "the guest's disk does not become {kind}");
        for index in 0..WRITES {
            let offset = place(from, part) + index * BLOCK as u64;
            pattern::fill(block, offset, part as u64);
            file.write_all_at(block, offset).context("cannot write")?;
        }
    }
    file.sync_all().context("cannot flush")?;
    for part in 0..PARTS.len() {
        for index in 0..WRITES {
            let offset = place(from, part) + index * BLOCK as u64;
            file.read_exact_at(block, offset).context("cannot read")?;
            let verdict = pattern::verify(block, offset, Some(part as u64));
            ensure!(verdict.is_ok(), "at {offset}: {verdict:?}");
        }
    }
    Ok(())
}
