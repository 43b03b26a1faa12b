//! Servers of qcow2 images that are killed (SIGKILL) under load, repeatedly on the same image: no
//! write that was acknowledged as durable is lost, and the image has at most leaks.

use std::collections::HashMap;
use std::process::{Child, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

use blockhouse_tests::nbd::{Address, Client, Request, command, flag};
use blockhouse_tests::{
    Cache, Engine, Scratch, Serve, Server, blockhouse, need, on_every_engine_and_cache, require,
    run, seeded, tool, wait_for_exit,
};
use fastrand::Rng;
use rustix::process::Signal;

const MIB: u64 = 1 << 20;
/// The part that fio writes and flushes before each kill: all its data must be there.
const VERIFIED: u64 = 16 * MIB;
/// The part in which fio writes, flushes and trims when the server is killed.
const BUSY: std::ops::Range<u64> = VERIFIED..48 * MIB;
/// The part of the durable writes, which are acknowledged one by one.
const DURABLE: std::ops::Range<u64> = 48 * MIB..80 * MIB;
const SIZE: u64 = 80 * MIB;

const WRITERS: u64 = 4;
const BLOCK: u64 = 4096;
const KILLS: u64 = 3;

/// The permitted writes in each block: the last acknowledged one, and those sent after it.
#[derive(Default)]
struct Promises(HashMap<u64, Promise>);

#[derive(Default)]
struct Promise {
    kept: u64,
    sent: Vec<u64>,
}

/// The content of a block after this write, unlike that of any other; write 0 stands for no write.
fn block(offset: u64, write: u64) -> Vec<u8> {
    if write == 0 {
        return vec![0; BLOCK as usize];
    }
    [offset.to_le_bytes(), write.to_le_bytes()].concat().repeat(BLOCK as usize / 16)
}

/// Writes durably until the server ends.
fn write_durably(address: &Address, part: u64, first: u64, mut random: Rng) -> Promises {
    let mut client = Client::open(address);
    let mut promises = Promises::default();
    let length = (DURABLE.end - DURABLE.start) / WRITERS;
    for write in first.. {
        let offset = DURABLE.start + part * length + random.u64(..length / BLOCK) * BLOCK;
        let promise = promises.0.entry(offset).or_default();
        promise.sent.push(write);
        let request = Request { command: command::WRITE, flags: flag::FUA, offset, length: BLOCK };
        let Ok(_) = client.send_with(request, &block(offset, write)) else { break };
        let Ok((_, reply)) = client.receive() else { break };
        assert_eq!(reply.error, 0, "a durable write failed");
        (promise.kept, promise.sent) = (write, Vec::new());
    }
    promises
}

impl Promises {
    /// Adds newer permitted writes: an acknowledged one replaces the older ones.
    fn learn(&mut self, newer: Self) {
        for (offset, promise) in newer.0 {
            let known = self.0.entry(offset).or_default();
            if promise.kept > 0 {
                (known.kept, known.sent) = (promise.kept, Vec::new());
            }
            known.sent.extend(promise.sent);
        }
    }

    fn count(&self) -> usize {
        self.0.values().filter(|promise| promise.kept > 0).count()
    }

    fn check(&self, client: &mut Client) {
        for (&offset, promise) in &self.0 {
            let found = client.read(offset, BLOCK).expect("a read");
            let may_be = [promise.kept].into_iter().chain(promise.sent.iter().copied());
            let is_kept = may_be.into_iter().any(|write| found == block(offset, write));
            assert!(
                is_kept,
                "at {offset} write {} was acknowledged, {:?} were sent after it; there is {:?}",
                promise.kept,
                promise.sent,
                &found[..16]
            );
        }
    }
}

fn fio(scratch: &Scratch, server: &Server, words: &[&str]) -> std::process::Command {
    let mut fio = tool("fio");
    fio.args(["--name=load", "--thread", "--ioengine=nbd", "--rw=randwrite"]).args(words);
    fio.arg(format!("--uri={}", server.uri())).current_dir(scratch.short());
    fio
}

/// The arguments for fio to write or verify the first part of the disk with a seed.
fn verified(seed: u64) -> Vec<String> {
    let words = format!(
        "--bsrange=4k-64k --bs_unaligned=0 --iodepth=16 --size={VERIFIED} --verify=crc32c \
         --verify_fatal=1 --end_fsync=1 --randseed={seed}"
    );
    words.split_whitespace().map(str::to_owned).collect()
}

/// Starts a load that runs until it is ended.
fn load(scratch: &Scratch, server: &Server, seed: u64) -> Child {
    let offset = format!("--offset={}", BUSY.start);
    let size = format!("--size={}", BUSY.end - BUSY.start);
    let seed = format!("--randseed={seed}");
    let endless = ["--time_based", "--runtime=600", "--fsync=16", "--iodepth=16"];
    let shape = ["--bsrange=512-128k", "--bs_unaligned=1", &offset, &size, &seed];
    let mut fio = fio(scratch, server, &[&endless[..], &shape[..]].concat());
    fio.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    fio.spawn().expect("fio starts")
}

/// Kills the server while all clients write; returns what the durable writers know.
fn kill_under_load(
    scratch: &Scratch,
    mut server: Server,
    first: u64,
    random: &mut Rng,
) -> Promises {
    let mut busy = load(scratch, &server, random.u64(..1 << 40));
    let writers: Vec<JoinHandle<Promises>> = (0..WRITERS)
        .map(|part| {
            let (address, random) = (server.address(), random.fork());
            let first = first + part * 1_000_000;
            std::thread::spawn(move || write_durably(&address, part, first, random))
        })
        .collect();
    std::thread::sleep(Duration::from_millis(random.u64(150..900)));
    server.signal(Signal::KILL);
    let limit = Duration::from_secs(30);
    server.wait(limit);
    let mut promises = Promises::default();
    for writer in writers {
        promises.learn(writer.join().expect("no durable write failed"));
    }
    // fio ends by itself when no server answers.
    if wait_for_exit(&mut busy, limit).is_none() {
        let _ = busy.kill();
        let _ = busy.wait();
    }
    promises
}

/// Our own check and QEMU's may find leaks, and nothing else.
fn check(image: &str) {
    let ours = run(tool(blockhouse().to_str().expect("a plain path")).args(["check", image]));
    assert!(matches!(ours.status.code(), Some(0 | 3)), "{}", ours.describe("leaks at most"));
    let theirs = run(tool("qemu-img").args(["check", "-f", "qcow2", image]));
    assert!(matches!(theirs.status.code(), Some(0 | 3)), "{}", theirs.describe("leaks at most"));
}

fn create(scratch: &Scratch, options: &str) -> String {
    let image = scratch.path("disk.qcow2").to_str().expect("a plain path").to_owned();
    let mut create = tool(blockhouse().to_str().expect("a plain path"));
    create.args(["create", "--format", "qcow2", "-o", options, &image, &SIZE.to_string()]);
    run(&mut create).success();
    image
}

fn killed_servers_lose_nothing_that_was_acknowledged(engine: Engine, cache: Cache) {
    require!(need::tools(&["fio", "qemu-img"]));
    let scratch = Scratch::new();
    let mut random = seeded();
    let cluster_size = ["cluster_size=65536", "cluster_size=4096"][random.usize(..2)];
    let image = create(&scratch, cluster_size);
    let serve = || Serve::new(&scratch, image.as_ref()).engine(engine).cache(cache).start();
    let mut promises = Promises::default();
    for kill in 1..=KILLS {
        let server = serve();
        let words = verified(random.u64(..1 << 40));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        run(fio(&scratch, &server, &words).arg("--do_verify=0")).success();
        let newer = kill_under_load(&scratch, server, kill * 100_000_000, &mut random);
        assert!(newer.count() > 0, "nothing was acknowledged in time");
        promises.learn(newer);
        check(&image);
        let server = serve();
        promises.check(&mut Client::open(&server.address()));
        run(fio(&scratch, &server, &words).arg("--verify_only")).success();
        server.stop();
        check(&image);
    }
}

on_every_engine_and_cache! {
    killed_servers_lose_nothing_that_was_acknowledged
}

#[test]
fn refcounts_that_were_late_are_made_anew() {
    require!(need::tools(&["fio", "qemu-img"]));
    let scratch = Scratch::new();
    let mut random = seeded();
    let image = create(&scratch, "lazy_refcounts=on");
    let serve = || Serve::new(&scratch, image.as_ref()).cache(Cache::Writeback).start();
    let promises = kill_under_load(&scratch, serve(), 1, &mut random);
    let server = serve();
    promises.check(&mut Client::open(&server.address()));
    server.stop();
    // Rebuilt refcounts have no leaks.
    for mut check in [tool(blockhouse().to_str().expect("a plain path")), tool("qemu-img")] {
        run(check.args(["check", &image])).success();
    }
}
