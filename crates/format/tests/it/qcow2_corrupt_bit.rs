//! An image that is found corrupt while it is written says so from then on: durably, whatever else
//! happens to its header at the same time, and also where its tables could not be written before.

use std::rc::Rc;
use std::time::Duration;

use blockhouse_core::{ByteRange, ErrorKind, Result, SyncMode, errno};
use blockhouse_format::Intent;
use blockhouse_format::qcow2::{CreateOptions, OpenOptions, Qcow2, Switch, create};
use blockhouse_sim::{
    Config, Fault, OperationKind, Report, Rng, SeedSelection, Sim, SimDisk, for_seeds,
};

use crate::common::write;

const CLUSTER: u64 = 4096;
const SIZE: u64 = 16 * CLUSTER;
const IS_CORRUPT: (usize, u8) = (79, 2);

/// An image whose second cluster is said to lie far beyond the end of the file.
fn damaged_image(lazy: Switch) -> Vec<u8> {
    let options =
        CreateOptions { cluster_size: CLUSTER, lazy_refcounts: lazy, ..CreateOptions::new(SIZE) };
    let sim = Sim::new(0);
    let disk = SimDisk::new(&sim, Config::default(), Vec::new());
    let made = disk.clone();
    sim.block_on(async move {
        create(&made, &options).await.unwrap();
        let image = Qcow2::open(made, OpenOptions::default()).await.unwrap();
        write(&image, 0, &[1; 2 * CLUSTER as usize], 0).await.unwrap();
        image.close().await.unwrap();
    });
    let mut bytes = disk.content();
    let word = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let table = (word(word(40) as usize) & ((1 << 56) - 512)) as usize;
    bytes[table + 8..table + 16].copy_from_slice(&(1_u64 << 63 | 1 << 40).to_be_bytes());
    bytes
}

fn open(sim: &Sim, disk: &SimDisk) -> Rc<Qcow2<SimDisk>> {
    let opened = disk.clone();
    let image = sim.block_on(async move { Qcow2::open(opened, OpenOptions::default()).await });
    Rc::new(image.expect("nobody has looked at the damage yet"))
}

/// Changes the damaged cluster.
async fn stumble(image: &Qcow2<SimDisk>) {
    let range = ByteRange::between(CLUSTER, 2 * CLUSTER);
    let error = image.map(range, Intent::Write).await.expect_err("it has no place");
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error:?}");
}

fn says_corrupt(image: &[u8]) -> bool {
    image[IS_CORRUPT.0] & IS_CORRUPT.1 != 0
}

#[test]
fn the_bit_is_durable_where_tables_could_not_be_written_before() {
    for seed in 0..50 {
        let sim = Sim::new(seed);
        let disk = SimDisk::new(&sim, Config::default(), damaged_image(Switch::Off));
        let image = open(&sim, &disk);
        let used = Rc::clone(&image);
        let faulty = disk.clone();
        let outcome: Result<()> = sim.block_on(async move {
            write(&used, 5 * CLUSTER, &[2; 512], 0).await?;
            faulty.fail(Fault::nth(0, errno::EIO).of(OperationKind::Write));
            used.flush(SyncMode::Data).await
        });
        assert_eq!(outcome.expect_err("a table was not written").kind(), ErrorKind::Io);
        disk.clear_faults();
        sim.block_on(async move { stumble(&image).await });
        let mut random = Rng::with_seed(seed);
        for _ in 0..10 {
            assert!(says_corrupt(&disk.crash(&mut random)), "seed {seed}");
        }
    }
}

#[test]
fn the_bit_and_another_change_of_the_header_both_get_there() {
    let test = "the_bit_and_another_change_of_the_header_both_get_there";
    let report = for_seeds(env!("CARGO_PKG_NAME"), test, 3_000, |seed| {
        let sim = Sim::new(seed);
        let mut random = sim.fork_prng();
        let is_lazy = random.bool();
        let content = damaged_image(if is_lazy { Switch::On } else { Switch::Off });
        let disk = SimDisk::new(&sim, Config::default(), content);
        let image = open(&sim, &disk);
        let (grown, delay) = (Rc::clone(&image), random.u64(..2000));
        let growth = sim.spawn(async move {
            write(&grown, 5 * CLUSTER, &[2; 512], 0).await?;
            grown.size_change().grow(SIZE + CLUSTER).await?;
            grown.flush(SyncMode::Full).await
        });
        let clock = sim.clone();
        let stumbling = sim.spawn(async move {
            clock.sleep(Duration::from_micros(delay)).await;
            stumble(&image).await;
        });
        sim.run();
        stumbling.output().ok_or("the bit was waited for for ever")?;
        let outcome = growth.output().ok_or("the size was waited for for ever")?;
        let left = disk.crash(&mut random);
        if !says_corrupt(&left) {
            return Err("the corrupt bit is lost".into());
        }
        let size = u64::from_be_bytes(left[24..32].try_into().unwrap());
        if outcome.is_ok() && size != SIZE + CLUSTER {
            return Err(format!("the size is {size}, although its change was flushed"));
        }
        Ok(Report {
            requests: 2,
            crashes: 1,
            failed: u64::from(outcome.is_err()),
            ..Report::default()
        })
    });
    if SeedSelection::of_this_run() == SeedSelection::Default {
        assert!(
            (report.seeds / 30..report.seeds * 29 / 30).contains(&report.failed),
            "both are to come first at times: {report:?}"
        );
    }
}
