//! `upgrade_gaps raw|qcow2|fill COUNT`: upgrades a server this many times while a guest and NBD
//! clients verify what it holds at depth 64, and prints the pauses. With `fill` a client writes to
//! new clusters of a qcow2 image, and the same number of snapshots and forks follow the upgrades.
//!
//! The image is in the target folder. That of `qcow2` has the metadata of 64 GiB.
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::exit;
use std::time::Duration;

use blockhouse_tests::control::Control;
use blockhouse_tests::nbd::{Client, Framing};
use blockhouse_tests::upgrade::{
    Load, REGION, Servers, fill, upgrade_under_load, verify, verify_guest,
};
use blockhouse_tests::{Scratch, Serve, image_tool, seeded};
use serde_json::json;

/// NBD clients that verify at the same time as a guest.
const CLIENTS: u64 = 1;
/// The time before each action that causes a pause.
const PAUSE: Duration = Duration::from_millis(100);

fn main() {
    let words: Vec<_> = std::env::args().skip(1).collect();
    let (load, count) = match &words[..] {
        [load, count] if ["raw", "qcow2", "fill"].contains(&&load[..]) => {
            (load.clone(), count.parse().unwrap_or(0))
        }
        _ => (String::new(), 0),
    };
    match &load[..] {
        _ if count == 0 => {
            eprintln!("usage: upgrade_gaps raw|qcow2|fill COUNT");
            exit(2);
        }
        "fill" => measure_filled(count),
        format => measure(format, count),
    }
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
        let pauses = Pauses::of(upgrades, load, |_| upgrade(&control, &servers));
        load.stop();
        let seen = verifiers.into_iter().map(|one| one.join().expect("no error"));
        (pauses, seen.collect::<Vec<_>>())
    });
    servers.stop();
    let replies: u64 = seen.iter().map(|seen| seen.replies).sum();
    eprintln!("{format}: {replies} replies, no error, no end of file");
    pauses.print("upgrades");
    drop(server);
}

fn measure_filled(count: usize) {
    let scratch = Scratch::new();
    let servers = Servers(&scratch);
    let image = scratch.path("disk.qcow2");
    image_tool::command(&["create", image_tool::str(&image), "1T"]).success();
    let socket = scratch.socket("control");
    let server = Serve::new(&scratch, &image).option("--control", &socket);
    let server = server.option("--name", "disk").start();
    let (client, load) = (Client::open_with(&server.address(), Framing::Extended), Load::default());
    let (upgrades, snapshots, forks) = std::thread::scope(|scope| {
        let load = &load;
        let _end = load.stop_at_the_end();
        let client = scope.spawn(move || fill(client, load));
        let upgrades = Pauses::of(count, load, |_| upgrade(&socket, &servers));
        let mut control = Control::connect(&socket);
        let mut told = |method: &str, params| {
            control.get(method, params)["pause-us"].as_f64().expect("a pause") / 1000.0
        };
        let snapshots = Pauses::of(count, load, |number| {
            told("snapshot.create", json!({ "disk": "disk", "name": number.to_string() }))
        });
        let forks = Pauses::of(count, load, |_| {
            told("disk.fork", json!({ "disks": [{ "disk": "disk" }] }))
        });
        load.stop();
        let seen = client.join().expect("no error");
        eprintln!("fill: {} replies, no error, no end of file", seen.replies);
        (upgrades, snapshots, forks)
    });
    servers.stop();
    upgrades.print("upgrades");
    snapshots.print("snapshots");
    forks.print("forks");
    let log = server.log();
    log.lines().filter(|line| line.contains("waited for")).for_each(|line| eprintln!("{line}"));
    drop(server);
}

/// Upgrades a server; returns the pause in milliseconds that it reports.
fn upgrade(control: &Path, servers: &Servers<'_>) -> f64 {
    let gap = upgrade_under_load(control);
    servers.wait_for(1);
    gap
}

/// Pauses, in milliseconds.
struct Pauses {
    /// As the server reports them.
    told: Vec<f64>,
    /// The longest time without a reply to a client or guest around each.
    silences: Vec<f64>,
}

impl Pauses {
    /// The pauses of `count` actions. Each action gets its number and returns the pause that the
    /// server reports.
    fn of(count: usize, load: &Load, mut action: impl FnMut(usize) -> f64) -> Self {
        let pauses = (0..count).map(|number| {
            std::thread::sleep(PAUSE);
            load.take_silence();
            (action(number), load.take_silence().as_secs_f64() * 1000.0)
        });
        let (told, silences) = pauses.unzip();
        Self { told, silences }
    }

    fn print(self, what: &str) {
        let Self { told, silences } = self;
        eprintln!("{what}, milliseconds that the server tells: {}", spread(told));
        eprintln!("{what}, milliseconds without a reply: {}", spread(silences));
    }
}

/// Median, 90th percentile and maximum; then all values in their order.
fn spread(values: Vec<f64>) -> String {
    let mut sorted = values.clone();
    sorted.sort_by(f64::total_cmp);
    let (median, high) = (sorted[sorted.len() / 2], sorted[sorted.len() * 9 / 10]);
    let longest = sorted[sorted.len() - 1];
    let all: Vec<_> = values.iter().map(|value| format!("{value:.1}")).collect();
    format!("{median:.1} (median), {high:.1} (90 %), {longest:.1} (longest) of {}", all.join(" "))
}
