//! Overlays whose backing file does not answer: what waits for it, and what goes on.

use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{Buffer, Durability, Error, Request, Result};
use blockhouse_disk::{Access, Disk, ExportKind, Image, ImageFormat, NewBitmap, Options};
use blockhouse_format::qcow2::{self, Backing, CreateOptions, Switch};
use blockhouse_sim::{Sim, SimDisk, Task};

use crate::common::{DATA, discard, steady, write, zeroes};

const CLUSTER: u64 = 64 << 10;
const SIZE: u64 = 64 * CLUSTER;
/// The content of the backing file.
const OLD: u8 = 7;

struct Lab {
    sim: Sim,
    base: SimDisk,
    disk: Arc<Disk<SimDisk>>,
}

impl Lab {
    /// An overlay whose first eight clusters are its own, over a base that does not answer.
    fn new(options: Options, extended_l2: Switch) -> Self {
        let sim = Sim::new(1);
        let storage = SimDisk::new(&sim, steady(), Vec::new());
        let base = SimDisk::new(&sim, steady(), vec![OLD; SIZE as usize]);
        let below = base.clone();
        let disk = sim.block_on(async move {
            let backing = Backing { name: b"base".to_vec(), format: Some("raw".into()) };
            let image = CreateOptions {
                cluster_size: CLUSTER,
                extended_l2,
                backing: Some(backing),
                ..CreateOptions::new(SIZE)
            };
            qcow2::create(&storage, &image).await?;
            let image = Image::open(storage, ImageFormat::Qcow2, options).await?;
            let options = Options { access: Access::ReadOnly, ..Options::default() };
            let disk = Disk::new(image.with_backing(&Image::raw(below, options)?));
            let disk = Arc::new(disk);
            disk.submit(write(0, 8 * CLUSTER as usize, 1, Durability::None)).await?;
            disk.flush().await?;
            Ok::<_, Error>(disk)
        });
        base.hold();
        Self { sim, base, disk: disk.expect("an overlay") }
    }

    /// Begins something that goes on while other things are done.
    fn start<T: 'static, F: Future<Output = T> + 'static>(
        &self,
        begin: impl FnOnce(Arc<Disk<SimDisk>>) -> F,
    ) -> Task<T> {
        self.sim.spawn(begin(Arc::clone(&self.disk)))
    }

    fn start_read(&self, offset: u64, length: u64) -> Task<Result<Vec<u8>>> {
        self.start(|disk| async move {
            let mut buffer = Buffer::new(length as usize);
            disk.submit(Request::Read { offset, into: buffer.lend() }).await?;
            Ok(buffer.bytes().to_vec())
        })
    }

    /// Does something that waits for no backing file.
    #[track_caller]
    fn quickly<T: 'static, F: Future<Output = Result<T>> + 'static>(
        &self,
        what: impl FnOnce(Arc<Disk<SimDisk>>) -> F,
    ) -> T {
        // The simulation notices what waits for ever.
        self.sim.block_on(what(Arc::clone(&self.disk))).expect("no failure")
    }

    #[track_caller]
    fn submit(&self, request: Request) {
        self.quickly(|disk| async move { disk.submit(request).await });
    }

    /// Lets what was started begin.
    fn settle(&self) {
        let clock = self.sim.clock().clone();
        self.sim.block_on(async move { clock.sleep(Duration::from_micros(10 * DATA)).await });
    }

    /// The backing file answers: what was started ends.
    fn end<T: 'static>(&self, task: Task<T>) -> T {
        self.base.release();
        self.sim.block_on(task.join())
    }
}

#[test]
fn a_read_that_waits_for_the_backing_file_holds_up_nothing_else() {
    for parts in [1, 2] {
        let lab = Lab::new(Options::default(), Switch::Off);
        // From the image's own clusters on, or all of it in the backing file.
        let from = if parts == 1 { 20 * CLUSTER } else { 7 * CLUSTER };
        let read = lab.start_read(from, 4 * CLUSTER);
        lab.settle();
        for round in 0..3 {
            // A freed cluster waits for reads before it gets another owner.
            lab.submit(discard(round * CLUSTER, CLUSTER));
            lab.submit(Request::Flush);
            lab.submit(write((round + 30) * CLUSTER, CLUSTER as usize, 2, Durability::Data));
            lab.submit(zeroes((round + 40) * CLUSTER, CLUSTER, Durability::Full));
        }
        let bitmap = NewBitmap { name: "one".into(), granularity: None, is_enabled: true };
        lab.quickly(|disk| async move { disk.bitmaps().add(&bitmap).await });
        lab.quickly(|disk| async move { disk.snapshots().create("one").await });
        lab.quickly(|disk| async move { disk.snapshots().delete("one").await });
        lab.quickly(|disk| async move { disk.resize(SIZE + CLUSTER).await });
        let told = lab.disk.stats().backing_wait().expect("a read waits").to_string();
        assert!(told.contains("a read waits"), "{told}");
        assert_eq!(lab.end(read).expect("it is answered in the end")[CLUSTER as usize], OLD);
        assert_eq!(lab.disk.stats().backing_wait(), None);
    }
}

#[test]
fn a_write_that_waits_for_old_bytes_holds_up_no_other_one() {
    let lab = Lab::new(Options::default(), Switch::Off);
    let stuck = lab.start(|disk| async move {
        disk.submit(write(20 * CLUSTER + 512, 512, 3, Durability::None)).await
    });
    lab.settle();
    for round in 0..4 {
        lab.submit(discard(round * CLUSTER, CLUSTER));
        lab.submit(write((round + 30) * CLUSTER, CLUSTER as usize, 2, Durability::Data));
        lab.submit(write((round + 4) * CLUSTER, 4096, 2, Durability::None));
        lab.submit(Request::Flush);
    }
    let told = lab.disk.stats().backing_wait().expect("a write waits").to_string();
    assert!(told.contains("a change waits"), "{told}");
    lab.end(stuck).expect("it is answered in the end");
}

#[test]
fn no_change_waits_for_what_is_copied_from_the_backing_file() {
    for extended in [Switch::Off, Switch::On] {
        let lab = Lab::new(Options { copy_on_read: true, ..Options::default() }, extended);
        let read = lab.start(|disk| async move {
            let mut buffer = Buffer::new(4 * CLUSTER as usize);
            let request = Request::Read { offset: 20 * CLUSTER, into: buffer.lend() };
            disk.submit_from(ExportKind::Nbd, request).await
        });
        lab.settle();
        // All of a cluster, and units of others that need nothing of the backing file.
        let unit = if extended == Switch::On { CLUSTER / 32 } else { CLUSTER };
        lab.submit(write(20 * CLUSTER, CLUSTER as usize, 2, Durability::None));
        lab.submit(zeroes(21 * CLUSTER, unit, Durability::None));
        lab.submit(write(22 * CLUSTER, unit as usize, 3, Durability::Data));
        lab.submit(write(22 * CLUSTER, unit as usize, 4, Durability::Data));
        lab.end(read).expect("it is answered in the end");
        let mut expected = vec![OLD; 4 * CLUSTER as usize];
        let mut fill = |first: u64, length: u64, byte| {
            expected[first as usize..(first + length) as usize].fill(byte);
        };
        fill(0, CLUSTER, 2);
        fill(CLUSTER, unit, 0);
        fill(2 * CLUSTER, unit, 4);
        // It is the image's own: nothing waits for the backing file now.
        let copied = lab.quickly(|disk| async move {
            let mut buffer = Buffer::new(4 * CLUSTER as usize);
            disk.submit(Request::Read { offset: 20 * CLUSTER, into: buffer.lend() }).await?;
            Ok(buffer.bytes().to_vec())
        });
        assert!(copied == expected, "{extended:?}: newer bytes were undone");
    }
}

#[test]
fn a_stream_detaches_beside_a_read_that_waits_and_reads_go_on() {
    let lab = Lab::new(Options::default(), Switch::Off);
    let read = lab.start_read(20 * CLUSTER, CLUSTER);
    lab.settle();
    lab.submit(write(0, SIZE as usize, 5, Durability::None));
    lab.quickly(|disk| async move {
        let _populating = disk.jobs().begin_populating().await?;
        disk.jobs().check_populated(None).await?;
        disk.jobs().detach_backing(None).await
    });
    assert_eq!(lab.end(read).expect("its bytes are what they were when it began")[0], OLD);
}

#[test]
fn a_base_is_settled_when_the_reads_of_its_older_opening_have_ended() {
    let lab = Lab::new(Options::default(), Switch::Off);
    let read = lab.start_read(20 * CLUSTER, CLUSTER);
    lab.settle();
    let opened = SimDisk::new(&lab.sim, steady(), vec![OLD; SIZE as usize]);
    lab.quickly(|disk| async move {
        disk.jobs().attach_base(Arc::new(Disk::raw(opened, Options::default())?)).await
    });
    // Later reads go to the new opening, which answers at once.
    lab.quickly(|disk| async move {
        let mut buffer = Buffer::new(CLUSTER as usize);
        disk.submit(Request::Read { offset: 30 * CLUSTER, into: buffer.lend() }).await
    });
    let settling = lab.start(|disk| async move { disk.jobs().settle_base().await });
    lab.settle();
    assert!(settling.output().is_none(), "a read of the older opening is in flight");
    lab.end(settling).expect("no limit outside of event loops");
    assert!(lab.end(read).is_ok());
}
