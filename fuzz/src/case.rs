//! The meaning of an input of `qcow2_operations`: an image, damage done to it, and requests.
//!
//! Every string of bytes means something, and small changes of it mean small changes:
//!
//! | bytes | meaning |
//! | --- | --- |
//! | 4 | image, kind of storage, seed of the order in which operations end, count of corruptions |
//! | 12 each | corruptions |
//! | 6 each | requests |

use crate::images;

/// Bytes of a corruption.
const CORRUPTION: usize = 12;
/// Bytes of a request.
const STEP: usize = 6;
/// How many corruptions and steps an input has at most.
const MAX_DAMAGES: u8 = 16;
const MAX_STEPS: usize = 64;

/// A decoded input.
#[derive(Debug)]
pub struct Case {
    pub image: u8,
    pub storage: u8,
    pub seed: u8,
    pub corruptions: Vec<Corruption>,
    pub steps: Vec<Step>,
}

/// One change of an image's file.
#[derive(Clone, Copy, Debug)]
pub struct Corruption {
    pub place: u8,
    pub how: u8,
    pub index: u16,
    pub value: u64,
}

/// One thing to do with the disk.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    pub kind: u8,
    pub flags: u8,
    pub offset: u16,
    pub length: u16,
}

impl Case {
    /// Decodes an input; `None` if it is too short.
    pub fn of(data: &[u8]) -> Option<Self> {
        let (&[image, storage, seed, count], rest) = data.split_first_chunk()?;
        let count = usize::from(count % (MAX_DAMAGES + 1)).min(rest.len() / CORRUPTION);
        let (corruptions, steps) = rest.split_at(count * CORRUPTION);
        Some(Self {
            image,
            storage,
            seed,
            corruptions: corruptions.as_chunks().0.iter().map(Corruption::of).collect(),
            steps: steps.as_chunks().0.iter().take(MAX_STEPS).map(Step::of).collect(),
        })
    }

    /// The input that means this.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![self.image, self.storage, self.seed, self.corruptions.len() as u8];
        for corruption in &self.corruptions {
            bytes.extend([corruption.place, corruption.how]);
            bytes.extend(corruption.index.to_be_bytes());
            bytes.extend(corruption.value.to_be_bytes());
        }
        for step in &self.steps {
            bytes.extend([step.kind, step.flags]);
            bytes.extend(step.offset.to_be_bytes());
            bytes.extend(step.length.to_be_bytes());
        }
        bytes
    }

    /// The image with its corruptions.
    pub fn damaged_image(&self) -> Vec<u8> {
        let whole = images::base(self.image);
        let mut bytes = whole.to_vec();
        for corruption in &self.corruptions {
            corruption.apply(whole, &mut bytes);
        }
        bytes
    }
}

impl Corruption {
    fn of(bytes: &[u8; CORRUPTION]) -> Self {
        let [place, how, index @ .., _, _, _, _, _, _, _, _] = *bytes;
        let value = u64::from_be_bytes(bytes[4..].try_into().expect("eight bytes"));
        Self { place, how, index: u16::from_be_bytes(index), value }
    }

    /// How many kinds of places there are.
    pub const PLACES: u8 = 14;

    /// Does it to `bytes`; where things are is read from the image as it was.
    fn apply(self, whole: &[u8], bytes: &mut Vec<u8>) {
        let cluster = 1_u64 << field(whole, 20, 4).min(21);
        let index = u64::from(self.index);
        let within = |table: u64, length: u64| table + index * 8 % length.max(8);
        let l2 = || {
            let l1 = field(whole, 40, 8);
            let entries = field(whole, 36, 4).max(1);
            field(whole, l1 + index / 64 % entries * 8, 8) & 0x00ff_ffff_ffff_fe00
        };
        let refcount_table = field(whole, 48, 8);
        let at = match self.place % Self::PLACES {
            0 => index % 112,
            1 => 104 + index % (cluster - 104),
            2 => within(field(whole, 40, 8), field(whole, 36, 4) * 8),
            3 => within(l2(), cluster),
            4 => within(refcount_table, cluster),
            5 => field(whole, refcount_table, 8) + index % cluster,
            6 => field(whole, 64, 8) + index % 128,
            7 => {
                let entry = field(whole, within(l2(), cluster), 8);
                (entry & 0x00ff_ffff_ffff) + self.value % 64
            }
            8 => self.value % (bytes.len() as u64 + 1),
            10 => bitmaps_extension(whole) + index % 40,
            11 => field(whole, bitmaps_extension(whole) + 24, 8) + index % 256,
            12 => within(bitmap_table(whole, index), 64),
            13 => {
                let bits = field(whole, bitmap_table(whole, index), 8);
                (bits & 0x00ff_ffff_ffff) + self.value % cluster
            }
            _ => {
                bytes.truncate((self.value % (bytes.len() as u64 + 1)) as usize);
                return;
            }
        };
        self.change(bytes, at, cluster);
    }

    fn change(self, bytes: &mut [u8], at: u64, cluster: u64) {
        let clusters = (bytes.len() as u64 / cluster).max(1);
        let host = self.value % clusters * cluster;
        let old = field(bytes, at, 8);
        let word = match self.how % 6 {
            0 => self.value,
            1 => old ^ 1 << (self.value % 64),
            // Another cluster of the file, called this one's alone, or not.
            2 => host | 1 << 63,
            3 => host,
            4 => old & (0xff_u64 << 56) | host,
            _ => old & !(0xff << 56) | self.value << 56,
        };
        let Ok(at) = usize::try_from(at) else { return };
        let Some(place) = bytes.get_mut(at..) else { return };
        for (byte, new) in place.iter_mut().zip(word.to_be_bytes()) {
            *byte = new;
        }
    }
}

/// Where the header extension that names the directory of bitmaps begins; 0 without one.
fn bitmaps_extension(whole: &[u8]) -> u64 {
    let mut at = field(whole, 100, 4).max(104);
    for _ in 0..8 {
        match field(whole, at, 4) {
            0 => break,
            0x2385_2875 => return at,
            _ => at += 8 + field(whole, at + 4, 4).next_multiple_of(8),
        }
    }
    0
}

/// Where the table of a bitmap begins, by any number; 0 without one.
fn bitmap_table(whole: &[u8], number: u64) -> u64 {
    let extension = bitmaps_extension(whole);
    if extension == 0 {
        return 0;
    }
    let (count, mut at) = (field(whole, extension + 8, 4), field(whole, extension + 24, 8));
    for _ in 0..number % count.max(1) {
        let (name, extra) = (field(whole, at + 18, 2), field(whole, at + 20, 4));
        at += (24 + name + extra).next_multiple_of(8);
    }
    field(whole, at, 8)
}

impl Step {
    fn of(bytes: &[u8; STEP]) -> Self {
        let [kind, flags, a, b, c, d] = *bytes;
        let (offset, length) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
        Self { kind, flags, offset, length }
    }
}

/// The big-endian number of `length` bytes at `at`; what lies beyond the end is zeros.
fn field(bytes: &[u8], at: u64, length: u64) -> u64 {
    (at..at + length).fold(0, |value, at| {
        let byte = usize::try_from(at).ok().and_then(|at| bytes.get(at));
        value << 8 | u64::from(byte.copied().unwrap_or(0))
    })
}
