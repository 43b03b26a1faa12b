//! A storage without data, as QEMU's `null-co` and `null-aio`: writes are discarded, and reads
//! return zeros. It serves to measure and test the layers above a storage without the cost of a
//! real storage.
//!
//! Guarantees: a read fills its buffer with zeros, also without `read-zeroes`, where QEMU leaves
//! the buffer unchanged. Each operation takes the time that the location sets (`latency-ns`), and
//! has no other delay.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use blockhouse_core::{
    Alignment, Allocation, ByteRange, Capabilities, Durability, Error, ErrorKind, Fua, FuaCost,
    GroupCommit, IoVector, Offload, ReadAfterDiscard, Result, Storage, SyncMode, Unmap, WriteCache,
};
use blockhouse_engine::sleep;

/// The names of QEMU's null drivers.
const DRIVERS: [&str; 2] = ["null-co", "null-aio"];

/// `null-co://[?size=SIZE&latency-ns=NUMBER&read-zeroes=on|off]`, or `null-aio://...` with the same
/// options and behaviour.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NullLocation {
    driver: &'static str,
    size: u64,
    latency: Duration,
    /// Whether the block status reports the whole device as a hole, so that a copy need not read
    /// it.
    reads_zeroes: bool,
}

impl NullLocation {
    /// The driver in a name: the part before `://`.
    pub(crate) fn driver_of(name: &[u8]) -> Option<&'static str> {
        let is_of = |driver: &&str| {
            name.strip_prefix(driver.as_bytes()).is_some_and(|rest| rest.starts_with(b"://"))
        };
        DRIVERS.into_iter().find(is_of)
    }

    /// QEMU's name of the driver.
    pub fn driver(&self) -> &'static str {
        self.driver
    }
}

impl FromStr for NullLocation {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let driver = Self::driver_of(text.as_bytes()).ok_or("it does not begin with null-co://")?;
        let rest = &text[driver.len() + "://".len()..];
        let options = match rest.strip_prefix('?') {
            Some(options) => options,
            None if rest.is_empty() => "",
            None => return Err(format!("write {driver}:// or {driver}://?size=SIZE")),
        };
        let (latency, reads_zeroes) = (Duration::ZERO, false);
        let mut location = Self { driver, size: 1 << 30, latency, reads_zeroes };
        for option in options.split('&').filter(|option| !option.is_empty()) {
            let wrong = |what: &str| format!("'{option}' is no {what}");
            match option.split_once('=') {
                Some(("size", text)) => {
                    let size = size_of(text).filter(|size| i64::try_from(*size).is_ok());
                    location.size = size.ok_or_else(|| wrong("number of bytes"))?;
                }
                Some(("latency-ns", text)) => {
                    let latency = text.parse().map(Duration::from_nanos);
                    location.latency = latency.map_err(|_| wrong("number of nanoseconds"))?;
                }
                Some(("read-zeroes", "on")) => location.reads_zeroes = true,
                Some(("read-zeroes", "off")) => location.reads_zeroes = false,
                _ => return Err(wrong("option: size=SIZE, latency-ns=NUMBER, read-zeroes=on")),
            }
        }
        Ok(location)
    }
}

/// Parses a number of bytes with an optional unit K, M, G or T (powers of 1024), such as `4G`.
fn size_of(text: &str) -> Option<u64> {
    let unit = text.chars().last().and_then(|last| "KMGT".find(last.to_ascii_uppercase()));
    let digits = &text[..text.len() - usize::from(unit.is_some())];
    let unit = unit.map_or(1, |index| 1 << (10 * (index + 1)));
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

impl fmt::Display for NullLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { driver, size, latency, reads_zeroes } = self;
        write!(f, "{driver}://?size={size}")?;
        if !latency.is_zero() {
            write!(f, "&latency-ns={}", latency.as_nanos())?;
        }
        f.write_str(if *reads_zeroes { "&read-zeroes=on" } else { "" })
    }
}

/// A storage without data.
pub struct NullStorage {
    name: String,
    location: NullLocation,
}

impl NullStorage {
    /// The storage that the location describes.
    pub fn new(location: NullLocation) -> Self {
        Self { name: location.to_string(), location }
    }

    /// Waits for the latency that the location sets. `end` is the end of the operation's range.
    async fn carry_out(&self, end: u64) -> Result<()> {
        if end > self.location.size {
            let what = format!("has {} bytes, and never more", self.location.size);
            return Err(Error::new(ErrorKind::NoSpace, what).on(&self.name));
        }
        if !self.location.latency.is_zero() {
            sleep(self.location.latency).await;
        }
        Ok(())
    }
}

impl Storage for NullStorage {
    fn name(&self) -> &str {
        &self.name
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            fua: Fua::Native,
            fua_cost: FuaCost::NoFlush,
            write_cache: WriteCache::None,
            group_commit: GroupCommit::Never,
            alignment: Alignment::BYTE,
            write_zeroes: Offload::Available,
            prepare_zeroes: Offload::Unavailable,
            discard: Offload::Available,
            read_after_discard: ReadAfterDiscard::Zeros,
        }
    }

    fn size(&self) -> u64 {
        self.location.size
    }

    async fn read(&self, _offset: u64, mut into: IoVector) -> Result<()> {
        self.carry_out(0).await?;
        into.fill(0);
        Ok(())
    }

    async fn write(&self, offset: u64, from: IoVector, _durability: Durability) -> Result<()> {
        self.carry_out(offset.saturating_add(from.len() as u64)).await
    }

    async fn write_zeroes(&self, range: ByteRange, _unmap: Unmap) -> Result<()> {
        self.carry_out(range.end()).await
    }

    async fn discard(&self, range: ByteRange) -> Result<()> {
        self.carry_out(range.end()).await
    }

    async fn flush(&self, _sync: SyncMode) -> Result<()> {
        self.carry_out(0).await
    }

    fn check_size(&self, size: u64) -> Result<()> {
        if size == self.location.size {
            return Ok(());
        }
        let what = "cannot be resized: its name says how long it is";
        Err(Error::new(ErrorKind::Unsupported, what).on(&self.name))
    }

    async fn resize(&self, size: u64) -> Result<()> {
        self.check_size(size)
    }

    async fn block_status(&self, range: ByteRange) -> Result<(Allocation, u64)> {
        let is_hole = self.location.reads_zeroes;
        Ok((if is_hole { Allocation::Hole } else { Allocation::Data }, range.length()))
    }

    async fn prefetch(&self, _range: ByteRange) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use blockhouse_core::Buffer;
    use blockhouse_engine::{EngineChoice, EventLoop};

    use super::*;

    fn storage(name: &str) -> NullStorage {
        NullStorage::new(name.parse().unwrap())
    }

    #[test]
    fn options_are_those_of_qemu() {
        for (name, written) in [
            ("null-co://", "null-co://?size=1073741824"),
            ("null-aio://?size=512", "null-aio://?size=512"),
            ("null-co://?read-zeroes=off&size=3k", "null-co://?size=3072"),
            (
                "null-co://?latency-ns=7&read-zeroes=on&size=0",
                "null-co://?size=0&latency-ns=7&read-zeroes=on",
            ),
        ] {
            assert_eq!(name.parse::<NullLocation>().unwrap().to_string(), written);
        }
        for option in
            ["a", "?size=-1", "?size=", "?size=9E", "?size=8388608T", "?latency-ns=-1", "?x"]
        {
            let name = format!("null-co://{option}");
            assert!(name.parse::<NullLocation>().is_err(), "{name}");
        }
    }

    #[test]
    fn memory_is_filled_with_zeros_and_writes_end_where_the_storage_does() {
        let null = storage("null-co://?size=4096");
        let mut event_loop = EventLoop::new(EngineChoice::Auto).unwrap();
        event_loop.block_on(async {
            let mut buffer = Buffer::try_new(4096).unwrap();
            buffer.bytes_mut().fill(7);
            null.read(0, buffer.lend()).await.unwrap();
            assert!(buffer.bytes().iter().all(|byte| *byte == 0));
            null.write(0, buffer.lend(), Durability::Full).await.unwrap();
            let past = null.write(1, buffer.lend(), Durability::None).await.unwrap_err();
            assert_eq!(past.kind(), ErrorKind::NoSpace);
        });
    }

    #[test]
    fn an_operation_takes_the_time_that_is_asked_for() {
        let null = storage("null-co://?latency-ns=20000000");
        let mut event_loop = EventLoop::new(EngineChoice::Auto).unwrap();
        let begun = Instant::now();
        event_loop.block_on(null.flush(SyncMode::Full)).unwrap();
        assert!(begun.elapsed() >= Duration::from_millis(20));
    }

    #[test]
    fn zeros_are_a_hole_where_they_are_promised() {
        let range = ByteRange::between(0, 4096);
        let mut event_loop = EventLoop::new(EngineChoice::Auto).unwrap();
        for (name, status) in
            [("null-co://", Allocation::Data), ("null-co://?read-zeroes=on", Allocation::Hole)]
        {
            let told = event_loop.block_on(storage(name).block_status(range));
            assert_eq!(told.unwrap(), (status, 4096));
        }
    }
}
