//! `upgrade_gaps raw|qcow2 UPGRADES`: upgrades a server this many times while a guest and NBD
//! clients verify what it holds at depth 64, and prints the pauses.
//!
//! The image is in the target folder. A qcow2 image has the metadata of 64 GiB.
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::exit;
use std::time::Duration;

use blockhouse_tests::nbd::{Client, Framing};
use blockhouse_tests::upgrade::{Load, REGION, Servers, upgrade_under_load, verify, verify_guest};
use blockhouse_tests::{Scratch, Serve, image_tool, seeded};

/// NBD clients that verify at the same time, beside a guest.
const CLIENTS: u64 = 1;
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
    let device = scratch.socket("device");
    let server = server.option("--control", &control).option("--vhost-user-blk", &device);
    let server = server.option("--queues", "2").ready_lines(2).start();
    let (address, mut random, load) = (server.address(), seeded(), Load::default());
    let (pauses, seen) = std::thread::scope(|scope| {
        let (load, device) = (&load, &device);
        let _end = load.stop_at_the_end();
        let other = random.fork();
        let mut verifiers = vec![scope.spawn(move || verify_guest(device, 0, true, other, load))];
        for client in 1..=CLIENTS {
            let (other, start) = (random.fork(), client * REGION);
            let client = Client::open_with(&address, Framing::Extended);
            verifiers.push(scope.spawn(move || verify(client, start, other, load)));
        }
        let pauses: Vec<_> = (0..upgrades)
            .map(|_| {
                std::thread::sleep(PAUSE);
                load.take_silence();
                let gap = upgrade_under_load(&control);
                servers.wait_for(1);
                (gap, load.take_silence().as_secs_f64() * 1000.0)
            })
            .collect();
        load.stop();
        let seen = verifiers.into_iter().map(|one| one.join().expect("no error"));
        (pauses, seen.collect::<Vec<_>>())
    });
    servers.stop();
    let replies: u64 = seen.iter().map(|seen| seen.replies).sum();
    let (told, silences): (Vec<_>, Vec<_>) = pauses.into_iter().unzip();
    eprintln!(
        "{format}: {upgrades} upgrades, {replies} replies, no error, no end of file. Milliseconds that the server \
         tells: {}; a client or guest without a reply: {}",
        spread(told),
        spread(silences)
    );
    drop(server);
}

/// Median, 90th of a hundred, and the largest.
fn spread(mut values: Vec<f64>) -> String {
    values.sort_by(f64::total_cmp);
    let (median, high) = (values[values.len() / 2], values[values.len() * 9 / 10]);
    format!("{median:.1} (median), {high:.1} (90 %), {:.1} (longest)", values[values.len() - 1])
}
