//! qcow2 images of every make beside a flat array: after any sequence of batches of requests side
//! by side, of growth and of reopening, a closed image has no error and no leak for `qemu-img
//! check`, and for `qemu-img compare` it is the array.

use std::rc::Rc;

use blockhouse_core::{
    Alignment, Buffer, Durability, Fallback, Fua, GroupCommit, ReadAfterDiscard, Request, Unmap,
};
use blockhouse_disk::{Access, Disk, Image, ImageFormat, Options};
use blockhouse_format::qcow2::{self, Backing, CreateOptions, Qcow2, Switch, Version};
use blockhouse_sim::{Config, ImageState, Sim, SimDisk, Support};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{RngSeed, TestRunner};

use crate::common::{assert_same, span};
use crate::crashed::jury::Jury;
use crate::qemu;

const CASES: u32 = 200;
const SECTOR: usize = 512;

#[derive(Clone, Debug)]
struct Make {
    sectors: usize,
    cluster_bits: u32,
    refcount_order: u32,
    version: Version,
    lazy: Switch,
    extended: Switch,
    /// Sectors of the file behind.
    base: Option<usize>,
}

#[derive(Clone, Copy, Debug)]
enum Verb {
    Read,
    Write(u8),
    Zero(Unmap),
    Discard,
}

/// One request: what to do with the bytes from the last request's end on, after a gap.
#[derive(Clone, Debug)]
struct Step {
    gap: usize,
    length: usize,
    verb: Verb,
    durability: Durability,
}

#[derive(Clone, Debug)]
enum Event {
    Batch(Vec<Step>),
    Flush,
    Grow(usize),
    Reopen,
}

fn make() -> impl Strategy<Value = Make> {
    let switch = || prop_oneof![Just(Switch::Off), Just(Switch::On)];
    let base = prop_oneof![2 => Just(None), 1 => (1..2500_usize).prop_map(Some)];
    let bits = prop_oneof![Just(9_u32), Just(10), Just(12), Just(14), Just(16), Just(18)];
    let is_old = prop_oneof![4 => Just(false), 1 => Just(true)];
    (1..2000_usize, bits, 0..=6_u32, is_old, switch(), switch(), base).prop_map(
        |(sectors, cluster_bits, refcount_order, is_old, lazy, extended, base)| {
            let plain = is_old.then_some(Switch::Off);
            let is_small = cluster_bits < 14;
            Make {
                sectors,
                cluster_bits,
                refcount_order: if is_old { 4 } else { refcount_order },
                version: if is_old { Version::V2 } else { Version::V3 },
                lazy: plain.unwrap_or(lazy),
                extended: plain.unwrap_or(if is_small { Switch::Off } else { extended }),
                base,
            }
        },
    )
}

fn config() -> impl Strategy<Value = Config> {
    let block = prop_oneof![Just(1_u32), Just(512), Just(4096), Just(8192), Just(65536)];
    let support = || prop_oneof![Just(Support::Yes), Just(Support::No)];
    let group_commit = prop_oneof![Just(GroupCommit::Never), Just(GroupCommit::From(2))];
    (block, [support(), support(), support()], any::<bool>(), any::<bool>(), group_commit).prop_map(
        |(block, [write_zeroes, prepare_zeroes, discard], zeros, native, group_commit)| Config {
            prepare_zeroes,
            free_space: Some(1 << 40),
            alignment: Alignment { offset: block, memory: block.min(512) },
            write_zeroes,
            discard,
            read_after_discard: if zeros {
                ReadAfterDiscard::Zeros
            } else {
                ReadAfterDiscard::Undefined
            },
            group_commit,
            fua: if native { Fua::Native } else { Fua::Emulated },
            ..Config::default()
        },
    )
}

fn step() -> impl Strategy<Value = Step> {
    let gap = prop_oneof![
        Just(0),
        1..2000_usize,
        (0..80_usize).prop_map(|sectors| sectors * SECTOR),
        (0..8_usize).prop_map(|clusters| clusters << 16),
    ];
    let length = prop_oneof![
        3 => 1..6000_usize,
        4 => (1..20_usize).prop_map(|sectors| sectors * SECTOR),
        3 => (1..8_usize).prop_map(|pages| pages << 14),
        1 => 100_000..400_000_usize,
    ];
    let verb = prop_oneof![
        2 => Just(Verb::Read),
        5 => any::<u8>().prop_map(Verb::Write),
        1 => Just(Verb::Zero(Unmap::Allowed)),
        1 => Just(Verb::Zero(Unmap::Forbidden)),
        2 => Just(Verb::Discard),
    ];
    let durability = prop_oneof![
        2 => Just(Durability::None),
        1 => Just(Durability::Data),
        1 => Just(Durability::Full),
    ];
    (gap, length, verb, durability).prop_map(|(gap, length, verb, durability)| Step {
        gap,
        length,
        verb,
        durability,
    })
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        8 => vec(step(), 1..10).prop_map(Event::Batch),
        1 => Just(Event::Flush),
        1 => (1..500_usize).prop_map(Event::Grow),
        1 => Just(Event::Reopen),
    ]
}

/// The image under test, and what it should hold.
struct Bench {
    sim: Sim,
    storage: SimDisk,
    base: Option<Vec<u8>>,
    disk: Rc<Disk<SimDisk>>,
    flat: Vec<u8>,
    version: Version,
    read_after_discard: ReadAfterDiscard,
}

impl Bench {
    fn new(mut config: Config, make: &Make) -> Self {
        // Smaller clusters are for the page cache.
        config.alignment.offset = config.alignment.offset.min(1 << make.cluster_bits);
        let base: Option<Vec<u8>> =
            make.base.map(|sectors| (0..sectors).flat_map(|n| [n as u8 | 1; SECTOR]).collect());
        let sim = Sim::new(make.sectors as u64);
        let read_after_discard = config.read_after_discard;
        let storage = SimDisk::new(&sim, config, Vec::new());
        let options = CreateOptions {
            cluster_size: 1 << make.cluster_bits,
            refcount_bits: 1 << make.refcount_order,
            version: make.version,
            lazy_refcounts: make.lazy,
            extended_l2: make.extended,
            backing: base
                .is_some()
                .then(|| Backing { name: b"base".to_vec(), format: Some("raw".into()) }),
            ..CreateOptions::new((make.sectors * SECTOR) as u64)
        };
        let made = storage.clone();
        sim.block_on(async move { qcow2::create(&made, &options).await }).expect("a new image");
        let mut flat = base.clone().unwrap_or_default();
        flat.resize(make.sectors * SECTOR, 0);
        let disk = opened(&sim, &storage, base.as_deref());
        Self { sim, storage, base, disk, flat, version: make.version, read_after_discard }
    }

    fn happen(&mut self, event: &Event) {
        let disk = Rc::clone(&self.disk);
        match event {
            Event::Batch(steps) => self.run_batch(steps),
            Event::Flush => {
                self.sim.block_on(async move { disk.flush().await }).expect("a flush");
            }
            Event::Grow(sectors) => {
                let size = self.flat.len() + sectors * SECTOR;
                let grown = self.sim.block_on(async move { disk.resize(size as u64).await });
                grown.expect("a larger disk");
                self.flat.resize(size, 0);
            }
            Event::Reopen => {
                self.close();
                self.disk = opened(&self.sim, &self.storage, self.base.as_deref());
            }
        }
    }

    fn close(&self) {
        let disk = Rc::clone(&self.disk);
        self.sim.block_on(async move { disk.close().await }).expect("an orderly end");
    }

    /// Runs a batch; the array is changed as the disk should be.
    fn run_batch(&mut self, steps: &[Step]) {
        let mut next = 0;
        let mut running = Vec::new();
        for step in steps {
            let start = next + step.gap;
            let end = (start + step.length).min(self.flat.len());
            if start >= end {
                break;
            }
            next = end;
            let mut buffer = Buffer::new(end - start);
            let request = request(step, start as u64, &mut buffer);
            let disk = Rc::clone(&self.disk);
            let task = self.sim.spawn(async move { disk.submit(request).await });
            running.push((task, step.verb, start..end, buffer));
        }
        self.sim.run();
        for (task, verb, range, buffer) in running {
            task.output().expect("nobody waits for ever").expect("nothing fails here");
            match verb {
                Verb::Read => assert_same(buffer.bytes(), &self.flat[range]),
                Verb::Write(byte) => self.flat[range].fill(byte),
                Verb::Zero(_) => self.flat[range].fill(0),
                Verb::Discard => {
                    let bytes = self.read(range.clone());
                    self.check_discarded(range.clone(), &bytes);
                    // The present bytes have to stay.
                    self.flat[range].copy_from_slice(&bytes);
                }
            }
        }
    }

    /// A discard leaves each byte or makes it zero; it brings back nothing that was overwritten.
    /// Where the image cannot say zero, what lies over the backing file stays.
    fn check_discarded(&self, range: std::ops::Range<usize>, found: &[u8]) {
        let base = self.base.as_ref().map_or(0, Vec::len);
        let keeps = if self.version == Version::V2 { base } else { 0 };
        let stays = range.end.min(keeps).saturating_sub(range.start);
        assert_same(&found[..stays], &self.flat[range.clone()][..stays]);
        if self.read_after_discard == ReadAfterDiscard::Zeros {
            for (at, (&found, &old)) in (range.start..).zip(found.iter().zip(&self.flat[range])) {
                assert!(found == old || found == 0, "a discard made {found} of {old} at {at}");
            }
        }
    }

    fn read(&self, range: std::ops::Range<usize>) -> Vec<u8> {
        let (disk, mut buffer) = (Rc::clone(&self.disk), Buffer::new(range.len()));
        let read = Request::Read { offset: range.start as u64, into: buffer.lend() };
        self.sim.block_on(async move { disk.submit(read).await }).expect("a read");
        buffer.bytes().to_vec()
    }
}

fn opened(sim: &Sim, storage: &SimDisk, base: Option<&[u8]>) -> Rc<Disk<SimDisk>> {
    let storage = storage.clone();
    let behind = base.map(|base| SimDisk::new(sim, Config::default(), base.to_vec()));
    sim.block_on(async move {
        let image = Image::open(storage, ImageFormat::Qcow2, Options::default())
            .await
            .expect("a good image");
        let reading = Options { access: Access::ReadOnly, ..Options::default() };
        let behind = behind.map(|base| Image::raw(base, reading).expect("whole sectors"));
        Rc::new(Disk::new(match behind {
            Some(behind) => image.with_backing(&behind),
            None => image,
        }))
    })
}

fn request(step: &Step, offset: u64, buffer: &mut Buffer) -> Request {
    let (durability, range) = (step.durability, span(offset, buffer.bytes().len() as u64));
    match step.verb {
        Verb::Read => Request::Read { offset, into: buffer.lend() },
        Verb::Write(byte) => {
            buffer.bytes_mut().fill(byte);
            Request::Write { offset, from: buffer.lend(), durability }
        }
        Verb::Zero(unmap) => {
            Request::WriteZeroes { range, unmap, fallback: Fallback::Allowed, durability }
        }
        Verb::Discard => Request::Discard { range, durability },
    }
}

fn run_case(config: Config, make: &Make, events: &[Event]) -> Result<(), TestCaseError> {
    static JURY: Jury = Jury::for_one_in(1);
    let mut bench = Bench::new(config, make);
    for event in events {
        bench.happen(event);
    }
    bench.close();
    let storage = bench.storage.clone();
    let report = bench.sim.block_on(async move {
        let image = Qcow2::open(storage, qcow2::OpenOptions::default()).await.expect("an image");
        qcow2::check(&image).await.expect("it can be checked")
    });
    prop_assert_eq!((report.corruptions, report.leaks), (0, 0), "{:?}", report.problems);
    let content = bench.storage.content();
    prop_assert!(content.len() as u64 <= report.end, "the file is longer than {}", report.end);
    let base = bench.base.as_deref().map(|base| ("base", base));
    JURY.ask(&content, base, ImageState::Closed, &bench.flat).map_err(TestCaseError::fail)
}

#[test]
fn every_make_of_image_holds_what_a_flat_array_holds() {
    qemu::is_installed();
    let name = "every_make_of_image_holds_what_a_flat_array_holds";
    let seed = match std::env::var("BLOCKHOUSE_SIM_SEED") {
        Ok(seed) => seed.parse().expect("BLOCKHOUSE_SIM_SEED is a number"),
        Err(_) => blockhouse_sim::Rng::new().u64(..) >> 32,
    };
    let config_of_run = ProptestConfig {
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: None,
        ..ProptestConfig::with_cases(CASES)
    };
    let cases = (config(), make(), vec(event(), 1..12));
    let outcome = TestRunner::new(config_of_run)
        .run(&cases, |(config, make, events)| run_case(config, &make, &events));
    if let Err(error) = outcome {
        let package = env!("CARGO_PKG_NAME");
        let replay = format!("BLOCKHOUSE_SIM_SEED={seed} cargo test -p {package} {name}");
        panic!("{error}\nreplay with: {replay}");
    }
}
