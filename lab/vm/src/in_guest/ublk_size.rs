//! A ublk device whose image grows, and the time until a device can be read.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use blockhouse_engine::ublk_flag;

use super::system::{self, tool};
use super::ublk_user::{DEVICE, SIZE, devices, good, image, info};
use crate::server::{Server, control};

/// An image grows while its device is in use: the device grows, too, if the kernel supports that.
pub fn run() -> Result<()> {
    let image = image("a.img")?;
    let socket = control(Path::new(DEVICE));
    let mut command = Command::new("blockhouse");
    command.args(["serve", &image, "--state", "off", "--control"]).arg(&socket);
    let server = Server::start_ublk(command, Path::new(DEVICE))?;
    let can_follow = info(0)?.is_some_and(|info| info.flags & ublk_flag::UPDATE_SIZE != 0);
    let socket = socket.to_str().context("a path of text")?;
    good(&["ctl", socket, "resize", "a.img", &(2 * SIZE).to_string()])?;
    let sectors: u64 = system::read(Path::new("/sys/block/ublkb0/size"))?.parse()?;
    let expected = if can_follow { 2 * SIZE } else { SIZE };
    println!("  resize: the kernel can follow: {can_follow}; {} bytes", sectors * 512);
    ensure!(sectors * 512 == expected, "expected {expected} bytes");
    if can_follow {
        let device = File::options().write(true).open(DEVICE)?;
        device.write_all_at(&[0x77; 512], 2 * SIZE - 512)?;
        device.sync_all()?;
    }
    server.stop()?;
    ensure!(devices()?.is_empty(), "a device is left");
    first_reads(&image)
}

/// The time from `attach` to the first bytes, beside that of a loop device. On an emulated
/// processor, the difference is mostly the start of processes.
fn first_reads(image: &str) -> Result<()> {
    let mut attached = Vec::new();
    let mut looped = Vec::new();
    for _ in 0..3 {
        let started = Instant::now();
        let device = good(&["attach", image])?;
        read_first(&device)?;
        attached.push(started.elapsed().as_millis());
        good(&["detach", &device])?;
        let started = Instant::now();
        tool("losetup", &["/dev/loop0", image])?;
        read_first("/dev/loop0")?;
        looped.push(started.elapsed().as_millis());
        tool("losetup", &["-d", "/dev/loop0"])?;
    }
    println!("  from the command to the first read: attach {attached:?} ms, losetup {looped:?} ms");
    Ok(())
}

fn read_first(device: &str) -> Result<()> {
    let mut bytes = [0; 4096];
    File::open(device)?
        .read_exact_at(&mut bytes, 0)
        .with_context(|| format!("cannot read {device}"))
}
