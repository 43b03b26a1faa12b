//! The header of LUKS version 2 as bytes ("LUKS2 On-Disk Format Specification", version 1.1.1): two
//! copies, each a sector of 4 KiB and an area of JSON, with a checksum over both.
//!
//! Of two valid copies, the one with the higher sequence number is used. A copy with a wrong
//! checksum is not parsed.

use serde_json::Value;
use sha2::{Digest, Sha256, Sha512};

use super::words::{be16, be64, text};

/// Bytes of a copy's binary part.
pub(super) const BINARY: usize = 4096;
/// The first bytes of the second copy.
pub(super) const SECOND_MAGIC: [u8; 6] = *b"SKUL\xba\xbe";
/// The lengths that a copy can have, which are also the possible offsets of the second copy.
pub(super) const LENGTHS: [u64; 9] =
    [0x4000, 0x8000, 0x1_0000, 0x2_0000, 0x4_0000, 0x8_0000, 0x10_0000, 0x20_0000, 0x40_0000];
const CHECKSUM: std::ops::Range<usize> = 448..512;

/// The size of a whole copy in bytes, as its binary part states it. An error is the reason and the
/// offset of the field.
pub(super) fn length(binary: &[u8], magic: [u8; 6]) -> Result<u64, (String, usize)> {
    if binary[..6] != magic {
        return Err(("the magic bytes are missing".into(), 0));
    }
    if be16(binary, 6) != 2 {
        return Err((format!("its version {} is not 2", be16(binary, 6)), 6));
    }
    let length = be64(binary, 8);
    if LENGTHS.contains(&length) {
        Ok(length)
    } else {
        Err((format!("a header of {length} bytes is not 16 KiB to 4 MiB"), 8))
    }
}

/// A copy whose checksum is right.
pub(super) struct Copy {
    pub(super) sequence: u64,
    pub(super) uuid: String,
    pub(super) json: Value,
}

/// Parses a whole copy, which is at `offset` of the container.
pub(super) fn parse(bytes: &[u8], offset: u64) -> Result<Copy, (String, usize)> {
    if be64(bytes, 256) != offset {
        let what = format!("says that it is at offset {}, but is at {offset}", be64(bytes, 256));
        return Err((what, 256));
    }
    let algorithm = text(bytes, 72, 32);
    let checksum = match algorithm.as_str() {
        "sha256" => checksum::<Sha256>(bytes),
        "sha512" => checksum::<Sha512>(bytes),
        _ => return Err(("its checksum is of an unknown kind".into(), 72)),
    };
    if bytes[CHECKSUM][..checksum.len()] != checksum {
        return Err(("its checksum is wrong".into(), CHECKSUM.start));
    }
    let area = &bytes[BINARY..];
    let end = area.iter().position(|&byte| byte == 0).unwrap_or(area.len());
    // serde_json limits the depth, the header's size field limits the length.
    let json = serde_json::from_slice(&area[..end])
        .map_err(|why| (format!("its JSON cannot be read: {why}"), BINARY))?;
    Ok(Copy { sequence: be64(bytes, 16), uuid: text(bytes, 168, 40), json })
}

/// The checksum of a whole copy, computed with zeros in the checksum field.
fn checksum<D: Digest>(bytes: &[u8]) -> Vec<u8> {
    let mut hash = D::new();
    hash.update(&bytes[..CHECKSUM.start]);
    hash.update([0; CHECKSUM.end - CHECKSUM.start]);
    hash.update(&bytes[CHECKSUM.end..]);
    hash.finalize().to_vec()
}
