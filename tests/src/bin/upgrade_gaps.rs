//! `upgrade_gaps raw|qcow2 UPGRADES`: upgrades a server so often while clients verify what it holds at depth 64, and prints
//! the longest pauses.
//!
//! The image is in the target folder. A qcow2 image has the metadata of 64 GiB.
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::exit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blockhouse_tests::nbd::Framing;
use blockhouse_tests::upgrade::{REGION, Servers, told_gap, upgrade, verify};
use blockhouse_tests::{Scratch, Serve, image_tool, seeded};

/// Clients that verify at the same time.
const CLIENTS: u64 = 2;
/// Between two upgrades.
const PAUSE: Duration = Duration::from_millis(100);

fn main() {
    let words: Vec<_> = std::env::args().skip(1).collect();
    let (format, upgrades) = match &words[..] {
        [format, upgrades] if ["raw", "qcow2"].contains(&&format[..]) => {
            (format.clone(), upgrades.parse().unwrap_or(0))
        }
        _ => (String::new(), 0),
    };
    if upgrades == 0 {
        eprintln!("usage: upgrade_gaps raw|qcow2 UPGRADES");
        exit(2);
    }
    measure(&format, upgrades);
}

fn create(image: &Path, format: &str) {
    let image = image_tool::str(image);
    match format {
        "qcow2" => {
            let options = ["create", "-f", "qcow2", "-o", "preallocation=metadata", image, "64G"];
            image_tool::qemu_img(&options).success();
        }
        _ => {
            image_tool::command(&["create", "--format", format, image, "64G"]).success();
        }
    }
}

fn measure(format: &str, upgrades: usize) {
    let scratch = Scratch::new();
    let servers = Servers(&scratch);
    let image = scratch.path(&format!("disk.{format}"));
    create(&image, format);
    let control = scratch.socket("control");
    let server = Serve::new(&scratch, &image).option("--format", format);
    let server = server.option("--control", &control).start();
    let (address, random, stop) = (server.address(), seeded(), AtomicBool::new(false));
    let (mut gaps, seen) = std::thread::scope(|scope| {
        let stop = &stop;
        let verifiers: Vec<_> = (0..CLIENTS)
            .map(|index| {
                let (address, mut random) = (address.clone(), random.clone());
                random.seed(random.get_seed() ^ index);
                let start = index * REGION;
                scope.spawn(move || verify(&address, Framing::Extended, start, random, stop))
            })
            .collect();
        let gaps: Vec<f64> = (0..upgrades)
            .map(|_| {
                std::thread::sleep(PAUSE);
                let gap = told_gap(&upgrade(&control, &[]).success());
                servers.wait_for(1);
                gap
            })
            .collect();
        stop.store(true, Ordering::Relaxed);
        let seen = verifiers.into_iter().map(|one| one.join().expect("no error"));
        (gaps, seen.collect::<Vec<_>>())
    });
    servers.stop();
    gaps.sort_by(f64::total_cmp);
    let replies: u64 = seen.iter().map(|seen| seen.replies).sum();
    let silence = seen.iter().map(|seen| seen.longest_gap).max().unwrap_or_default();
    eprintln!(
        "{format}: {upgrades} upgrades, {replies} replies, no error, no end of file. Requests waited for \
         {:.1} ms (median), {:.1} ms (longest); a client without a reply: {:.1} ms (longest)",
        gaps[gaps.len() / 2],
        gaps[gaps.len() - 1],
        silence.as_secs_f64() * 1000.0
    );
    drop(server);
}
