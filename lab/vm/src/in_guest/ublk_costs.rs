//! The cost of our device: system calls of the server for each request, and the time from `attach`
//! to the first read.
//!
//! Evidence: with many requests in flight one system call carries many of them. Times are only
//! printed.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use blockhouse_figures::Spread;

use super::images::make_written;
use super::system::{self, Mount, tool};
use super::trace;
use super::ublk_user;
use crate::server::Server;

/// Bytes of the device.
const SIZE: u64 = 64 << 20;
const DEVICE: &str = "/dev/ublkb0";
const LOOP: &str = "/dev/loop0";
/// Requests that are counted.
const REQUESTS: u64 = 1024;
/// How many are in flight at a time.
const DEEP: u64 = 64;
/// System calls for each read then, at most: half of those for one in flight. How many requests
/// one call carries depends on the machine and on the build: 0.05 to 0.6 calls were seen.
const MAX_CALLS: f64 = 1.0;
/// How often a device is made, by us and by `losetup` in turn.
const ROUNDS: usize = 5;

/// Uses an image of this format on the disk whose serial number is `serial`.
pub fn run(serial: &str, format: &str) -> Result<()> {
    system::load_nvme()?;
    system::load_all(&["crc32c_generic", "ext4", "loop", "ublk_drv"])?;
    std::fs::create_dir_all("/run")?;
    let (_, mount) = Mount::new_ext4(serial)?;
    let image = make_written(mount.place(), format, SIZE)?;
    calls(&image, format)?;
    first_read(&image, format)?;
    mount.unmount()
}

/// Counts the system calls for requests, with one and with many in flight.
fn calls(image: &Path, format: &str) -> Result<()> {
    let mut command = Command::new("blockhouse");
    command.arg("serve").arg(image).args(["--format", format]);
    let server = Server::start_ublk(command, Path::new(DEVICE))?;
    system::disk("ublkb0")?;
    let scheduler = Path::new("/sys/block/ublkb0/queue/scheduler");
    for chosen in [None, Some("none")] {
        if let Some(chosen) = chosen {
            system::write(scheduler, chosen)?;
        }
        for (depth, work) in [(1, "randread"), (DEEP, "randread"), (DEEP, "randwrite")] {
            let calls = trace::count_enters("blockhouse-0", || fio(depth, work))?;
            let each = calls as f64 / REQUESTS as f64;
            let scheduler = system::read(scheduler)?;
            println!(
                "  {format}: {work}, {depth} in flight ({scheduler}): {each:.3} io_uring_enter each"
            );
            let is_judged = depth > 1 && work == "randread";
            ensure!(!is_judged || each <= MAX_CALLS, "{format}: too many system calls");
        }
    }
    server.stop()
}

/// Sends random requests to the device, with `depth` in flight.
fn fio(depth: u64, work: &str) -> Result<()> {
    let words = [
        "--name=requests".to_owned(),
        format!("--filename={DEVICE}"),
        format!("--rw={work}"),
        format!("--number_ios={REQUESTS}"),
        format!("--iodepth={depth}"),
        format!("--iodepth_batch_submit={depth}"),
        format!("--iodepth_batch_complete_min={depth}"),
    ];
    let common = ["--bs=4k", "--ioengine=libaio", "--direct=1"];
    let words: Vec<_> = words.iter().map(String::as_str).chain(common).collect();
    tool("fio", &words).map(drop)
}

/// The time from `attach` to the first bytes, beside that of a loop device.
fn first_read(image: &Path, format: &str) -> Result<()> {
    let name = image.to_str().context("a folder without a name")?;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let start = Instant::now();
        let device = ublk_user::attach_at_once(name)?;
        read(Path::new(&device))?;
        ours.push(start.elapsed().as_secs_f64() * 1e3);
        ublk_user::good(&["detach", &device])?;
        let start = Instant::now();
        tool("losetup", &[LOOP, name])?;
        read(Path::new(LOOP))?;
        theirs.push(start.elapsed().as_secs_f64() * 1e3);
        tool("losetup", &["-d", LOOP])?;
    }
    let spread = |times| Spread::of(times).context("no round");
    let (ours, theirs) = (spread(ours)?, spread(theirs)?);
    println!("  {format}: first read after {ours:.1} ms by attach, {theirs:.1} ms by losetup");
    Ok(())
}

fn read(device: &Path) -> Result<()> {
    let file = File::open(device).with_context(|| format!("cannot open {}", device.display()))?;
    file.read_exact_at(&mut [0; 4096], 0).context("cannot read")
}
