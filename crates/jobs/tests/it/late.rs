//! Targets that take longer than the guest may wait.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{Buffer, Durability, Request};
use blockhouse_disk::{Disk, ExportKind, Options};
use blockhouse_jobs::{Completion, CopyMode, JobControl, JobEnd, JobStage, Mirror, MirrorOptions};
use blockhouse_sim::{Config, Latency, Sim, SimDisk, Task};

use crate::scene::clock;

const MARK: &[u8] = b"blockhouse: mirror not complete\n";
const SIZE: usize = 64 << 10;

struct Slow {
    sim: Sim,
    source: Arc<Disk<SimDisk>>,
    target: SimDisk,
    control: Arc<JobControl>,
    job: Task<JobEnd>,
    /// Whether the source was kept.
    is_kept: Rc<Cell<bool>>,
}

/// A mirror to a disk whose operations take so many microseconds.
fn slow(seed: u64, latency: u64, mode: CopyMode) -> Slow {
    let sim = Sim::new(seed);
    let from = SimDisk::new(&sim, Config::default(), vec![7; SIZE]);
    let config = Config { latency: Latency::fixed(latency, 0), ..Config::default() };
    let target = SimDisk::new(&sim, config, vec![0; SIZE]);
    let source = Arc::new(Disk::raw(from, Options::default()).expect("a disk"));
    let to = Arc::new(Disk::raw(target.clone(), Options::default()).expect("a disk"));
    let control = Arc::new(JobControl::default());
    let (options, is_kept) = (MirrorOptions { mode, ..Default::default() }, Rc::default());
    let kept: Rc<Cell<bool>> = Rc::clone(&is_kept);
    let mirror = Mirror::new(Arc::clone(&source), to, options, Arc::clone(&control), clock(&sim));
    let mirror = mirror.expect("they fit").source_kept(move || kept.set(true));
    let job = sim.spawn(async move { mirror.run().await });
    Slow { sim, source, target, control, job, is_kept }
}

impl Slow {
    /// Writes a block as a guest does; how long that took.
    async fn write(sim: Sim, disk: Arc<Disk<SimDisk>>) -> Duration {
        let began = sim.clock().now();
        let mut buffer = Buffer::new(4096);
        buffer.bytes_mut().fill(9);
        let (from, durability) = (buffer.lend(), Durability::None);
        let request = Request::Write { offset: 0, from, durability };
        disk.submit_from(ExportKind::Nbd, request).await.expect("no error of the target");
        sim.clock().now() - began
    }
}

/// Completes a mirror whose last write is late. Whether it failed: the simulation may have the process stand still until the
/// write has ended, and then it was not late.
fn complete_late(seed: u64) -> bool {
    let slow = slow(seed, 1_500_000, CopyMode::Background);
    let Slow { sim, source, target, control, job, is_kept } = slow;
    let (own, asked, kept) = (sim.clone(), Arc::clone(&control), Rc::clone(&is_kept));
    sim.block_on(async move {
        asked.next_stage(&JobStage::Running).await;
        assert!(asked.complete(Completion::Switch));
        // While changes are held off.
        own.sleep(Duration::from_millis(100)).await;
        let waited = Slow::write(own, Arc::clone(&source)).await;
        // Otherwise it came before changes were held off.
        let has_waited = waited > Duration::from_millis(500);
        let is_known = kept.get() || source.is_replaced();
        assert!(is_known || !has_waited, "the record goes before the guest goes on");
    });
    if !is_kept.get() {
        return false;
    }
    let known = Arc::clone(&control);
    let decided = sim.block_on(async move { known.decided().await });
    assert!(format!("{decided:?}").contains("do not use the mirror"), "{decided:?}");
    let end = sim.block_on(async move { job.join().await });
    assert!(format!("{end:?}").contains("takes longer"), "{end:?}");
    assert!(target.content().starts_with(MARK), "the target looks complete");
    true
}

#[test]
fn a_last_write_that_comes_too_late_is_undone_when_it_has_come() {
    let late = (0..20).filter(|seed| complete_late(*seed)).count();
    assert!(late > 10, "{late} of 20 were late");
}

#[test]
fn a_cancelled_job_lets_the_guest_go_whatever_the_target_does() {
    // A minute for each operation: the first copies are in flight when it is cancelled.
    let Slow { sim, source, control, job, .. } = slow(1, 60_000_000, CopyMode::WriteBlocking);
    let own = sim.clone();
    sim.block_on(async move { own.sleep(Duration::from_secs(400)).await });
    let writing = sim.spawn(Slow::write(sim.clone(), Arc::clone(&source)));
    let own = sim.clone();
    sim.block_on(async move { own.sleep(Duration::from_secs(1)).await });
    assert!(writing.output().is_none(), "it waits for the target");
    assert!(control.cancel());
    let waited = sim.block_on(async move { writing.join().await });
    assert!(waited < Duration::from_secs(2), "the guest waited {waited:?}");
    let known = Arc::clone(&control);
    assert_eq!(sim.block_on(async move { known.decided().await }), JobEnd::Cancelled);
    assert_eq!(sim.block_on(async move { job.join().await }), JobEnd::Cancelled);
}
