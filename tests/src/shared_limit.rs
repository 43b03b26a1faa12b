//! Four disks in one limit group, two over NBD and two over vhost-user-blk, all under load:
//! measures the share of each disk.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use blockhouse_vhost_user::driver::Options;
use rustix::process::Pid;

use crate::guest::{Guest, IN, LONG};
use crate::nbd::{Address, Framing, Greeted, Request, command};
use crate::{Scratch, Serve, Server};

/// The names of the disks' files.
pub const NAMES: [&str; 4] = ["a.img", "b.img", "c.img", "d.img"];
const BLOCK: u64 = 4096;

/// A server of four disks.
pub struct FourDisks {
    server: Server,
    address: Address,
    devices: [PathBuf; 2],
}

/// The requests that the disks completed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Done {
    /// Reads of 4 KiB that were answered, for each disk.
    pub reads: [u64; 4],
    /// For how long they were counted.
    pub time: Duration,
}

impl Done {
    /// Reads of all disks.
    pub fn sum(&self) -> u64 {
        self.reads.iter().sum()
    }

    /// Jain's index of fairness: 1 for equal shares, 1/4 if one disk has everything.
    pub fn jain(&self) -> f64 {
        let squares: f64 = self.reads.iter().map(|&reads| (reads as f64).powi(2)).sum();
        (self.sum() as f64).powi(2) / (4.0 * squares)
    }
}

impl FourDisks {
    /// Serves the disks with this many workers and this `--limit`, or without a limit.
    pub fn serve(scratch: &Scratch, workers: u16, limit: Option<&str>) -> Self {
        let images = NAMES.map(|name| scratch.image(name, 4 << 20));
        let sockets = NAMES.map(|name| scratch.socket(&format!("{name}.vu")));
        let mut serve = Serve::new(scratch, images[0].path()).ready_lines(8);
        for image in &images[1..] {
            serve = serve.also(image.path());
        }
        for socket in &sockets {
            serve = serve.option("--vhost-user-blk", socket);
        }
        if let Some(limit) = limit {
            serve = serve.option("--limit", limit);
        }
        let server = serve.option("--workers", workers.to_string()).start();
        let [_, _, third, fourth] = sockets;
        let address = server.address();
        Self { server, address, devices: [third, fourth] }
    }

    /// The server's process.
    pub fn pid(&self) -> Pid {
        self.server.pid()
    }

    /// Reads from all disks, with `depth` requests in flight for each, until `is_done` returns
    /// true; it is called repeatedly.
    pub fn read(&self, depth: usize, is_done: impl Fn(&Done) -> bool) -> Done {
        let (counts, is_stopped) = ([const { AtomicU64::new(0) }; 4], AtomicBool::new(false));
        let address = &self.address;
        thread::scope(|scope| {
            let (counts, is_stopped) = (&counts, &is_stopped);
            for (name, count) in NAMES.iter().zip(&counts[..2]) {
                scope.spawn(move || read_nbd(address, name, depth, count, is_stopped));
            }
            for (device, count) in self.devices.iter().zip(&counts[2..]) {
                scope.spawn(move || read_device(device, depth, count, is_stopped));
            }
            // Counting begins when all disks have answered a read.
            while counts.iter().any(|count| count.load(Relaxed) == 0) {
                thread::sleep(Duration::from_millis(1));
            }
            let read = || [0, 1, 2, 3].map(|index: usize| counts[index].load(Relaxed));
            // The time begins before the count and ends after it, so it is never too short.
            let (begin, first) = (Instant::now(), read());
            loop {
                thread::sleep(Duration::from_millis(2));
                let (now, time) = (read(), begin.elapsed());
                let reads = [0, 1, 2, 3].map(|index: usize| now[index] - first[index]);
                let done = Done { reads, time };
                if is_done(&done) {
                    is_stopped.store(true, Relaxed);
                    return done;
                }
            }
        })
    }

    /// Ends the server in order.
    pub fn stop(self) {
        self.server.stop();
    }
}

fn read_nbd(
    address: &Address,
    name: &str,
    depth: usize,
    count: &AtomicU64,
    is_stopped: &AtomicBool,
) {
    let mut client = Greeted::new(address).go(name, Framing::Simple);
    let read = Request { command: command::READ, flags: 0, offset: 0, length: BLOCK };
    for _ in 0..depth {
        client.send(read).expect("the server takes requests");
    }
    while !is_stopped.load(Relaxed) {
        let (_, reply) = client.receive().expect("the server answers");
        assert_eq!(reply.error, 0);
        count.fetch_add(1, Relaxed);
        client.send(read).expect("the server takes requests");
    }
}

fn read_device(socket: &std::path::Path, depth: usize, count: &AtomicU64, is_stopped: &AtomicBool) {
    let mut guest = Guest::connect(socket, Options::default());
    for slot in 0..depth {
        guest.post(0, slot as u16, IN, 0);
    }
    while !is_stopped.load(Relaxed) {
        let slot = guest.finish(0, LONG).expect("the device answers");
        count.fetch_add(1, Relaxed);
        guest.post(0, slot, IN, 0);
    }
}
