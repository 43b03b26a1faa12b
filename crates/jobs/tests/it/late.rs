//! Targets that take longer than the guest may wait.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{Buffer, Durability, Request};
use blockhouse_disk::{Disk, ExportKind, Options};
use blockhouse_jobs::{Completion, CopyMode, JobControl, JobEnd, JobStage, Mirror, MirrorOptions};
use blockhouse_sim::{Config, Fault, Latency, OperationKind, Sim, SimDisk, Task};

use crate::scene::{self, clock};

const MARK: &[u8] = b"blockhouse: mirror not complete\n";
const SIZE: usize = 64 << 10;
const BLOCK: u64 = 4096;
/// Two blocks.
const BACKLOG: u64 = 2 * BLOCK;

struct Slow {
    sim: Sim,
    source: Arc<Disk<SimDisk>>,
    target: SimDisk,
    control: Arc<JobControl>,
    job: Task<JobEnd>,
    /// Whether the source was kept.
    is_kept: Rc<Cell<bool>>,
}

/// A mirror to a disk whose operations take this many microseconds, and which may be behind by this
/// many bytes.
fn slow(seed: u64, latency: u64, mode: CopyMode, backlog: u64) -> Slow {
    slow_of(SIZE, seed, latency, mode, backlog)
}

/// The same with disks of this many bytes.
fn slow_of(size: usize, seed: u64, latency: u64, mode: CopyMode, backlog: u64) -> Slow {
    let sim = Sim::new(seed);
    let from = SimDisk::new(&sim, Config::default(), vec![7; size]);
    let config = Config { latency: Latency::fixed(latency, 0), ..Config::default() };
    let target = SimDisk::new(&sim, config, vec![0; size]);
    let source = Arc::new(Disk::raw(from, Options::default()).expect("a disk"));
    let to = Arc::new(Disk::raw(target.clone(), Options::default()).expect("a disk"));
    let control = Arc::new(JobControl::default());
    let (options, is_kept) = (MirrorOptions { mode, backlog, ..Default::default() }, Rc::default());
    let kept: Rc<Cell<bool>> = Rc::clone(&is_kept);
    let mirror = Mirror::new(Arc::clone(&source), to, options, Arc::clone(&control), clock(&sim));
    let mirror = mirror.expect("they fit").source_kept(move || kept.set(true));
    let job = sim.spawn(async move { mirror.run().await });
    Slow { sim, source, target, control, job, is_kept }
}

impl Slow {
    /// Writes this block as a guest does; how long that took.
    async fn write(sim: Sim, disk: Arc<Disk<SimDisk>>, block: u64) -> Duration {
        let began = sim.clock().now();
        let mut buffer = Buffer::new(BLOCK as usize);
        buffer.bytes_mut().fill(9);
        let (from, durability) = (buffer.lend(), Durability::None);
        let request = Request::Write { offset: block * BLOCK, from, durability };
        disk.submit_from(ExportKind::Nbd, request).await.expect("no error of the target");
        sim.clock().now() - began
    }
}

/// Completes a mirror whose last write is late. Whether it failed: the simulation may have the
/// process stand still until the write has ended, and then it was not late.
fn complete_late(seed: u64) -> bool {
    let slow = slow(seed, 1_500_000, CopyMode::Background, BACKLOG);
    let Slow { sim, source, target, control, job, is_kept } = slow;
    let (own, asked, kept) = (sim.clone(), Arc::clone(&control), Rc::clone(&is_kept));
    let disk = Arc::clone(&source);
    sim.block_on(async move {
        asked.next_stage(&JobStage::Running).await;
        assert!(asked.complete(Completion::Switch));
        // While changes are held off.
        own.sleep(Duration::from_millis(100)).await;
        let waited = Slow::write(own, Arc::clone(&disk), 0).await;
        // Otherwise it came before changes were held off.
        let has_waited = waited > Duration::from_millis(500);
        let is_known = kept.get() || disk.is_replaced();
        assert!(is_known || !has_waited, "the record goes before the guest goes on");
    });
    if !is_kept.get() {
        return false;
    }
    let known = Arc::clone(&control);
    let why = sim.block_on(async move { known.ended_or_postponed(0).await.expect_err("late") });
    assert!(why.contains("takes longer"), "{why}");
    let known = Arc::clone(&control);
    let stage = sim.block_on(async move { known.next_stage(&JobStage::Completing).await });
    assert_eq!(stage, JobStage::Ready);
    assert!(target.content().starts_with(MARK), "the target looks complete");
    // It is quick now, and has what the guest has written since.
    target.set_latency(Latency::fixed(10, 0));
    let (own, disk) = (sim.clone(), Arc::clone(&source));
    sim.block_on(async move { Slow::write(own, disk, 3).await });
    let asked = Arc::clone(&control);
    drop(sim.spawn(async move { scene::complete(&asked, Completion::Switch).await }));
    let end = sim.block_on(async move { job.join().await });
    if let JobEnd::Completed { .. } = end {
        let (found, own) = (target.content(), sim.clone());
        assert!(source.is_replaced() && !found.starts_with(MARK));
        let blocks = [0, 3].map(|block| found[block * BLOCK as usize]);
        assert_eq!(blocks, [9, 9], "at {:?}", own.clock().now());
    }
    true
}

#[test]
fn a_last_write_that_comes_too_late_is_undone_when_it_has_come() {
    let late = (0..20).filter(|seed| complete_late(*seed)).count();
    assert!(late > 10, "{late} of 20 were late");
}

/// The old image does not answer when it is closed. Nothing of the guest waits for it, and that the
/// mirror is complete is known before.
#[test]
fn an_old_image_that_does_not_answer_keeps_no_mirror_from_its_end() {
    for kind in [OperationKind::Flush, OperationKind::Close] {
        let sim = Sim::new(1);
        let config = Config { needs_close: true, ..Config::default() };
        let [from, target] =
            [7, 0].map(|byte| SimDisk::new(&sim, config.clone(), vec![byte; SIZE]));
        let disk = |storage: &SimDisk| {
            Arc::new(Disk::raw(storage.clone(), Options::default()).expect("a disk"))
        };
        let (source, to) = (disk(&from), disk(&target));
        let control = Arc::new(JobControl::default());
        let (options, asked) = (MirrorOptions::default(), Arc::clone(&control));
        let mirror =
            Mirror::new(Arc::clone(&source), to, options, Arc::clone(&control), clock(&sim));
        let mirror = mirror.expect("they fit");
        let job = sim.spawn(async move { mirror.run().await });
        let hour = Duration::from_secs(3600);
        let (own, disk) = (sim.clone(), Arc::clone(&source));
        let end = sim.block_on(async move {
            asked.next_stage(&JobStage::Running).await;
            Slow::write(own.clone(), Arc::clone(&disk), 1).await;
            from.fail(Fault::late(0, hour).of(kind));
            assert!(asked.complete(Completion::Switch));
            let end = asked.decided().await;
            assert!(own.clock().now() < hour, "{kind:?}: known only when the old image is closed");
            Slow::write(own, disk, 2).await;
            end
        });
        assert!(matches!(end, JobEnd::Completed { .. }), "{kind:?}: {end:?}");
        assert!(source.is_replaced() && job.output().is_none(), "{kind:?}: nothing was late");
        assert_eq!([1, 2, 3].map(|block| target.content()[block * BLOCK as usize]), [9, 9, 7]);
        assert_eq!(sim.block_on(async move { job.join().await }), end);
    }
}

/// Cancels a mirror whose target is behind, a minute for each operation. Whether writes waited when
/// they had to, and not otherwise: the simulation may have the process stand still meanwhile.
fn cancel_behind(seed: u64) -> bool {
    let Slow { sim, source, control, job, .. } =
        slow(seed, 60_000_000, CopyMode::WriteBlocking, BACKLOG);
    let own = sim.clone();
    sim.block_on(async move { own.sleep(Duration::from_secs(400)).await });
    // Writes within the backlog do not wait.
    let within = (1..=BACKLOG / BLOCK).map(|block| {
        let (own, source) = (sim.clone(), Arc::clone(&source));
        sim.block_on(async move { Slow::write(own, source, block).await })
    });
    let longest = within.max().expect("a write");
    let writing = sim.spawn(Slow::write(sim.clone(), Arc::clone(&source), 7));
    let own = sim.clone();
    sim.block_on(async move { own.sleep(Duration::from_secs(1)).await });
    let early = writing.output();
    assert!(control.cancel());
    let has_waited = early.is_none();
    let waited = early.unwrap_or_else(|| sim.block_on(async move { writing.join().await }));
    let known = Arc::clone(&control);
    assert_eq!(sim.block_on(async move { known.decided().await }), JobEnd::Cancelled);
    assert_eq!(sim.block_on(async move { job.join().await }), JobEnd::Cancelled);
    has_waited && longest < Duration::from_secs(1) && waited < Duration::from_secs(2)
}

#[test]
fn writes_wait_only_while_the_target_is_behind_and_the_job_not_cancelled() {
    // Two of five are: in the others the process stands still for the minute in which the target
    // ends a write.
    let count = (0..60).filter(|seed| cancel_behind(*seed)).count();
    assert!(count > 12, "{count} of 60 were so");
}

/// Blocks that guests write in turn, each of them long after the time before: none of these writes
/// overlaps one on its way.
const GUEST_BLOCKS: u64 = 3000;
/// Many more than there are until a mirror is ready.
const MAX_WRITES: u64 = 200_000;

/// Guests without a rest have more writes on their way than are in flight, all the time.
#[test]
fn a_mirror_becomes_ready_where_the_target_is_slower_than_its_guests() {
    let (size, latency, backlog) = (16 << 20, 20_000, 4 << 20);
    let slow = slow_of(size, 1, latency, CopyMode::WriteBlocking, backlog);
    let Slow { sim, source, control, job, .. } = slow;
    let (written, is_over) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(false)));
    let guests: Vec<_> = (0..16)
        .map(|_| {
            let (own, source) = (sim.clone(), Arc::clone(&source));
            let (written, is_over) = (Rc::clone(&written), Rc::clone(&is_over));
            sim.spawn(async move {
                while !is_over.get() && written.get() < MAX_WRITES {
                    let number = written.replace(written.get() + 1);
                    Slow::write(own.clone(), Arc::clone(&source), 1 + number % GUEST_BLOCKS).await;
                }
            })
        })
        .collect();
    let asked = Arc::clone(&control);
    sim.block_on(async move { asked.next_stage(&JobStage::Running).await });
    assert!(control.stage() == JobStage::Ready && written.get() < MAX_WRITES, "never ready");
    is_over.set(true);
    for guest in guests {
        sim.block_on(async move { guest.join().await });
    }
    assert!(control.cancel());
    assert_eq!(sim.block_on(async move { job.join().await }), JobEnd::Cancelled);
}
