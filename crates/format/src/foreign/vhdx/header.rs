//! The file type identifier and the two headers of a VHDX image (\[MS-VHDX\] 2.2.1, 2.2.2): the
//! valid header with the higher sequence number is current.

use blockhouse_core::{Result, Storage};

use super::guid::{Guid, MIB, NIL};
use crate::aligned_read::read;
use crate::foreign::fields::{array, le16, le32, le64, put};
use crate::foreign::refusal::{corrupt, other_signature, unsupported};

pub(super) const FILE_SIGNATURE: &[u8; 8] = b"vhdxfile";
pub(super) const SIGNATURE: &[u8; 4] = b"head";
pub(super) const VERSION: u16 = 1;
pub(super) const LOG_VERSION: u16 = 0;

/// Offsets of the headers.
pub(super) const OFFSETS: [u64; 2] = [64 << 10, 128 << 10];
/// Bytes of a header.
pub(super) const LENGTH: usize = 4096;

/// Offsets of the fields in bytes. The checksum has the same offset in headers, region tables and
/// log entries.
mod at {
    pub(super) const CHECKSUM: usize = 4;
    pub(super) const SEQUENCE: usize = 8;
    pub(super) const FILE_WRITE_GUID: usize = 16;
    pub(super) const LOG_GUID: usize = 48;
    pub(super) const LOG_VERSION: usize = 64;
    pub(super) const VERSION: usize = 66;
    pub(super) const LOG_LENGTH: usize = 68;
    pub(super) const LOG_OFFSET: usize = 72;
}

/// The current header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    sequence: u64,
    /// GUID of the log's entries; nil for an empty log.
    pub(super) log_guid: Guid,
    /// Bytes of the log, a multiple of 1 MiB.
    pub(super) log_length: u64,
    /// Offset of the log, a multiple of 1 MiB.
    pub(super) log_offset: u64,
}

impl Header {
    /// # Errors
    /// `Corrupt` or `Unsupported`, with the field's offset; or errors of the storage.
    pub(super) async fn find<S: Storage>(storage: &S) -> Result<Self> {
        if read(storage, 0, FILE_SIGNATURE.len()).await? != FILE_SIGNATURE {
            return Err(other_signature("VHDX image", 0));
        }
        let (bytes, offset) = Self::in_force(storage).await?;
        Self::parse(&bytes, offset)
    }

    /// The offset and the bytes of the header that replaces the older one. It has the next sequence
    /// number, an empty log and the FileWriteGuid `write_id`; its other fields are those of the
    /// current header.
    ///
    /// # Errors
    /// As [`find`](Self::find).
    pub(super) async fn without_log<S: Storage>(
        storage: &S,
        write_id: Guid,
    ) -> Result<(u64, Vec<u8>)> {
        let (mut bytes, offset) = Self::in_force(storage).await?;
        let sequence = sequence(&bytes).wrapping_add(1);
        put(&mut bytes, at::SEQUENCE, sequence.to_le_bytes());
        put(&mut bytes, at::FILE_WRITE_GUID, write_id);
        put(&mut bytes, at::LOG_GUID, NIL);
        put(&mut bytes, at::CHECKSUM, [0; 4]);
        let sum = crc32c::crc32c(&bytes);
        put(&mut bytes, at::CHECKSUM, sum.to_le_bytes());
        let other = if offset == OFFSETS[0] { OFFSETS[1] } else { OFFSETS[0] };
        Ok((other, bytes))
    }

    /// Refuses a current header whose sequence number cannot be incremented twice.
    ///
    /// # Errors
    /// As [`find`](Self::find).
    pub(super) async fn check_can_follow<S: Storage>(storage: &S) -> Result<()> {
        let (bytes, offset) = Self::in_force(storage).await?;
        match sequence(&bytes).checked_add(OFFSETS.len() as u64) {
            Some(_) => Ok(()),
            None => Err(corrupt("a header with the last sequence number", offset)),
        }
    }

    /// The bytes of the current header, and its offset.
    async fn in_force<S: Storage>(storage: &S) -> Result<(Vec<u8>, u64)> {
        let mut found: Option<(Vec<u8>, u64)> = None;
        for offset in OFFSETS {
            let bytes = read(storage, offset, LENGTH).await?;
            let is_newer =
                found.as_ref().is_none_or(|(other, _)| sequence(&bytes) > sequence(other));
            if is_sealed(&bytes, SIGNATURE) && is_newer {
                found = Some((bytes, offset));
            }
        }
        found.ok_or_else(|| corrupt("neither of its two headers has a sound checksum", OFFSETS[0]))
    }

    /// Parses a header at `offset` whose checksum is right.
    fn parse(bytes: &[u8], offset: u64) -> Result<Self> {
        let field = |field: usize| offset + field as u64;
        let (version, log_version) = (le16(bytes, at::VERSION), le16(bytes, at::LOG_VERSION));
        if version != VERSION {
            let what = format!("version {version} is not supported");
            return Err(unsupported(what, field(at::VERSION)));
        }
        let header = Self {
            sequence: sequence(bytes),
            log_guid: array(bytes, at::LOG_GUID),
            log_length: le32(bytes, at::LOG_LENGTH).into(),
            log_offset: le64(bytes, at::LOG_OFFSET),
        };
        if header.log_guid != NIL && log_version != LOG_VERSION {
            let what = format!("version {log_version} of the log is not supported");
            return Err(unsupported(what, field(at::LOG_VERSION)));
        }
        let is_aligned =
            header.log_offset.is_multiple_of(MIB) && header.log_length.is_multiple_of(MIB);
        let fits = header.log_offset.checked_add(header.log_length).is_some();
        if !is_aligned || !fits || header.log_offset < MIB {
            let what = format!(
                "its log of {} bytes at {} is at no place for one",
                header.log_length, header.log_offset
            );
            return Err(corrupt(what, field(at::LOG_OFFSET)));
        }
        Ok(header)
    }
}

fn sequence(bytes: &[u8]) -> u64 {
    le64(bytes, at::SEQUENCE)
}

/// Whether a structure has its signature and the right checksum: CRC-32C of all its bytes, with the
/// checksum field taken as zeros.
pub(super) fn is_sealed(bytes: &[u8], signature: &[u8; 4]) -> bool {
    let sum = crc32c::crc32c(&bytes[..at::CHECKSUM]);
    let sum = crc32c::crc32c_append(sum, &[0; 4]);
    let sum = crc32c::crc32c_append(sum, &bytes[at::CHECKSUM + 4..]);
    bytes.starts_with(signature) && le32(bytes, at::CHECKSUM) == sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sealed(edit: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut bytes = vec![0; LENGTH];
        bytes[..4].copy_from_slice(SIGNATURE);
        bytes[at::VERSION] = 1;
        bytes[at::LOG_LENGTH + 2] = 0x10;
        bytes[at::LOG_OFFSET + 2] = 0x10;
        edit(&mut bytes);
        let sum = crc32c::crc32c(&bytes);
        bytes[at::CHECKSUM..][..4].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    #[test]
    fn a_checksum_covers_every_byte() {
        let sound = sealed(|_| ());
        assert!(is_sealed(&sound, SIGNATURE) && !is_sealed(&sound, b"regi"));
        for at in [0, 5, 8, 100, LENGTH - 1] {
            let mut damaged = sound.clone();
            damaged[at] ^= 1;
            assert!(!is_sealed(&damaged, SIGNATURE), "{at}");
        }
    }

    #[test]
    fn each_field_is_checked() {
        assert_eq!(Header::parse(&sealed(|_| ()), 65536).unwrap().log_offset, MIB);
        for (field, value, words) in [
            (at::VERSION, 2, "version 2"),
            (at::LOG_LENGTH, 1, "no place"),
            (at::LOG_OFFSET, 1, "no place"),
            (at::LOG_OFFSET + 2, 0, "no place"),
        ] {
            let error = Header::parse(&sealed(|bytes| bytes[field] = value), 65536).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(words) && text.contains("offset 65"), "{text}");
        }
        let versioned = sealed(|bytes| (bytes[at::LOG_VERSION], bytes[at::LOG_GUID]) = (1, 1));
        assert!(Header::parse(&versioned, 0).unwrap_err().to_string().contains("of the log"));
        let without_log = sealed(|bytes| bytes[at::LOG_VERSION] = 1);
        assert!(Header::parse(&without_log, 0).is_ok(), "an empty log has no version");
    }
}
