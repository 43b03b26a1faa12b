//! Whether explorations find what they are for: a plain, slow and right disk passes, and each way
//! of making it wrong is caught.

use std::cell::Cell;
use std::time::Duration;

use async_lock::Semaphore;
use blockhouse_core::{
    Buffer, ByteRange, Durability, Error, ErrorKind, IoVector, Request, Result, Storage, SyncMode,
};
use blockhouse_sim::{
    Cancellation, Config, Faults, Growth, ImageState, Rng, Sim, SimDisk, SystemUnderTest, Workload,
    explore_image, for_seeds,
};

/// One request at a time, whole blocks always, a flush after every durable write.
struct Plain {
    sim: Sim,
    disk: SimDisk,
    flaw: Flaw,
    /// A semaphore of one, because the mutex of the same crate looks at the real clock.
    one_at_a_time: Semaphore,
    /// One flush at a time as well: the failure of one whose future was dropped is reported to the
    /// next, and would come too late for one that runs beside it.
    one_flush: Semaphore,
    flush_failed: Cell<bool>,
    flushing: Cell<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    None,
    /// Durable writes are acknowledged without a flush.
    Eager,
    /// A flush after a failed one is believed.
    Forgetful,
    /// A flush that finds another one running takes that for its own.
    Hasty,
    /// Others may write between the reading and the writing of a block.
    Unprotected,
    /// It claims that every write is durable.
    Boastful,
    /// A request is never answered.
    Stuck,
    /// Errors are not passed on.
    Silent,
    /// A flush that takes longer than any usual one is taken for done.
    Impatient,
    /// The storage's error is not passed on when it is closed.
    SilentClose,
}

impl Plain {
    fn new(sim: &Sim, disk: SimDisk, flaw: Flaw) -> Self {
        Self {
            sim: sim.clone(),
            disk,
            flaw,
            one_at_a_time: Semaphore::new(1),
            one_flush: Semaphore::new(1),
            flush_failed: Cell::new(false),
            flushing: Cell::new(false),
        }
    }

    fn block(&self) -> u64 {
        u64::from(self.disk.capabilities().alignment.offset)
    }

    /// The blocks of the range, with a last partial one by itself.
    fn blocks(&self, range: ByteRange) -> Vec<ByteRange> {
        let size = self.disk.size();
        let whole = range.align_outward(self.block());
        let cut = (size & !(self.block() - 1)).clamp(whole.offset(), whole.end());
        let body = ByteRange::between(whole.offset(), cut);
        let tail = ByteRange::between(cut, whole.end().min(size));
        [body, tail].into_iter().filter(|part| !part.is_empty()).collect()
    }

    async fn read_blocks(&self, range: ByteRange) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        for part in self.blocks(range) {
            let mut buffer = Buffer::new(part.length() as usize);
            self.disk.read(part.offset(), buffer.lend()).await?;
            bytes.extend_from_slice(buffer.bytes());
        }
        Ok(bytes)
    }

    async fn read(&self, offset: u64, mut into: IoVector) -> Result<()> {
        let range = ByteRange::between(offset, offset + into.len() as u64);
        let bytes = self.read_blocks(range).await?;
        into.copy_from(&bytes[(offset & (self.block() - 1)) as usize..]);
        Ok(())
    }

    async fn write(&self, offset: u64, data: &[u8], durability: Durability) -> Result<()> {
        let range = ByteRange::between(offset, offset + data.len() as u64);
        let turn = match self.flaw {
            Flaw::Unprotected => None,
            _ => Some(self.one_at_a_time.acquire().await),
        };
        let mut bytes = self.read_blocks(range).await?;
        bytes[(offset & (self.block() - 1)) as usize..][..data.len()].copy_from_slice(data);
        let mut rest = &bytes[..];
        for part in self.blocks(range) {
            let (now, later) = rest.split_at(part.length() as usize);
            let mut buffer = Buffer::new(now.len());
            buffer.bytes_mut().copy_from_slice(now);
            self.disk.write(part.offset(), buffer.lend(), Durability::None).await?;
            rest = later;
        }
        drop(turn);
        match durability {
            Durability::None => Ok(()),
            _ if self.flaw == Flaw::Eager => Ok(()),
            _ => self.flush().await,
        }
    }

    async fn flush(&self) -> Result<()> {
        if self.flushing.replace(true) && self.flaw == Flaw::Hasty {
            return Ok(());
        }
        let _turn = self.one_flush.acquire().await;
        if self.flush_failed.get() && self.flaw != Flaw::Forgetful {
            return Err(Error::new(ErrorKind::Io, "an earlier flush failed"));
        }
        let outcome = match self.flaw {
            Flaw::Impatient => {
                let disk = self.disk.clone();
                let flushing = self.sim.spawn(async move { disk.flush(SyncMode::Data).await });
                self.sim.sleep(Duration::from_secs(60)).await;
                flushing.output().unwrap_or(Ok(()))
            }
            _ => self.disk.flush(SyncMode::Data).await,
        };
        self.flushing.set(false);
        if outcome.is_err() {
            self.flush_failed.set(true);
        }
        outcome
    }

    async fn carry_out(&self, request: Request) -> Result<()> {
        match request {
            Request::Read { offset, into } => self.read(offset, into).await,
            Request::Write { offset, from, durability } => {
                let mut data = vec![0; from.len()];
                from.copy_to(&mut data);
                self.write(offset, &data, durability).await
            }
            Request::WriteZeroes { range, durability, .. } => {
                self.write(range.offset(), &vec![0; range.length() as usize], durability).await
            }
            Request::Flush => self.flush().await,
            Request::Discard { .. } | Request::Prefetch { .. } => Ok(()),
        }
    }
}

impl SystemUnderTest for Plain {
    fn others(&self) -> Vec<SimDisk> {
        Vec::new()
    }

    fn size(&self) -> u64 {
        self.disk.size()
    }

    async fn submit(&self, request: Request) -> Result<()> {
        if self.flaw == Flaw::Stuck && matches!(request, Request::Flush) {
            return std::future::pending().await;
        }
        let outcome = self.carry_out(request).await;
        if self.flaw == Flaw::Silent { Ok(()) } else { outcome }
    }

    fn min_durability(&self) -> Durability {
        if self.flaw == Flaw::Boastful { Durability::Data } else { Durability::None }
    }

    async fn grow(&self, _size: u64) -> Result<()> {
        unreachable!("it never grows")
    }

    async fn close(&self) -> Result<()> {
        let flushed = self.flush().await;
        let closed = self.disk.close().await;
        if self.flaw == Flaw::SilentClose { flushed } else { flushed.and(closed) }
    }

    fn recover(&self, image: Vec<u8>, _: ImageState) -> std::result::Result<Vec<u8>, String> {
        Ok(image)
    }
}

/// The plain disk cannot bear dropped requests.
fn check(seed: u64, flaw: Flaw) -> std::result::Result<blockhouse_sim::Report, String> {
    let workload = Workload {
        cancellation: Cancellation::Never,
        faults: Faults::Sometimes,
        growth: Growth::Never,
        ..Workload::default()
    };
    let as_it_is = |_: &Config, content, _: &mut Rng| content;
    explore_image(seed, &workload, as_it_is, |sim, disk, _| Plain::new(sim, disk, flaw))
}

#[test]
fn a_plain_disk_is_right() {
    for_seeds(env!("CARGO_PKG_NAME"), "a_plain_disk_is_right", 5_000, |seed| {
        check(seed, Flaw::None)
    });
}

#[test]
fn every_flaw_is_caught() {
    for flaw in [
        Flaw::Eager,
        Flaw::Forgetful,
        Flaw::Hasty,
        Flaw::Unprotected,
        Flaw::Boastful,
        Flaw::Stuck,
        Flaw::Silent,
        Flaw::Impatient,
        Flaw::SilentClose,
    ] {
        let caught = (0..2_000).find(|&seed| check(seed, flaw).is_err());
        assert!(caught.is_some(), "{flaw:?} went unnoticed");
    }
}

#[test]
fn a_seed_says_the_same_twice() {
    for seed in 0..50 {
        assert_eq!(check(seed, Flaw::Unprotected), check(seed, Flaw::Unprotected));
    }
}
