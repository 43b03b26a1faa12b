//! A hostile guest and a hostile client beside neighbours that follow the protocol: the neighbours
//! read what they wrote, without delay, whatever the others do, and the server ends in order.
//!
//! In each test run this takes a short time, with another seed; `cargo xtask soak` sets a longer
//! time (`BLOCKHOUSE_HOSTILE_SECONDS`).

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use blockhouse_tests::guest::Guest;
use blockhouse_tests::nbd::{Address, Client, Framing, Greeted};
use blockhouse_tests::{Engine, Scratch, Serve, Server, on_every_engine, seeded, wait_for_exit};
use blockhouse_vhost_user::driver::Options;
use fastrand::Rng;

const SIZE: u64 = 16 << 20;
const BLOCK: u64 = 4096;
/// The longest time of nearly all of a neighbour's requests, on a busy machine with a debug build.
const AT_MOST: Duration = Duration::from_secs(5);
/// The longest time of any. Less than the time after which a guest's request counts as lost.
const EVER: Duration = Duration::from_secs(25);
/// The limit for the server's memory: more than the sum of its own limits.
const MEMORY: u64 = 1 << 30;

/// A server of two images, one for hostile parties and one for their neighbours.
struct Sides {
    server: Server,
    hostile_socket: String,
    hostile_device: String,
    neighbour_socket: Address,
    neighbour_device: std::path::PathBuf,
}

impl Sides {
    fn start(scratch: &Scratch, engine: Engine) -> Self {
        let images = [scratch.image("hostile.img", SIZE), scratch.image("kept.img", SIZE)];
        let path = |name: &str| scratch.socket(name).display().to_string();
        let (hostile, kept) = (path("hostile"), path("kept"));
        let (hostile_device, kept_device) = (path("hostile-vu"), scratch.socket("kept-vu"));
        let serve = Serve::bare(scratch, images[0].path()).also(images[1].path()).engine(engine);
        let server = serve
            .export(&format!("nbd+unix:///hostile?socket={hostile}"))
            .export(&format!("nbd+unix:///kept?socket={kept}"))
            .option("--vhost-user-blk", &hostile_device)
            .option("--vhost-user-blk", &kept_device)
            .ready_lines(4)
            .start();
        Self {
            server,
            hostile_socket: hostile,
            hostile_device,
            neighbour_socket: Address::Unix(kept.into()),
            neighbour_device: kept_device,
        }
    }
}

/// Starts a hostile party for some seconds.
fn party(words: &[&str], seed: u64, seconds: f64) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hostile"));
    command.args(words).args([seed.to_string(), seconds.to_string()]);
    command.stderr(Stdio::null()).spawn().expect("the party starts")
}

/// Runs hostile parties until the time is over; starts a new one when a party has killed itself.
fn misbehave(words: &[&str], random: &mut Rng, until: Instant) {
    while Instant::now() < until {
        let left = until.saturating_duration_since(Instant::now());
        let mut child = party(words, random.u64(..), left.as_secs_f64());
        if wait_for_exit(&mut child, left + AT_MOST).is_none() {
            child.kill().expect("the party runs");
            child.wait().expect("the party ended");
        }
    }
}

/// The number of requests, the number of those that took longer than `AT_MOST`, and the time of the
/// slowest one.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    requests: u64,
    late: u64,
    slowest: Duration,
}

impl Seen {
    fn note(&mut self, began: Instant) {
        self.requests += 1;
        let time = began.elapsed();
        self.late += u64::from(time >= AT_MOST);
        self.slowest = self.slowest.max(time);
    }
}

/// Writes and reads blocks one by one over NBD, with its own connections, and compares.
fn neighbour_over_nbd(address: &Address, random: &mut Rng, stop: &AtomicBool) -> Seen {
    // This neighbour uses the lower half of the disk.
    let mut model = vec![0; (SIZE / 2 / BLOCK) as usize];
    let mut seen = Seen::default();
    while !stop.load(Ordering::Relaxed) {
        let began = Instant::now();
        let mut client: Client = Greeted::new(address).go("kept", Framing::Simple);
        seen.note(began);
        for _ in 0..200 {
            let block = random.usize(..model.len());
            let (offset, began) = (block as u64 * BLOCK, Instant::now());
            if random.bool() {
                model[block] = random.u8(..);
                let bytes = vec![model[block]; BLOCK as usize];
                assert_eq!(client.write(offset, &bytes, 0), 0, "block {block}");
            } else {
                let bytes = client.read(offset, BLOCK).expect("a read");
                assert!(bytes.iter().all(|&byte| byte == model[block]), "block {block}");
            }
            seen.note(began);
        }
        client.disconnect();
    }
    seen
}

/// The same in the upper half, as a guest.
fn neighbour_over_vhost(socket: &Path, random: &mut Rng, stop: &AtomicBool) -> Seen {
    let first = SIZE / 2 / BLOCK;
    let mut model = vec![0; first as usize];
    let mut guest = Guest::connect(socket, Options::default());
    let mut seen = Seen::default();
    while !stop.load(Ordering::Relaxed) {
        let block = random.usize(..model.len());
        let began = Instant::now();
        if random.bool() {
            model[block] = random.u64(..);
            guest.write(0, first + block as u64, model[block]);
        } else {
            let bytes = guest.read(0, first + block as u64);
            let expected = model[block].to_le_bytes();
            assert!(bytes.chunks(8).all(|word| word == expected), "block {block}");
        }
        seen.note(began);
    }
    seen
}

fn neighbours_are_served_beside_hostile_parties(engine: Engine) {
    let mut random = seeded();
    let seconds = std::env::var("BLOCKHOUSE_HOSTILE_SECONDS");
    let seconds = seconds.map_or(3.0, |seconds| seconds.parse().expect("seconds"));
    let scratch = Scratch::in_memory();
    let mut sides = Sides::start(&scratch, engine);
    let until = Instant::now() + Duration::from_secs_f64(seconds);
    let stop = AtomicBool::new(false);
    let seeds: [u64; 4] = std::array::from_fn(|_| random.u64(..));
    let rng = |index: usize| Rng::with_seed(seeds[index]);
    let (nbd, vhost) = std::thread::scope(|scope| {
        let nbd = scope.spawn(|| neighbour_over_nbd(&sides.neighbour_socket, &mut rng(0), &stop));
        let vhost =
            scope.spawn(|| neighbour_over_vhost(&sides.neighbour_device, &mut rng(1), &stop));
        let guest = ["guest", &sides.hostile_device];
        let guests = scope.spawn(move || misbehave(&guest, &mut rng(2), until));
        let client = ["client", &sides.hostile_socket, "hostile"];
        misbehave(&client, &mut rng(3), until);
        let guests = guests.join();
        stop.store(true, Ordering::Relaxed);
        guests.expect("the hostile guests ran");
        (nbd.join().expect("NBD goes on"), vhost.join().expect("the guest goes on"))
    });
    eprintln!("neighbours: NBD {nbd:?}, vhost-user {vhost:?}");
    for seen in [nbd, vhost] {
        assert!(seen.requests > 20 && seen.slowest < EVER, "{seen:?}");
        assert!(seen.late * 100 <= seen.requests, "{seen:?}");
    }
    assert!(sides.server.is_running(), "{}", sides.server.log());
    assert!(sides.server.resident_memory() < MEMORY, "{}", sides.server.resident_memory());
    sides.server.stop();
}

on_every_engine! {
    neighbours_are_served_beside_hostile_parties
}
