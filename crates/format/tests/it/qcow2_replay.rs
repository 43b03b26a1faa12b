//! A dead process's answered writes are replayed where that is hard: on a block device, which has
//! no space at its end; with refcounts that cannot count further.

use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use blockhouse_core::{Buffer, ByteRange, Durability, ErrorKind, ExtentState, Storage, SyncMode};
use blockhouse_format::qcow2::{
    Compression, CreateOptions, OpenOptions, Qcow2, Switch, check, compress, create,
};
use blockhouse_format::{Abort, Intent, Replay};
use blockhouse_sim::{Config, Sim, SimDisk, Size};

use crate::common::{read, write};

/// Bytes of a cluster. A refcount block of 64-bit refcounts counts 64 of them.
const CLUSTER: u64 = 512;
/// Clusters of the guest's disk.
const CLUSTERS: u64 = 256;

type Log = Arc<Vec<AtomicU64>>;

fn new_log() -> Log {
    Arc::new((0..8 + 4 * 2000).map(|_| AtomicU64::new(0)).collect())
}

fn copy_of(log: &Log) -> Vec<AtomicU64> {
    log.iter().map(|word| AtomicU64::new(word.load(Relaxed))).collect()
}

/// A new image on a block device of this many clusters, with anything after it.
fn new_device(options: &CreateOptions, clusters: u64) -> Vec<u8> {
    let sim = Sim::new(0);
    let disk = SimDisk::new(&sim, Config::default(), Vec::new());
    let (made, options) = (disk.clone(), options.clone());
    sim.block_on(async move { create(&made, &options).await }).expect("a new image");
    let mut content = disk.content();
    content.resize((clusters * CLUSTER) as usize, 0xa5);
    content
}

fn options(lazy_refcounts: Switch) -> CreateOptions {
    let size = CLUSTERS * CLUSTER;
    CreateOptions {
        cluster_size: CLUSTER,
        refcount_bits: 64,
        lazy_refcounts,
        ..CreateOptions::new(size)
    }
}

/// Does something with a device in a process, and answers what the device holds when the process
/// has died.
fn die_after<F: Future<Output = ()> + 'static>(
    device: Vec<u8>,
    work: impl FnOnce(SimDisk) -> F,
) -> Vec<u8> {
    let sim = Sim::new(0);
    let disk = SimDisk::new(&sim, Config { size: Size::Fixed, ..Config::default() }, device);
    sim.block_on(work(disk.clone()));
    disk.content()
}

/// A process writes clusters, each with its number, until the device is full or all are written. It
/// flushes nothing, and dies. Returns which clusters it had answered.
fn fill(device: &mut Vec<u8>, log: &Log, clusters: Vec<u64>) -> Vec<u64> {
    let (answered, noted) = (Arc::new(std::sync::Mutex::new(Vec::new())), Arc::clone(log));
    let seen = Arc::clone(&answered);
    *device = die_after(std::mem::take(device), async move |disk| {
        let image = Qcow2::open(disk, OpenOptions::default()).await.expect("an image");
        image.redo().attach(noted);
        for cluster in clusters {
            match write(&image, cluster * CLUSTER, &content_of(cluster), 0).await {
                Ok(()) => seen.lock().unwrap().push(cluster),
                Err(error) if error.kind() == ErrorKind::NoSpace => break,
                Err(error) => panic!("{error}"),
            }
        }
    });
    Arc::into_inner(answered).unwrap().into_inner().unwrap()
}

fn content_of(cluster: u64) -> Vec<u8> {
    (cluster + 1).to_be_bytes().repeat(CLUSTER as usize / 8)
}

/// The next process replays the log: all that was answered is there, and nothing is corrupt.
fn replay(device: &mut Vec<u8>, log: &Log, answered: Vec<u64>) {
    let log = copy_of(log);
    *device = die_after(std::mem::take(device), async move |disk| {
        let opened = Qcow2::open_before_replay(disk, OpenOptions::default(), Some(&log)).await;
        let image = opened.expect("an image of a process that died");
        let outcome = image.redo().replay(&log).await.expect("there is room");
        assert!(matches!(outcome, Replay::Applied { .. }), "{outcome:?}");
        let report = check(&image).await.expect("a report");
        assert_eq!(report.corruptions, 0, "{:?}", report.problems);
        for cluster in answered {
            let bytes =
                read(&image, ByteRange::between(cluster * CLUSTER, (cluster + 1) * CLUSTER), 0)
                    .await;
            assert_eq!(bytes.expect("no failure"), content_of(cluster), "cluster {cluster}");
        }
    });
}

/// Clusters in an order that needs all L2 tables soon.
fn scattered() -> Vec<u64> {
    (0..CLUSTERS).map(|number| number * 67 % CLUSTERS).collect()
}

#[test]
fn a_replay_finds_room_for_refcounts_on_a_device() {
    for lazy_refcounts in [Switch::Off, Switch::On] {
        let mut device = new_device(&options(lazy_refcounts), 600);
        let log = new_log();
        let answered = fill(&mut device, &log, scattered());
        assert_eq!(answered.len() as u64, CLUSTERS);
        replay(&mut device, &log, answered);
    }
}

#[test]
fn a_replay_finds_room_on_a_device_that_its_process_had_filled() {
    for clusters in 150..230 {
        for lazy_refcounts in [Switch::Off, Switch::On] {
            let mut device = new_device(&options(lazy_refcounts), clusters);
            let log = new_log();
            let answered = fill(&mut device, &log, scattered());
            assert!((answered.len() as u64) < CLUSTERS, "{clusters}");
            replay(&mut device, &log, answered);
        }
    }
}

#[test]
fn a_recount_finds_room_on_a_device_without_a_log() {
    let mut device = new_device(&options(Switch::On), 230);
    device = die_after(device, async move |disk| {
        let image = Qcow2::open(disk, OpenOptions::default()).await.expect("an image");
        for cluster in 0..100 {
            write(&image, cluster * CLUSTER, &content_of(cluster), 0).await.expect("there is room");
        }
        image.flush(SyncMode::Data).await.expect("no failure");
    });
    // The refcount blocks are lost, as if they had been written later.
    die_after(device, async move |disk| {
        let image = Qcow2::open(disk, OpenOptions::default()).await.expect("there is room");
        assert!(!image.header().features().is_dirty);
        let report = check(&image).await.expect("a report");
        assert_eq!((report.corruptions, report.leaks), (0, 0), "{:?}", report.problems);
    });
}

/// A death after a writeback, and before the log is emptied: the refcount of compressed data is as
/// high as it can be, and counts what the log has.
#[test]
fn compressed_data_is_not_counted_beyond_what_a_refcount_holds() {
    let options = CreateOptions {
        cluster_size: 4096,
        refcount_bits: 1,
        ..CreateOptions::new(CLUSTERS * CLUSTER)
    };
    let log = new_log();
    let noted = Arc::clone(&log);
    let before = Arc::new(std::sync::Mutex::new(Vec::new()));
    let copied = Arc::clone(&before);
    let device = die_after(new_device(&options, 600), async move |disk| {
        let image = Qcow2::open(disk, OpenOptions::default()).await.expect("an image");
        image.redo().attach(Arc::clone(&noted) as Arc<_>);
        let cluster = vec![7; 4096];
        let packed = compress(Compression::Zlib, &cluster).expect("it is shorter");
        let guest = ByteRange::between(0, 4096);
        let extent = image.map_compressed(guest, packed.len() as u64).await.expect("there is room");
        let ExtentState::Compressed { host, .. } = extent.state else { panic!("{extent:?}") };
        let mut buffer = Buffer::new(packed.len());
        buffer.bytes_mut().copy_from_slice(&packed);
        image.storage().write(host, buffer.lend(), Durability::None).await.expect("no failure");
        image.link(extent, Durability::None).await.expect("no failure");
        *copied.lock().unwrap() = copy_of(&noted);
        image.flush(SyncMode::Data).await.expect("no failure");
    });
    let log = Arc::into_inner(before).unwrap().into_inner().unwrap();
    die_after(device, async move |disk| {
        let opened = Qcow2::open_before_replay(disk, OpenOptions::default(), Some(&log)).await;
        let image = opened.expect("an image of a process that died");
        image.redo().replay(&log).await.expect("the refcount stays");
        let report = check(&image).await.expect("a report");
        assert_eq!((report.corruptions, report.leaks), (0, 0), "{:?}", report.problems);
        let bytes = read(&image, ByteRange::between(0, 4096), 0).await.expect("no failure");
        assert_eq!(bytes, vec![7; 4096]);
    });
}

/// Two servers with different memory serve an image one after the other, and die. The log of the
/// first one no longer fits, also where no time of a modification shows it.
#[test]
fn a_log_is_refused_when_another_process_with_a_log_has_changed_the_image_since() {
    let (first, second) = (new_log(), new_log());
    let mut device = new_device(&options(Switch::Off), 600);
    fill(&mut device, &first, vec![1, 2]);
    // The second one changes nothing at first.
    fill(&mut device, &second, Vec::new());
    replay(&mut device.clone(), &first, vec![1, 2]);
    fill(&mut device, &second, vec![2, 3]);
    let log = copy_of(&first);
    let mut device = die_after(device, async move |disk| {
        let image = Qcow2::open_before_replay(disk, OpenOptions::default(), Some(&log)).await;
        let outcome = image.expect("an image of a process that died").redo().replay(&log).await;
        let Ok(Replay::Refused { why }) = outcome else { panic!("{outcome:?}") };
        assert!(why.contains("another server"), "{why}");
    });
    replay(&mut device, &second, vec![2, 3]);
}

/// The changes that are prepared take all room of a short log: others wait until one of them is
/// linked.
#[test]
fn changes_wait_for_others_that_take_all_room_of_the_log() {
    let sim = Sim::new(0);
    let device = new_device(&options(Switch::Off), 600);
    let disk = SimDisk::new(&sim, Config::default(), device);
    let opened = sim.block_on(async move { Qcow2::open(disk, OpenOptions::default()).await });
    let image = Rc::new(opened.expect("an image"));
    image.redo().attach(Arc::new((0..8 + 4 * 6).map(|_| AtomicU64::new(0)).collect::<Vec<_>>()));
    let tasks: Vec<_> = (0..16)
        .map(|cluster| {
            let image = Rc::clone(&image);
            let (at, bytes) = (cluster * CLUSTER, content_of(cluster));
            sim.spawn(async move { write(&image, at, &bytes, 0).await })
        })
        .collect();
    sim.run();
    for task in tasks {
        task.output().expect("no change waits for ever").expect("no failure");
    }
}

/// A request that holds prepared extents does not wait for room: another one may wait for those
/// extents.
#[test]
fn who_holds_changes_does_not_wait_for_room() {
    let sim = Sim::new(0);
    let device = new_device(&options(Switch::Off), 600);
    let disk = SimDisk::new(&sim, Config::default(), device);
    sim.block_on(async move {
        let image = Qcow2::open(disk, OpenOptions::default()).await.expect("an image");
        image
            .redo()
            .attach(Arc::new((0..8 + 4 * 6).map(|_| AtomicU64::new(0)).collect::<Vec<_>>()));
        let cluster =
            |index: u64| ByteRange::between(2 * index * CLUSTER, (2 * index + 1) * CLUSTER);
        let first = image.map(cluster(0), Intent::Write).await.expect("room for one");
        let second = image.map_next(cluster(1)).await.expect("room for two").expect("room");
        assert!(image.map_next(cluster(2)).await.expect("no failure").is_none());
        image.abort(first, Abort::Ended);
        let third = image.map_next(cluster(2)).await.expect("no failure").expect("room again");
        image.abort(second, Abort::Ended);
        image.abort(third, Abort::Ended);
    });
}

/// The first record of a log, and in it the entry.
const ENTRY_WORD: usize = 8 + 2;

/// The data went into a cluster that two compressed clusters had shared before, and the process
/// died before the lower refcount was written.
#[test]
fn a_cluster_that_is_counted_too_often_leaks_and_nothing_is_corrupt() {
    /// Of the header: where the refcount table is.
    const REFCOUNT_TABLE: usize = 48;
    let log = new_log();
    let mut device = new_device(&options(Switch::Off), 600);
    fill(&mut device, &log, vec![1]);
    let word = |device: &[u8], at: usize| {
        u64::from_be_bytes(device[at..at + 8].try_into().expect("eight bytes")) as usize
    };
    let block = word(&device, word(&device, REFCOUNT_TABLE));
    let host = (log[ENTRY_WORD].load(Relaxed) & 0x00ff_ffff_ffff_fe00) / CLUSTER;
    device[block + 8 * host as usize..][..8].copy_from_slice(&2_u64.to_be_bytes());
    replay(&mut device, &log, vec![1]);
}

/// An older copy of the image, for example: where the log has data, the copy has tables.
#[test]
fn a_log_that_does_not_fit_leaves_the_image_as_it_is() {
    /// Of the header: where the L1 table is.
    const L1_OFFSET: std::ops::Range<usize> = 40..48;
    let log = new_log();
    let mut device = new_device(&options(Switch::Off), 600);
    fill(&mut device, &log, vec![1, 7]);
    let l1 = u64::from_be_bytes(device[L1_OFFSET].try_into().expect("eight bytes"));
    let flags = log[ENTRY_WORD].load(Relaxed) & 1 << 63;
    log[ENTRY_WORD].store(flags | l1, Relaxed);
    let log = copy_of(&log);
    let before = device.clone();
    let after = die_after(device, async move |disk| {
        let image = Qcow2::open_before_replay(disk, OpenOptions::default(), Some(&log)).await;
        let outcome = image.expect("an image of a process that died").redo().replay(&log).await;
        let Ok(Replay::Refused { why }) = outcome else { panic!("{outcome:?}") };
        assert!(why.contains("tables"), "{why}");
    });
    assert!(before == after, "nothing is written");
}
