//! A host that cannot write back dirty pages: no flush and no durable write succeeds after an
//! acknowledged write was lost.
//!
//! The disk is a loop device over a sparse file on a small tmpfs, served through the page cache.
//! The kernel accepts every write to the device, finds at writeback that the tmpfs is full, drops
//! the data, and reports that once. The test reads the data that arrived from the file on the
//! tmpfs.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use blockhouse_tests::nbd::{Client, Request, command, errno, flag};
use blockhouse_tests::{
    Cache, Engine, FileSystem, LoopDevice, Scratch, Serve, SmallHost, on_every_engine, require,
    seeded,
};
use fastrand::Rng;
use rustix::fs::FallocateFlags;

const PIECE: u64 = 64 << 10;
/// Pieces of the disk; the host has space for about a third.
const PIECES: u64 = 96;
const ROOM: u64 = 32 * PIECE;
/// The space that is reserved at first and freed during the test.
const RESERVE: u64 = 8 * PIECE;

/// A full host under a loop device.
struct FullHost {
    backing: File,
    reserve: PathBuf,
    device: LoopDevice,
    _host: SmallHost,
}

impl FullHost {
    fn new(scratch: &Scratch) -> Result<Self, String> {
        let host = SmallHost::new(scratch, FileSystem::Tmpfs, ROOM)?;
        let path = host.path("backing");
        let options = File::options().read(true).write(true).create(true).clone();
        let backing = options.open(&path).map_err(|error| error.to_string())?;
        backing.set_len(PIECES * PIECE).map_err(|error| error.to_string())?;
        let mut device = LoopDevice::over_file(&path, &[])?;
        device.split_requests()?;
        Ok(Self { backing, reserve: host.path("reserve"), device, _host: host })
    }

    /// Makes the file one hole again, and allocates the reserve.
    fn reset(&self) {
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&self.backing, punch, 0, PIECES * PIECE).expect("holes");
        std::fs::write(&self.reserve, vec![1; RESERVE as usize]).expect("room for the reserve");
    }

    fn make_room(&self) {
        std::fs::remove_file(&self.reserve).expect("the reserve");
    }

    /// Starts the writeback that the kernel starts by itself after some time. An error that is
    /// reported here is still reported to the server, which has its own open file.
    fn write_back(&self) {
        let device = File::open(self.device.path()).expect("the device");
        let _ = device.sync_data();
    }

    /// The byte that a piece consists of, if all its bytes are equal.
    fn stored(&self, piece: u64) -> Option<u8> {
        let mut bytes = vec![0; PIECE as usize];
        self.backing.read_exact_at(&mut bytes, piece * PIECE).expect("the file is that long");
        bytes.iter().all(|&byte| byte == bytes[0]).then_some(bytes[0])
    }
}

/// What the client knows about the disk.
#[derive(Default)]
struct Model {
    /// The pieces that were written with success since the last failed write there, and their
    /// content.
    acknowledged: BTreeMap<u64, u8>,
    /// The pieces that must be stable, and their content.
    durable: BTreeMap<u64, u8>,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Write { piece: u64, fill: u8, durable: bool },
    Flush,
}

impl Step {
    fn random(random: &mut Rng, piece: u64) -> Self {
        match random.u8(..10) {
            0 => Self::Flush,
            kind => Self::Write { piece, fill: random.u8(1..), durable: kind < 4 },
        }
    }

    fn send(self, client: &mut Client) -> u64 {
        let sent = match self {
            Self::Flush => client.send(Request { command: command::FLUSH, ..Request::default() }),
            Self::Write { piece, fill, durable } => {
                let flags = if durable { flag::FUA } else { 0 };
                let (offset, length) = (piece * PIECE, PIECE);
                let request = Request { command: command::WRITE, flags, offset, length };
                client.send_with(request, &vec![fill; PIECE as usize])
            }
        };
        sent.expect("the server listens")
    }
}

impl Model {
    /// Adds the outcomes of steps that were in flight together, on different pieces.
    fn take(&mut self, outcomes: &[(Step, bool)]) {
        let before = self.acknowledged.clone();
        for &(step, is_ok) in outcomes {
            match (step, is_ok) {
                (Step::Flush, true) => self.durable.extend(&before),
                (Step::Flush, false) => {}
                (Step::Write { piece, fill, durable }, true) => {
                    self.acknowledged.insert(piece, fill);
                    if durable {
                        self.durable.insert(piece, fill);
                    }
                }
                (Step::Write { piece, .. }, false) => {
                    self.acknowledged.remove(&piece);
                    self.durable.remove(&piece);
                }
            }
        }
        // A piece that was overwritten since may have its old or its new content.
        for &(step, _) in outcomes {
            if let Step::Write { piece, .. } = step
                && self.durable.get(&piece) != self.acknowledged.get(&piece)
            {
                self.durable.remove(&piece);
            }
        }
    }
}

/// Runs one server from its start until well after the host is full; returns whether a flush or a
/// durable write failed.
fn run(host: &FullHost, scratch: &Scratch, engine: Engine, random: &mut Rng) -> bool {
    host.reset();
    let serve = Serve::new(scratch, host.device.path()).engine(engine).cache(Cache::Writeback);
    let server = serve.start();
    let mut client = Client::open(&server.address());
    let (mut model, mut has_failed) = (Model::default(), false);
    let makes_room_at = random.usize(8..40);
    for batch in 0..24 {
        if batch == makes_room_at {
            host.make_room();
        }
        if random.bool() {
            host.write_back();
        }
        let mut pieces: Vec<_> = (0..PIECES).collect();
        random.shuffle(&mut pieces);
        let count = random.usize(1..8);
        let steps = pieces[..count].iter().map(|&piece| Step::random(random, piece));
        let steps: Vec<_> = steps.collect();
        let sent: BTreeMap<_, _> =
            steps.into_iter().map(|step| (step.send(&mut client), step)).collect();
        let mut outcomes = Vec::new();
        for _ in 0..sent.len() {
            let (cookie, reply) = client.receive().expect("an answer");
            outcomes.push((sent[&cookie], reply.error == 0));
        }
        has_failed |= outcomes.iter().any(|&(step, is_ok)| match step {
            Step::Flush => !is_ok,
            Step::Write { durable, .. } => durable && !is_ok,
        });
        model.take(&outcomes);
        for (&piece, &fill) in &model.durable {
            let stored = host.stored(piece);
            assert_eq!(stored, Some(fill), "piece {piece} is lost after {outcomes:?}");
        }
    }
    client.disconnect();
    // If data was lost, the server ends with a failed flush, so its exit status is not checked.
    server.signal(rustix::process::Signal::TERM);
    drop(server);
    has_failed
}

fn no_flush_succeeds_over_lost_writes(engine: Engine) {
    let scratch = Scratch::in_memory();
    let host = require!(FullHost::new(&scratch));
    let mut random = seeded();
    let runs = std::env::var("BLOCKHOUSE_RUNS").map_or(8, |runs| runs.parse().expect("a number"));
    let failed = (0..runs).filter(|_| run(&host, &scratch, engine, &mut random)).count();
    eprintln!("{failed} of {runs} runs had a failure");
    assert!(failed > 0, "the host was never full");
}

/// The loss is reported to the durable write before the flush comes.
fn a_loss_that_a_durable_write_reports_fails_the_flush_too(engine: Engine) {
    let scratch = Scratch::in_memory();
    let host = require!(FullHost::new(&scratch));
    host.reset();
    let serve = Serve::new(&scratch, host.device.path()).engine(engine).cache(Cache::Writeback);
    let server = serve.start();
    let mut client = Client::open(&server.address());
    for piece in 0..PIECES {
        assert_eq!(client.write(piece * PIECE, &vec![1; PIECE as usize], 0), 0, "piece {piece}");
    }
    host.write_back();
    assert!((0..PIECES).any(|piece| host.stored(piece) != Some(1)), "there was room for all");
    host.make_room();
    // The loop driver and the page cache of devices report EIO, file systems ENOSPC.
    let reported = client.write(0, &vec![2; PIECE as usize], flag::FUA);
    assert!([errno::EIO, errno::ENOSPC].contains(&reported), "{reported}");
    assert_ne!(client.flush(), 0, "what was acknowledged is lost");
    assert_ne!(client.flush(), 0, "and stays so");
    assert_eq!(client.write(0, &vec![3; PIECE as usize], 0), 0, "a plain write promises nothing");
    client.disconnect();
}

/// If nothing was lost, a host that was full for a while has no later effect.
fn a_full_host_that_lost_nothing_is_forgiven(engine: Engine) {
    let scratch = Scratch::in_memory();
    let host = require!(SmallHost::new(&scratch, FileSystem::Ext4, 4 << 20));
    let (image, reserve) = (host.path("disk.img"), host.path("reserve"));
    let file = File::create(&image).and_then(|file| file.set_len(64 * PIECE));
    file.expect("a sparse image");
    std::fs::write(&reserve, vec![1; RESERVE as usize]).expect("room for the reserve");
    let server = Serve::new(&scratch, &image).engine(engine).cache(Cache::Writeback).start();
    let mut client = Client::open(&server.address());
    let durable = |client: &mut Client, piece: u64| {
        client.write(piece * PIECE, &vec![1; PIECE as usize], flag::FUA)
    };
    assert_eq!(client.write(63 * PIECE, &vec![9; PIECE as usize], 0), 0);
    let full = (0..63).find(|&piece| durable(&mut client, piece) != 0).expect("a full host");
    assert_eq!(durable(&mut client, full), errno::ENOSPC);
    assert_eq!(client.flush(), 0, "the earlier write is safe");
    std::fs::remove_file(&reserve).expect("the reserve");
    assert_eq!(durable(&mut client, full), 0, "there is room again");
    assert_eq!(client.flush(), 0);
    client.disconnect();
    server.stop();
}

on_every_engine! {
    no_flush_succeeds_over_lost_writes
    a_loss_that_a_durable_write_reports_fails_the_flush_too
    a_full_host_that_lost_nothing_is_forgiven
}
