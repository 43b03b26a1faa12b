//! The log of dm-log-writes: every write that a disk completed, in the order in which it became
//! stable.
//!
//! The kernel logs a write when the next flush has completed, and a write with FUA when the write
//! completes. So a log that is replayed up to a mark gives the worst disk that a loss of power at
//! that moment can leave: everything that was not flushed is dropped. Layout: the kernel's
//! Documentation/admin-guide/device-mapper/log-writes.rst and drivers/md/dm-log-writes.c.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};

const MAGIC: u64 = 0x006a_7366_7773_6872;
const VERSION: u64 = 1;
const FLAG_DISCARD: u64 = 1 << 2;
const FLAG_MARK: u64 = 1 << 3;
/// Bytes of an entry before the name of a mark.
const ENTRY: usize = 32;

/// An entry of the log.
pub enum Event {
    /// Bytes became stable, from `offset` on.
    Write { offset: u64, data: Vec<u8> },
    /// A range was discarded; its content is undefined, and zeros are permitted.
    Discard { offset: u64, length: u64 },
    /// A mark, written by a message to the device.
    Mark(String),
}

/// A log that is read from its beginning.
pub struct Log {
    file: File,
    sector: u64,
    /// How many entries are left.
    left: u64,
    /// The offset of the next entry, in bytes.
    at: u64,
}

impl Log {
    /// Opens the log on the device or file at `path`.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        let mut head = [0; ENTRY];
        file.read_exact_at(&mut head, 0).context("the log is cut short")?;
        ensure!(word(&head, 0) == MAGIC, "{} is no log of writes", path.display());
        ensure!(word(&head, 1) == VERSION, "a log of version {}", word(&head, 1));
        let sector = word(&head, 3) & u64::from(u32::MAX);
        ensure!(sector.is_power_of_two() && sector >= 512, "a log of sectors of {sector} bytes");
        Ok(Self { file, sector, left: word(&head, 2), at: sector })
    }

    fn event(&mut self) -> Result<Event> {
        let mut entry = vec![0; self.sector as usize];
        self.file.read_exact_at(&mut entry, self.at).context("the log is cut short")?;
        self.at += self.sector;
        let [sector, sectors, flags, mark] = [0, 1, 2, 3].map(|index| word(&entry, index));
        let (offset, length) = (sector * self.sector, sectors * self.sector);
        if flags & FLAG_MARK != 0 {
            let name = entry.get(ENTRY..ENTRY + mark as usize).context("a mark is too long")?;
            let name = String::from_utf8_lossy(name);
            return Ok(Event::Mark(name.trim_end_matches('\0').to_owned()));
        }
        if flags & FLAG_DISCARD != 0 {
            return Ok(Event::Discard { offset, length });
        }
        let mut data = vec![0; length as usize];
        self.file.read_exact_at(&mut data, self.at).context("the log is cut short")?;
        self.at += length;
        Ok(Event::Write { offset, data })
    }
}

impl Iterator for Log {
    type Item = Result<Event>;

    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        Some(self.event())
    }
}

fn word(bytes: &[u8], index: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[index * 8..index * 8 + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(words: [u64; 4], tail: &[u8]) -> Vec<u8> {
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.extend_from_slice(tail);
        bytes.resize(512, 0);
        bytes
    }

    #[test]
    fn writes_discards_and_marks_come_in_order() {
        let bytes = [
            entry([MAGIC, VERSION, 3, 512], b""),
            entry([2, 1, 2, 0], b""),
            vec![7; 512],
            entry([0, 0, FLAG_MARK, 2], b"m1"),
            entry([4, 8, FLAG_DISCARD, 0], b""),
        ]
        .concat();
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), &bytes).expect("it is written");
        let events: Vec<_> = Log::open(file.path()).expect("a log").map(Result::unwrap).collect();
        assert!(matches!(&events[0], Event::Write { offset: 1024, data } if *data == [7; 512]));
        assert!(matches!(&events[1], Event::Mark(name) if name == "m1"));
        assert!(matches!(events[2], Event::Discard { offset: 2048, length: 4096 }));
        assert_eq!(events.len(), 3);

        std::fs::write(file.path(), &bytes[..1300]).expect("it is written");
        let mut cut = Log::open(file.path()).expect("a log");
        assert!(cut.next().expect("an entry").is_err());
        std::fs::write(file.path(), [0; 512]).expect("it is written");
        assert!(Log::open(file.path()).is_err());
    }
}
