//! Passes images from a guest to the host: the images that the guest found on a replayed disk, one
//! for each mark, are on another disk.
//!
//! Only the kernel can recover XFS, and only the host has the tools to read an image. Each image
//! has a slot on the disk: a header with its length or an error mark, and then the bytes of the
//! image or of the error text.

use std::fs::File;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, ensure};

use super::recovery::ReplayTarget;
use super::{MARKS, history};

/// Bytes of the header of an image.
const HEAD: usize = 4096;
/// Bytes for an image, enough for the history's disk in any format.
const ROOM: u64 = 2 * history::SIZE;
const SLOT: u64 = HEAD as u64 + ROOM;
/// Bytes of the disk.
pub const DISK: u64 = MARKS as u64 * SLOT;
/// Instead of a length: the text of an error follows.
const ERROR: u64 = u64::MAX;
const WORD: usize = 8;

/// The slots, filled or read one after the other.
pub struct ImageSlots {
    file: File,
    next: u64,
}

impl ImageSlots {
    /// Begins with the first slot of a disk; slots without an image are all zeros.
    pub fn new(file: File) -> Self {
        Self { file, next: 0 }
    }

    /// Stores an image, or what is wrong with the disk that it should be on.
    pub fn store(&mut self, found: &Result<Vec<u8>, String>) -> Result<()> {
        let start = self.take()?;
        let (length, text) = match found {
            Ok(image) => {
                ensure!(image.len() as u64 <= ROOM, "an image of {} bytes", image.len());
                (image.len() as u64, "")
            }
            Err(error) => (ERROR, error.as_str()),
        };
        let mut head = vec![0; HEAD];
        head[..WORD].copy_from_slice(&length.to_le_bytes());
        let text = &text.as_bytes()[..text.len().min(HEAD - WORD)];
        head[WORD..WORD + text.len()].copy_from_slice(text);
        self.file.write_all_at(&head, start).context("cannot hand over what was found")?;
        let pages = found.iter().flat_map(|image| image.chunks(HEAD).enumerate());
        for (index, page) in pages.filter(|(_, page)| page.iter().any(|byte| *byte != 0)) {
            let at = start + ((index + 1) * HEAD) as u64;
            self.file.write_all_at(page, at).context("cannot hand over an image")?;
        }
        Ok(())
    }

    fn load(&mut self) -> Result<Result<Vec<u8>, String>> {
        let start = self.take()?;
        let mut head = vec![0; HEAD];
        self.file.read_exact_at(&mut head, start).context("what was found is cut short")?;
        let (length, text) = head.split_at(WORD);
        let length = u64::from_le_bytes(length.try_into().expect("a word"));
        if length == ERROR {
            let text = String::from_utf8_lossy(text);
            return Ok(Err(text.trim_end_matches('\0').to_owned()));
        }
        ensure!((1..=ROOM).contains(&length), "the guest handed over {length} bytes");
        let mut image = vec![0; length as usize];
        self.file
            .read_exact_at(&mut image, start + HEAD as u64)
            .context("an image is cut short")?;
        Ok(Ok(image))
    }

    fn take(&mut self) -> Result<u64> {
        ensure!(self.next < MARKS as u64, "more marks than {MARKS}");
        self.next += 1;
        Ok((self.next - 1) * SLOT)
    }
}

impl ReplayTarget for ImageSlots {
    fn write(&mut self, _: u64, _: &[u8]) -> Result<()> {
        // The guest has replayed the log already.
        Ok(())
    }

    fn image(&mut self) -> Result<Result<Vec<u8>, String>> {
        self.load()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_stored_comes_back_in_order() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(DISK).expect("room");
        let found = [
            Ok(vec![7; 3 * HEAD + 1]),
            Err("lost".to_owned()),
            Ok([vec![0; HEAD], vec![1]].concat()),
        ];
        let mut slots = ImageSlots::new(file.try_clone().expect("another handle"));
        found.iter().for_each(|found| slots.store(found).expect("there is room"));
        let mut slots = ImageSlots::new(file);
        for expected in found {
            assert_eq!(slots.image().expect("it is there"), expected);
        }
        assert!(slots.image().is_err(), "nothing was stored there");
    }
}
