//! An image that QEMU changes between the death of its server and the next start: the redo log must
//! not be replayed over the change, the server must say so, and the disk is what QEMU left.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use fastrand::Rng;
use lab_nbd::{Client, Request, command};

use crate::combination::{ENGINES, Image};
use crate::folders::{Finding, Folders, Setting};
use crate::nbd_client;
use crate::server::Serve;
use crate::template::{self, IMAGE, Template, qemu_io, quiet};

/// Only the modification time of a version 2 image shows that the image was changed. QEMU's change
/// must be this much later than the server's last write.
const LATER: Duration = Duration::from_secs(3);
/// Cache modes in which no write is durable by itself, so that the redo log has records.
const CACHES: &[&str] = &["none", "writeback", "unsafe"];
/// How many clusters each kind of request changes before the kill.
const CLUSTERS: u64 = 4;
/// What the server logs when it refuses the redo log.
const REFUSED: &str = "the redo log is refused";
/// The longest time until a line is in the server's log, which the server writes asynchronously.
const LOG_LIMIT: Duration = Duration::from_secs(5);
/// Bytes of one read.
const PART: u64 = 1 << 20;

/// Whether changes make records in the redo log. With a raw data file they do not: all clusters
/// have L2 entries, which do not change.
pub fn has_log(image: &Image) -> bool {
    image.layout().is_some_and(|layout| !layout.has("data_file_raw"))
}

/// Lets QEMU change one image by a seed.
pub fn run(
    setting: &Setting,
    template: &Arc<Template>,
    image: Image,
    seed: u64,
) -> Result<Option<Finding>> {
    let mut random = Rng::with_seed(seed);
    let folders = Folders::new(setting, random.u8(..3) == 0)?;
    let path = template.copy(folders.images())?;
    let mut options = folders.state_options(setting);
    let mut option = |name: &str, value: &str| options.extend([name.into(), value.into()]);
    option("--format", image.format());
    option("--cache", CACHES[random.usize(..CACHES.len())]);
    option("--engine", ENGINES[random.usize(..ENGINES.len())]);
    let serve = Serve::over_nbd(setting, &folders, path, options);
    match die_and_change(&folders, &serve, image, &mut random) {
        Ok(()) => Ok(None),
        Err(error) => Ok(Some(folders.finding(&format!("{image}: {error:#}")))),
    }
}

fn die_and_change(folders: &Folders, serve: &Serve, image: Image, random: &mut Rng) -> Result<()> {
    let server = serve.start()?;
    let socket = serve.nbd.as_deref().context("served over NBD")?;
    change_entries(&mut nbd_client::connect(socket, random), image)?;
    server.kill()?;
    let version = image.layout().map_or(0, |layout| layout.version());
    if version == 2 {
        std::thread::sleep(LATER);
    }
    let how = change_by_qemu(folders, image, random)?;
    let expected = template::content(folders.images(), &image)?;
    let server = serve.start().with_context(|| format!("after {how}"))?;
    let is_told = server.says(REFUSED, LOG_LIMIT);
    ensure!(is_told, "after {how} nothing tells that the log is refused: {}", server.said());
    let kept = std::fs::read_dir(folders.in_memory("state"))?.filter_map(Result::ok);
    let is_refused = |name: std::ffi::OsString| name.to_string_lossy().ends_with(".refused");
    ensure!(kept.map(|file| file.file_name()).any(is_refused), "the refused log is not kept");
    let mut client = nbd_client::connect(socket, random);
    ensure!(client.size() == expected.len() as u64, "after {how}: {} bytes", client.size());
    for (start, part) in (0..).step_by(PART as usize).zip(expected.chunks(PART as usize)) {
        let found = client.read(start, part.len() as u64);
        let found = found.map_err(|error| anyhow!("reading at {start} failed: {error}"))?;
        let differs = found.iter().zip(part).position(|(found, expected)| found != expected);
        if let Some(at) = differs {
            let at_most = part.len().min(at + 8);
            let (found, left) = (&found[at..at_most], &part[at..at_most]);
            let place = start + at as u64;
            anyhow::bail!("after {how}: at {place} is {found:02x?}, QEMU left {left:02x?}");
        }
    }
    drop(client);
    server.stop()?;
    quiet(folders.images(), "qemu-img", &["check", "-q", "-f", "qcow2", IMAGE]).map(drop).or_else(
        |error| {
            // Exit status 3: leaked clusters, whose entries were only in the refused log.
            let text = error.to_string();
            if text.contains("exit status: 3") { Ok(()) } else { Err(error) }
        },
    )
}

/// Requests that change entries of every layout: data, zeros and discards.
fn change_entries(client: &mut Client, image: Image) -> Result<()> {
    let cluster = image.cluster_size();
    let length = cluster.min(64 << 10);
    let clusters = image.size() / cluster;
    let data = vec![0xa5; length as usize];
    let mut request = |number: u64, command: u16| {
        for index in 0..CLUSTERS.min(clusters / 4) {
            let offset = (number * clusters / 4 + index) * cluster;
            let (length, data) = match command {
                command::WRITE => (length, &data[..]),
                _ => (cluster, &[][..]),
            };
            let reply = client.call(Request { command, flags: 0, offset, length }, data);
            ensure!(reply.error == 0, "request {command} at {offset} failed: {}", reply.error);
        }
        Ok(())
    };
    request(0, command::WRITE_ZEROES)?;
    request(1, command::TRIM)?;
    // The writes to new clusters come last: freed clusters may cause a writeback, after which the
    // log is empty.
    request(3, command::WRITE)
}

/// Lets QEMU change the image; returns the change.
fn change_by_qemu(folders: &Folders, image: Image, random: &mut Rng) -> Result<String> {
    let size = image.size();
    let start = random.u64(..size / 512 - 64) * 512;
    let is_version_3 = image.layout().is_some_and(|layout| layout.version() >= 3);
    let has_data_file = image.layout().is_some_and(|layout| layout.option("data_file").is_some());
    let bits = image.layout().and_then(|layout| layout.option("refcount_bits"));
    let has_narrow_refcounts = matches!(bits, Some("1" | "2"));
    let io = |line: String| {
        qemu_io(folders.images(), IMAGE, "qcow2", std::slice::from_ref(&line))?;
        Ok(format!("qemu-io {line}"))
    };
    let img = |words: &[&str]| {
        quiet(folders.images(), "qemu-img", words)?;
        Ok(format!("qemu-img {}", words.join(" ")))
    };
    match random.u8(..6) {
        0 if is_version_3 => io(format!("write -z {start} 32K")),
        1 if is_version_3 => io(format!("discard {start} 32K")),
        2 if !has_data_file && !has_narrow_refcounts => img(&["snapshot", "-c", "later", IMAGE]),
        3 => img(&["resize", "-q", "-f", "qcow2", IMAGE, "+64K"]),
        // Changes nothing but a header bit.
        4 if is_version_3 => img(&["check", "-q", "-r", "leaks", "-f", "qcow2", IMAGE]),
        _ => io(format!("write -P {} {start} 512", random.u8(1..))),
    }
}
