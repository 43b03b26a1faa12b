//! What a sidecar says of its data file, the raw disk: a header extension of Blockhouse's own, which other programs keep and
//! may ignore.

use std::time::Duration;

use super::extensions::{self, Extension, SIDECAR};
use super::header::{Header, SECTOR};
use super::words::be64;

/// Bytes of the extension.
const LENGTH: usize = 32;

/// What a sidecar says of its data file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataFileMark {
    /// Which file it is, in the bytes that the sidecar was made with.
    pub identity: [u8; 16],
    /// When it had been changed for the last time when enabled bitmaps had all of its changes and nothing recorded more,
    /// since the Unix epoch.
    pub changed: Duration,
}

impl DataFileMark {
    /// Of an image; `None` where it is no sidecar.
    pub(crate) fn of(header: &Header) -> Option<Self> {
        let data = extensions::find(&header.extensions, SIDECAR).filter(|it| it.len() == LENGTH)?;
        let nanoseconds = u32::try_from(be64(data, 24)).ok().filter(|it| *it < 1_000_000_000)?;
        let identity = data[..16].try_into().ok()?;
        Some(Self { identity, changed: Duration::new(be64(data, 16), nanoseconds) })
    }

    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let numbers = [self.changed.as_secs(), self.changed.subsec_nanos().into()];
        [self.identity.to_vec(), numbers.map(u64::to_be_bytes).concat()].concat()
    }

    /// Notes when the data file was changed, in the header of a sidecar. Where another program left no room in the first sector,
    /// the old time stays.
    pub(crate) fn set_changed(header: &mut Header, changed: Duration) {
        let Some(mark) = Self::of(header) else { return };
        let data = Self { changed, ..mark }.to_bytes();
        let mut new = header.clone();
        new.extensions.retain(|extension| extension.kind != SIDECAR);
        new.extensions.push(Extension { kind: SIDECAR, data });
        // Of an image without a backing file: its name takes nothing of the sector.
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
        let mark = DataFileMark { identity: [7; 16], changed: Duration::new(1 << 40, 999_999_999) };
        let bytes = mark.to_bytes();
        let numbers = [be64(&bytes, 16), be64(&bytes, 24)];
        assert_eq!((bytes.len(), numbers), (LENGTH, [1 << 40, 999_999_999]));
    }
}
