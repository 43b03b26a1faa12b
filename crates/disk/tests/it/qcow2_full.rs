//! A host without room under a qcow2 image, at every write and from every request on: the guest
//! learns it by ENOSPC, nothing else is lost, and when there is room again all works again.

use blockhouse_core::{
    Alignment, Buffer, ByteRange, Durability, ErrorKind, Fallback, Request, Unmap, errno,
};
use blockhouse_disk::{Disk, ImageFormat, Options};
use blockhouse_format::qcow2::{self, CreateOptions, Qcow2, Switch};
use blockhouse_sim::{Config, Fault, Latency, OperationKind, Report, Rng, Sim, SimDisk, for_seeds};

const SIZE: u64 = 192 << 10;
/// The disk's size from the middle on.
const LARGER: u64 = 288 << 10;
const STEPS: usize = 14;

/// When the host has no room.
#[derive(Clone, Copy, Debug)]
enum Full {
    /// At one write, counted from 0.
    AtWrite(u64),
    /// From one step on to the last.
    FromStep(usize),
}

/// One request, or a new size.
#[derive(Clone, Copy, Debug)]
enum Step {
    Write(ByteRange, u8, Durability),
    Zero(ByteRange, Unmap),
    Discard(ByteRange),
    Flush,
    Grow,
}

fn steps(random: &mut Rng) -> Vec<Step> {
    let mut steps: Vec<Step> = (1..=STEPS as u8)
        .map(|number| {
            let start = random.u64(..SIZE / 512) * 512;
            let length = [512, 4096, 20_480][random.usize(..3)].min(SIZE - start);
            let range = ByteRange::between(start, start + length);
            match random.u8(..10) {
                0 => Step::Zero(range, Unmap::Allowed),
                1 => Step::Zero(range, Unmap::Forbidden),
                2 => Step::Discard(range),
                3 => Step::Flush,
                4..7 => Step::Write(range, number, Durability::Data),
                _ => Step::Write(range, number, Durability::None),
            }
        })
        .collect();
    steps.insert(STEPS / 2, Step::Grow);
    steps.push(Step::Flush);
    steps
}

async fn carry_out(disk: &Disk<SimDisk>, step: Step) -> blockhouse_core::Result<()> {
    let durability = Durability::None;
    match step {
        Step::Write(range, byte, durability) => {
            let mut buffer = Buffer::new(range.length() as usize);
            buffer.bytes_mut().fill(byte);
            let (offset, from) = (range.offset(), buffer.lend());
            disk.submit(Request::Write { offset, from, durability }).await
        }
        Step::Zero(range, unmap) => {
            let fallback = Fallback::Allowed;
            disk.submit(Request::WriteZeroes { range, unmap, fallback, durability }).await
        }
        Step::Discard(range) => disk.submit(Request::Discard { range, durability }).await,
        Step::Flush => disk.flush().await,
        Step::Grow => disk.resize(LARGER).await,
    }
}

/// The value of each byte, where that is known.
struct Model(Vec<Option<u8>>);

impl Model {
    fn note(&mut self, step: Step, outcome: Result<(), ()>) {
        let (range, byte) = match step {
            Step::Write(range, byte, _) => (range, Some(byte)),
            Step::Zero(range, _) => (range, Some(0)),
            Step::Discard(range) => (range, None),
            Step::Flush | Step::Grow => return,
        };
        let byte = outcome.ok().and(byte);
        self.0[range.offset() as usize..range.end() as usize].fill(byte);
    }

    async fn compare(&self, disk: &Disk<SimDisk>) {
        let mut buffer = Buffer::new(self.0.len());
        disk.submit(Request::Read { offset: 0, into: buffer.lend() }).await.expect("a read");
        for (at, (&byte, known)) in buffer.bytes().iter().zip(&self.0).enumerate() {
            assert!(known.is_none_or(|known| known == byte), "at {at}: {byte}, not {known:?}");
        }
    }
}

/// Goes through the steps on a host that is full at some time; whether that struck.
fn endure(options: &CreateOptions, seed: u64, full: Full) -> bool {
    let mut random = Rng::with_seed(seed);
    let steps = steps(&mut random);
    let sim = Sim::new(random.u64(..));
    // Blocks are no larger than clusters.
    let blocks = [1, 512, 4096, 16_384, 65_536];
    let fitting = blocks.iter().filter(|block| u64::from(**block) <= options.cluster_size).count();
    let block = blocks[random.usize(..fitting)];
    let alignment = Alignment { offset: block, memory: block.min(512) };
    let config = Config { alignment, latency: Latency::fixed(1, 1), ..Config::default() };
    let storage = SimDisk::new(&sim, config, Vec::new());
    let (options, file) = (options.clone(), storage.clone());
    let struck = sim.block_on(async move {
        qcow2::create(&file, &options).await.expect("a new image");
        let disk = Disk::open(file.clone(), ImageFormat::Qcow2, Options::default())
            .await
            .expect("the new image");
        let mut model = Model(vec![Some(0); SIZE as usize]);
        let no_room = |fault: Fault| file.fail(fault.of(OperationKind::Write));
        if let Full::AtWrite(n) = full {
            no_room(Fault::nth(n, errno::ENOSPC));
        }
        let mut struck = false;
        for (number, &step) in steps.iter().enumerate() {
            if matches!(full, Full::FromStep(first) if first == number) {
                no_room(Fault::chance(1.0, errno::ENOSPC));
            }
            let outcome = carry_out(&disk, step).await;
            if let Err(error) = &outcome {
                let (kind, errno) = (error.kind(), error.errno());
                assert_eq!((kind, errno), (ErrorKind::NoSpace, errno::ENOSPC), "{step:?}: {error}");
                struck = true;
            }
            model.note(step, outcome.map_err(|_| ()));
        }
        model.compare(&disk).await;
        file.clear_faults();
        for &step in &steps {
            let outcome = carry_out(&disk, step).await;
            outcome.unwrap_or_else(|error| panic!("{step:?} with room again: {error}"));
            model.note(step, Ok(()));
        }
        model.compare(&disk).await;
        disk.close().await.expect("room");
        let disk =
            Disk::open(file, ImageFormat::Qcow2, Options::default()).await.expect("a closed image");
        assert_eq!(disk.size(), LARGER);
        model.compare(&disk).await;
        struck
    });
    sim.block_on(async move {
        let image = Qcow2::open(storage, qcow2::OpenOptions::default()).await.expect("an image");
        let report = qcow2::check(&image).await.expect("a check");
        assert_eq!((report.corruptions, report.leaks), (0, 0), "{:?}", report.problems);
    });
    struck
}

fn options(random: &mut Rng) -> CreateOptions {
    let switch = |on| if on { Switch::On } else { Switch::Off };
    let cluster_size = [512, 4096, 16_384, 65_536][random.usize(..4)];
    CreateOptions {
        cluster_size,
        refcount_bits: [1, 16, 64][random.usize(..3)],
        lazy_refcounts: switch(random.bool()),
        extended_l2: switch(cluster_size == 16_384 && random.bool()),
        ..CreateOptions::new(SIZE)
    }
}

#[test]
fn a_full_host_is_told_by_enospc_and_survived() {
    let name = "a_full_host_is_told_by_enospc_and_survived";
    let report = for_seeds(env!("CARGO_PKG_NAME"), name, 60, |seed| {
        let options = options(&mut Rng::with_seed(seed));
        let mut failed = 0;
        for n in 0.. {
            let is_struck = endure(&options, seed, Full::AtWrite(n));
            if !is_struck && n > 2 * STEPS as u64 {
                break;
            }
            failed += u64::from(is_struck);
        }
        for step in 0..=STEPS {
            failed += u64::from(endure(&options, seed, Full::FromStep(step)));
        }
        Ok(Report { requests: STEPS as u64, failed, ..Report::default() })
    });
    assert!(report.failed > 8 * report.seeds, "{report:?}");
}
