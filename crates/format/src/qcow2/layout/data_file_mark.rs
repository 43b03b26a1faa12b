//! The side file's description of its data file, the raw disk. It is a header extension that only
//! Blockhouse defines; other programs keep it and may ignore it.

use std::time::Duration;

use super::extensions::{self, Extension, SIDE_FILE};
use super::header::{Header, SECTOR};
use super::words::be64;

/// Bytes of the extension without `other_size` and `voucher`.
const LENGTH: usize = 32;
/// Bytes of `other_size`.
const OTHER_SIZE: usize = 8;
/// Bytes of a voucher.
const VOUCHER: usize = 24;

/// A process's statement that, until a given time, the process is the data file's only writer and
/// records all changes. The process writes the voucher before the first change, and renews it while
/// it makes changes. After a crash of the host, the voucher shows that this process made all
/// changes until that time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Voucher {
    /// The boot id of the host.
    pub boot: [u8; 16],
    /// The time until which the statement holds, in nanoseconds since the Unix epoch.
    pub until: u64,
}

/// The side file's description of its data file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataFileMark {
    /// Identity of the data file, in the form that was stored when the side file was made.
    pub identity: [u8; 16],
    /// Time of the data file's last change, since the Unix epoch, read when the enabled bitmaps had
    /// all of its changes and recording had ended.
    pub changed: Duration,
    /// The size in bytes that the data file may have instead of the disk's size: the size before or
    /// after a resize in which a process died. Bytes past the end of the disk are not part of the
    /// disk.
    pub other_size: Option<u64>,
    /// Voucher of a process that records changes, or died while it recorded them. `None` outside a
    /// session.
    pub voucher: Option<Voucher>,
}

impl DataFileMark {
    /// The mark in the header; `None` if the image is not a side file.
    pub(crate) fn of(header: &Header) -> Option<Self> {
        Self::parse(extensions::find(&header.extensions, SIDE_FILE)?)
    }

    fn parse(data: &[u8]) -> Option<Self> {
        let rest = data.get(LENGTH..)?;
        let (other_size, rest) = match rest.len() % VOUCHER {
            OTHER_SIZE => (Some(be64(rest, 0)), &rest[OTHER_SIZE..]),
            _ => (None, rest),
        };
        let voucher = match rest.len() {
            0 => None,
            VOUCHER => Some(Voucher { boot: rest[..16].try_into().ok()?, until: be64(rest, 16) }),
            _ => return None,
        };
        let nanoseconds = u32::try_from(be64(data, 24)).ok().filter(|it| *it < 1_000_000_000)?;
        let identity = data[..16].try_into().ok()?;
        let changed = Duration::new(be64(data, 16), nanoseconds);
        Some(Self { identity, changed, other_size, voucher })
    }

    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let numbers = [self.changed.as_secs(), self.changed.subsec_nanos().into()];
        let voucher = self
            .voucher
            .map(|Voucher { boot, until }| [boot.to_vec(), until.to_be_bytes().to_vec()].concat());
        let numbers = numbers.map(u64::to_be_bytes).concat();
        let other_size = self.other_size.map(|size| size.to_be_bytes().to_vec());
        let parts = [Some(self.identity.to_vec()), Some(numbers), other_size, voucher];
        parts.into_iter().flatten().flatten().collect()
    }

    /// Stores the time of the data file's last change when a session ends. If another program left
    /// no space in the first sector, the old mark stays.
    pub(crate) fn set_changed(header: &mut Header, changed: Duration) {
        if let Some(mark) = Self::of(header) {
            Self { changed, other_size: None, voucher: None, ..mark }.store(header);
        }
    }

    /// Stores the other size of the data file during a resize of the disk. If the first sector has
    /// no space for it, the header is unchanged.
    pub(crate) fn set_other_size(header: &mut Header, size: u64) {
        if let Some(mark) = Self::of(header) {
            Self { other_size: Some(size), ..mark }.store(header);
        }
    }

    /// Stores a voucher in the header of a side file. If the first sector has no space for it, the
    /// header is unchanged.
    pub(crate) fn set_voucher(header: &mut Header, voucher: Voucher) {
        if let Some(mark) = Self::of(header) {
            Self { voucher: Some(voucher), ..mark }.store(header);
        }
    }

    /// Copies the mark from one header to the other.
    pub(crate) fn copy(from: &Header, to: &mut Header) {
        if let Some(mark) = Self::of(from) {
            mark.store(to);
        }
    }

    fn store(self, header: &mut Header) {
        let data = self.to_bytes();
        let mut new = header.clone();
        new.extensions.retain(|extension| extension.kind != SIDE_FILE);
        new.extensions.push(Extension { kind: SIDE_FILE, data });
        // A side file has no backing file, so no backing file name occupies the sector.
        if new.fit_extensions(&[0; SECTOR]) {
            *header = new;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_comes_back_and_a_damaged_one_is_none() {
        let changed = Duration::new(1 << 40, 999_999_999);
        let mark = DataFileMark { identity: [7; 16], changed, other_size: None, voucher: None };
        let bytes = mark.to_bytes();
        let numbers = [be64(&bytes, 16), be64(&bytes, 24)];
        assert_eq!((bytes.len(), numbers), (LENGTH, [1 << 40, 999_999_999]));
        let voucher = Some(Voucher { boot: [9; 16], until: 5 });
        let bytes = DataFileMark { voucher, ..mark }.to_bytes();
        assert_eq!((&bytes[32..48], be64(&bytes, 48)), (&[9; 16][..], 5));
        for (other_size, voucher) in
            [(None, None), (None, voucher), (Some(1 << 40), None), (Some(0), voucher)]
        {
            let mark = DataFileMark { other_size, voucher, ..mark };
            assert_eq!(DataFileMark::parse(&mark.to_bytes()), Some(mark));
        }
        for length in [0, 31, 33, 48, 57, 63, 65, 88] {
            assert_eq!(DataFileMark::parse(&vec![0; length]), None, "{length}");
        }
    }
}
