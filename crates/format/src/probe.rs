//! Probing: the image format that the first or last bytes of a file indicate.
//!
//! A guest can write any bytes to the start of its raw disk. So the result selects a format only if
//! neither the caller nor the name gives one; under the name of a QEMU tool, it overrides the name.
//! An image opened so may name only files that the user allows. Otherwise the result serves to
//! refuse a file of another format that would be treated as raw by mistake, and to name that format
//! in the error.

use std::path::Path;

use blockhouse_core::{Buffer, ByteRange, Result, Storage};

use crate::foreign::is_vmdk_descriptor;
use crate::image_format::suffix;
use crate::qcow2::MAX_FILE_NAME;

/// The number of first bytes that [`name_of`] needs, and of last bytes that [`name_of_end`] needs.
pub const LENGTH: usize = 512;

/// Offset, signature and name of the formats that are recognized by their first bytes.
const SIGNATURES: &[(usize, &[u8], &str)] = &[
    (0, b"QFI\xfb\x00\x00\x00\x01", "qcow"),
    (0, b"QFI\xfb", "qcow2"),
    (0, b"QED\0", "qed"),
    (0, b"KDMV", "vmdk"),
    (0, b"COWD", "vmdk"),
    (64, b"\x7f\x10\xda\xbe", "vdi"),
    (0, b"vhdxfile", "vhdx"),
    (0, b"conectix", "vpc"),
    (0, b"LUKS\xba\xbe", "luks"),
    (0, b"WithoutFreeSpace", "parallels"),
    (0, b"WithouFreSpacExt", "parallels"),
    (0, b"Bochs Virtual HD Image", "bochs"),
    (0, b"#!/bin/sh\n#V2.0 Format\n", "cloop"),
];

/// Signature and name of the formats that are recognized by their last 512 bytes.
const FINAL_SIGNATURES: &[(&[u8], &str)] = &[(b"koly", "dmg"), (b"conectix", "vpc")];

/// The name (in `qemu-img`) of the format that a file with these first bytes seems to have; `None`
/// if no format is recognized, as for raw images.
pub fn name_of(first: &[u8]) -> Option<&'static str> {
    let matches = |&&(offset, bytes, _): &&(usize, &[u8], &str)| {
        first.get(offset..).is_some_and(|rest| rest.starts_with(bytes))
    };
    let found = SIGNATURES.iter().find(matches).map(|&(_, _, name)| name);
    found.or_else(|| is_vmdk_descriptor(first).then_some("vmdk"))
}

/// The name of the format that a file with these last [`LENGTH`] bytes seems to have. A guest can
/// write the last sector of a raw image as well as the first, so this is used only for files whose
/// suffix indicates such a format.
pub fn name_of_end(last: &[u8]) -> Option<&'static str> {
    let found = FINAL_SIGNATURES.iter().find(|(bytes, _)| last.starts_with(bytes));
    found.map(|&(_, name)| name)
}

/// The location of the backing file's name in a qcow2 image with these first bytes; `None` for
/// another format, or without a backing file.
pub fn qcow2_backing_name(first: &[u8]) -> Option<ByteRange> {
    if name_of(first) != Some("qcow2") {
        return None;
    }
    let offset = u64::from_be_bytes(first.get(8..16)?.try_into().ok()?);
    let length = u32::from_be_bytes(first.get(16..20)?.try_into().ok()?);
    let is_there = offset > 0 && length as usize <= MAX_FILE_NAME;
    ByteRange::new(offset, length.into()).filter(|_| is_there)
}

/// Bytes of a cluster of a qcow2 image with these first bytes; `None` for another format.
pub fn qcow2_cluster_size(first: &[u8]) -> Option<u64> {
    const CLUSTER_BITS: usize = 20;
    if name_of(first) != Some("qcow2") {
        return None;
    }
    let bits = first.get(CLUSTER_BITS..)?.first_chunk().map(|bits| u32::from_be_bytes(*bits))?;
    1_u64.checked_shl(bits)
}

/// Reads the last bytes of `storage`, and returns the result of [`name_of_end`].
async fn probe_end<S: Storage>(storage: &S) -> Result<Option<&'static str>> {
    let size = storage.size();
    let Some(last) = size.checked_sub(LENGTH as u64) else { return Ok(None) };
    let start = last & !(u64::from(storage.capabilities().alignment.offset) - 1);
    let mut buffer = Buffer::new((size - start) as usize);
    storage.read(start, buffer.lend()).await?;
    Ok(name_of_end(&buffer.bytes()[(last - start) as usize..]))
}

/// As [`probe`], for a file with this name: if its suffix is that of a format with a signature at
/// the end, the last bytes are read, too.
///
/// # Errors
/// Errors of the storage.
pub async fn probe_file<S: Storage>(storage: &S, path: &Path) -> Result<Option<&'static str>> {
    let found = probe(storage).await?;
    if found.is_none() && matches!(suffix(path).as_deref(), Some("dmg" | "vhd" | "vpc")) {
        return probe_end(storage).await;
    }
    Ok(found)
}

/// Reads the first bytes of `storage`, and returns the result of [`name_of`].
pub async fn probe<S: Storage>(storage: &S) -> Result<Option<&'static str>> {
    let block = storage.capabilities().alignment.offset as usize;
    let mut buffer = Buffer::new(LENGTH.next_multiple_of(block));
    storage.read(0, buffer.lend()).await?;
    Ok(name_of(buffer.bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_is_known_by_its_first_bytes() {
        for &(offset, bytes, name) in SIGNATURES {
            let mut first = [0; LENGTH];
            first[offset..offset + bytes.len()].copy_from_slice(bytes);
            assert_eq!(name_of(&first), Some(name));
        }
    }

    #[test]
    fn a_raw_disk_is_not_taken_for_anything() {
        let mut boot_sector = [0; LENGTH];
        boot_sector[510..].copy_from_slice(&[0x55, 0xaa]);
        assert_eq!(name_of(&boot_sector), None);
        assert_eq!(name_of(b"QFI"), None, "cut off within the signature");
        assert_eq!(name_of(&[]), None);
    }
}
