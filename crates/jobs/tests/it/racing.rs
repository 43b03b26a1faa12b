//! Guests whose writes to the same bytes race: the disk holds any of them, and its mirror the same
//! one.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{Buffer, ByteRange, Durability, Fallback, Request, Unmap};
use blockhouse_disk::{Disk, ExportKind};
use blockhouse_jobs::{Completion, CopyMode, JobControl, JobEnd, Mirror, MirrorOptions};
use blockhouse_sim::{Report, Rng, Sim, SimDisk, add_late_operations, for_seeds};

use crate::guests;
use crate::scene::{self, clock};

const SIZE: u64 = 96 << 10;

/// Changes any bytes of the disk until it refuses or all are made.
async fn change(sim: Sim, disk: Arc<Disk<SimDisk>>, mut random: Rng) {
    for number in 1..120 {
        let start = random.u64(..SIZE / 512);
        let count = random.u64(1..=(SIZE / 512 - start).min(24));
        let range = ByteRange::between(start * 512, (start + count) * 512);
        let durability = Durability::None;
        let request = match random.u8(..6) {
            0 => Request::Discard { range, durability },
            1 => {
                let (unmap, fallback) = (Unmap::Allowed, Fallback::Allowed);
                Request::WriteZeroes { range, unmap, fallback, durability }
            }
            _ => {
                let mut buffer = Buffer::new(range.length() as usize);
                buffer.bytes_mut().fill(number);
                Request::Write { offset: range.offset(), from: buffer.lend(), durability }
            }
        };
        if disk.submit_from(ExportKind::Nbd, request).await.is_err() {
            return;
        }
        sim.sleep(Duration::from_micros(random.u64(..30))).await;
    }
}

fn race(seed: u64) -> Result<Report, String> {
    let sim = Sim::new(seed);
    let mut random = sim.fork_prng();
    let (own, mut making) = (sim.clone(), random.fork());
    let content = vec![0x5a; SIZE as usize];
    let (source, target) = sim.block_on(async move {
        let source = scene::disk(&own, &mut making, &content).await.expect("a source");
        (source, scene::disk(&own, &mut making, &vec![0; SIZE as usize]).await.expect("a target"))
    });
    let mut late = Rng::with_seed(!seed);
    for storage in [&source.storage, &target.storage] {
        add_late_operations(storage, &mut late);
    }
    let mode = [CopyMode::Auto, CopyMode::Background, CopyMode::WriteBlocking][random.usize(..3)];
    let granularity = [4096, 8192][random.usize(..2)];
    let backlog = [1, 16 << 10, 4 << 20][random.usize(..3)];
    let options = MirrorOptions { is_target_zero: true, mode, granularity, backlog };
    let (control, clock) = (Arc::new(JobControl::default()), clock(&sim));
    let (from, to) = (Arc::clone(&source.disk), Arc::clone(&target.disk));
    let mirror = Mirror::new(from, to, options, Arc::clone(&control), Rc::clone(&clock));
    let mirror = mirror.map_err(|error| error.to_string())?;
    let guests: Vec<_> = (0..4)
        .map(|_| sim.spawn(change(sim.clone(), Arc::clone(&source.disk), random.fork())))
        .collect();
    let (wait, own) = (Duration::from_micros(random.u64(..80_000)), sim.clone());
    let end = sim.block_on(async move {
        let steer = async {
            own.sleep(wait).await;
            scene::complete(&control, Completion::HandOver).await;
        };
        let run = async {
            let end = mirror.run().await;
            control.end(end.clone());
            end
        };
        futures_util::future::join(run, steer).await.0
    });
    if let JobEnd::Failed(why) = &end
        && why.contains("takes longer")
    {
        return Ok(Report::default());
    }
    sim.block_on(async move {
        for guest in guests {
            guest.join().await;
        }
        let both = (guests::read(&source.disk).await, guests::read(&target.disk).await);
        let (source, target) = (both.0.map_err(text)?, both.1.map_err(text)?);
        match source.iter().zip(&target).position(|(one, other)| one != other) {
            None => Ok(Report::default()),
            Some(at) => Err(format!(
                "{mode:?}, {end:?}: byte {at} is {} and {} in the mirror",
                source[at], target[at]
            )),
        }
    })
}

fn text(error: blockhouse_core::Error) -> String {
    error.to_string()
}

#[test]
fn a_mirror_has_what_the_disk_has_of_racing_writes() {
    let test = "racing::a_mirror_has_what_the_disk_has_of_racing_writes";
    for_seeds(env!("CARGO_PKG_NAME"), test, 60, race);
}
