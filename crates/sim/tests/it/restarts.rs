//! Whether explorations of processes that die find what they are for: a disk that answers from the
//! memory of its process, with a log in memory that outlives it, right and with flaws.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use async_lock::Semaphore;
use blockhouse_core::{
    Buffer, ByteRange, Durability, Request, Result, StateMemory, Storage, SyncMode,
};
use blockhouse_sim::{
    Cancellation, Faults, Growth, Host, ImageState, Report, Service, SimDisk, SimMemory,
    SystemUnderTest, Workload, explore_restarts, for_seeds,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    None,
    /// It has no log, and says so.
    NoLog,
    /// It has no log, and does not say so.
    NoLogUnsaid,
    /// A change is answered before it is in the log.
    LateLog,
    /// The log is emptied when a writeback begins.
    EarlyTail,
    /// The log is not replayed.
    NoReplay,
    /// The found bytes are taken for stable: it flushes nothing before it has changed something.
    TrustsPast,
}

/// A disk that is written back when a flush asks for it.
struct WriteBack {
    disk: SimDisk,
    log: Arc<SimMemory>,
    flaw: Flaw,
    content: RefCell<Vec<u8>>,
    /// A byte that should be in the log.
    late: Cell<Option<(usize, u8)>>,
    is_dirty: Cell<bool>,
    one_writeback: Semaphore,
}

/// The parts of the disk that are blocks, and the rest.
fn parts(disk: &SimDisk) -> impl Iterator<Item = ByteRange> {
    let block = u64::from(disk.capabilities().alignment.offset);
    let (size, cut) = (disk.size(), disk.size() & !(block - 1));
    let parts = [ByteRange::between(0, cut), ByteRange::between(cut, size)];
    parts.into_iter().filter(|part| !part.is_empty())
}

impl WriteBack {
    async fn start(host: Host, flaw: Flaw) -> Result<Self> {
        let (disk, log) = (host.disk, host.memory);
        assert!(log.reserve(log.words()), "the simulated host has memory for it");
        let mut content = Vec::new();
        for part in parts(&disk) {
            let mut buffer = Buffer::new(part.length() as usize);
            disk.read(part.offset(), buffer.lend()).await?;
            content.extend_from_slice(buffer.bytes());
        }
        if flaw != Flaw::NoReplay {
            for (index, byte) in content.iter_mut().enumerate() {
                if let Some(logged) = log.load(index).checked_sub(1) {
                    *byte = logged as u8;
                }
            }
        }
        Ok(Self {
            disk,
            log,
            flaw,
            content: RefCell::new(content),
            late: Cell::new(None),
            is_dirty: Cell::new(flaw != Flaw::TrustsPast),
            one_writeback: Semaphore::new(1),
        })
    }

    fn append(&self, index: usize, byte: u8) {
        let logged = match self.flaw {
            Flaw::NoLog | Flaw::NoLogUnsaid => None,
            Flaw::LateLog => self.late.replace(Some((index, byte))),
            _ => Some((index, byte)),
        };
        if let Some((index, byte)) = logged {
            self.log.store(index, u64::from(byte) + 1);
        }
    }

    fn change(&self, offset: u64, bytes: &[u8]) {
        self.is_dirty.set(true);
        for (index, &byte) in (offset as usize..).zip(bytes) {
            self.content.borrow_mut()[index] = byte;
            self.append(index, byte);
        }
    }

    async fn flush(&self) -> Result<()> {
        let _one = self.one_writeback.acquire().await;
        if !self.is_dirty.replace(false) {
            return Ok(());
        }
        let written = self.content.borrow().clone();
        if self.flaw == Flaw::EarlyTail {
            self.empty_log(&written);
        }
        for part in parts(&self.disk) {
            let mut buffer = Buffer::new(part.length() as usize);
            let bytes = &written[part.offset() as usize..part.end() as usize];
            buffer.bytes_mut().copy_from_slice(bytes);
            self.disk.write(part.offset(), buffer.lend(), Durability::None).await?;
        }
        self.disk.flush(SyncMode::Data).await?;
        self.empty_log(&written);
        Ok(())
    }

    /// Drops from the log what has been written.
    fn empty_log(&self, written: &[u8]) {
        for (index, &byte) in written.iter().enumerate() {
            if self.log.load(index) == u64::from(byte) + 1 {
                self.log.store(index, 0);
            }
        }
    }
}

impl SystemUnderTest for WriteBack {
    fn size(&self) -> u64 {
        self.disk.size()
    }

    async fn submit(&self, request: Request) -> Result<()> {
        let durability = match request {
            Request::Read { offset, mut into } => {
                let content = self.content.borrow();
                into.copy_from(&content[offset as usize..][..into.len()]);
                Durability::None
            }
            Request::Write { offset, from, durability } => {
                let mut bytes = vec![0; from.len()];
                from.copy_to(&mut bytes);
                self.change(offset, &bytes);
                durability
            }
            Request::WriteZeroes { range, durability, .. } => {
                self.change(range.offset(), &vec![0; range.length() as usize]);
                durability
            }
            Request::Flush => Durability::Data,
            Request::Discard { .. } | Request::Prefetch { .. } => Durability::None,
        };
        if durability == Durability::None { Ok(()) } else { self.flush().await }
    }

    fn min_durability(&self) -> Durability {
        Durability::None
    }

    async fn grow(&self, _size: u64) -> Result<()> {
        unreachable!("it never grows")
    }

    async fn close(&self) -> Result<()> {
        self.flush().await
    }

    fn others(&self) -> Vec<SimDisk> {
        Vec::new()
    }

    fn recover(&self, image: Vec<u8>, _: ImageState) -> std::result::Result<Vec<u8>, String> {
        Ok(image)
    }
}

struct Restarted(Flaw);

impl Service for Restarted {
    type System = WriteBack;

    fn memory_words(&self) -> usize {
        Workload::default().sectors * 512
    }

    fn keeps_answered(&self) -> bool {
        self.0 != Flaw::NoLog
    }

    fn start(&self, host: Host) -> impl Future<Output = Result<WriteBack>> + 'static {
        WriteBack::start(host, self.0)
    }

    fn check(&self, _: &[Vec<u8>], _: ImageState) -> std::result::Result<(), String> {
        Ok(())
    }
}

fn check(seed: u64, flaw: Flaw) -> std::result::Result<Report, String> {
    let workload = Workload {
        cancellation: Cancellation::Never,
        faults: Faults::Never,
        growth: Growth::Never,
        ..Workload::default()
    };
    explore_restarts(seed, &workload, |_, content, _| (Restarted(flaw), vec![content]))
}

#[test]
fn a_disk_with_a_log_is_right() {
    let test = "a_disk_with_a_log_is_right";
    let report = for_seeds(env!("CARGO_PKG_NAME"), test, 300, |seed| check(seed, Flaw::None));
    assert!(report.deaths > 0 && report.crashes > 0, "{report:?}");
}

#[test]
fn a_disk_without_a_log_keeps_what_is_durable() {
    let test = "a_disk_without_a_log_keeps_what_is_durable";
    for_seeds(env!("CARGO_PKG_NAME"), test, 300, |seed| check(seed, Flaw::NoLog));
}

#[test]
fn every_flaw_is_caught() {
    for flaw in
        [Flaw::NoLogUnsaid, Flaw::LateLog, Flaw::EarlyTail, Flaw::NoReplay, Flaw::TrustsPast]
    {
        let caught = (0..300).find_map(|seed| Some((seed, check(seed, flaw).err()?)));
        let (seed, violation) = caught.unwrap_or_else(|| panic!("{flaw:?} went unnoticed"));
        eprintln!("{flaw:?}: seed {seed}: {}", violation.lines().next().unwrap_or_default());
    }
}

#[test]
fn a_seed_says_the_same_twice() {
    for seed in 0..20 {
        assert_eq!(check(seed, Flaw::None), check(seed, Flaw::None));
        assert_eq!(check(seed, Flaw::LateLog), check(seed, Flaw::LateLog));
    }
}
