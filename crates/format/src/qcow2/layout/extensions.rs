//! Header extensions: records after the header, with a type, a length, and data padded to 8 bytes.
//!
//! Unknown extensions are kept unchanged. The feature name table is dropped if it does not fit.

use super::words::be32;

/// The end of the list.
const END: u32 = 0;
/// The name of the backing file's format.
pub(crate) const BACKING_FORMAT: u32 = 0xe279_2aca;
/// The number of persistent dirty bitmaps, and their directory.
pub(crate) const BITMAPS: u32 = 0x2385_2875;
/// The name of the external data file.
pub(crate) const DATA_FILE: u32 = 0x4441_5441;
/// The encryption header pointer: offset and length in bytes, 64 bits each.
pub(crate) const ENCRYPTION: u32 = 0x0537_be77;
/// The mark of a side file, which stores bitmaps of a raw disk (`data_file_mark`).
pub(crate) const SIDE_FILE: u32 = 0x424c_4b48;
/// The feature name table, for messages about unknown features.
pub(crate) const FEATURE_NAMES: u32 = 0x6803_f857;

/// One extension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Extension {
    pub(crate) kind: u32,
    /// The data without the padding.
    pub(crate) data: Vec<u8>,
}

/// Parses the list between the offsets `start` and `end`. The error is the reason and the offset
/// of the invalid record.
pub(crate) fn parse(
    bytes: &[u8],
    start: usize,
    end: usize,
) -> Result<Vec<Extension>, (String, usize)> {
    let mut extensions = Vec::new();
    let mut at = start;
    // A list may also end at `end`, without an end record.
    while at + 8 <= end {
        let (kind, length) = (be32(bytes, at), be32(bytes, at + 4) as usize);
        if kind == END {
            break;
        }
        let room = end - at - 8;
        if length > room {
            let what =
                format!("the header extension {kind:#x} of {length} bytes has room for {room}");
            return Err((what, at));
        }
        extensions.push(Extension { kind, data: bytes[at + 8..at + 8 + length].to_vec() });
        at += 8 + length.next_multiple_of(8);
    }
    Ok(extensions)
}

/// The list as bytes, with its end record.
pub(crate) fn to_bytes(extensions: &[Extension]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for Extension { kind, data } in extensions {
        bytes.extend_from_slice(&kind.to_be_bytes());
        bytes.extend_from_slice(&(data.len() as u32).to_be_bytes());
        bytes.extend_from_slice(data);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
    }
    bytes.extend_from_slice(&[0; 8]);
    bytes
}

/// The data of the last extension of this kind. QEMU also uses the last one.
pub(crate) fn find(extensions: &[Extension], kind: u32) -> Option<&[u8]> {
    extensions.iter().rfind(|one| one.kind == kind).map(|one| one.data.as_slice())
}

/// Bytes of a record of [`FEATURE_NAMES`]: the kind of feature, its bit, and its name.
const FEATURE_RECORD: usize = 48;

/// The features in the qcow2 specification: kind (0 incompatible, 1 compatible, 2 autoclear), bit,
/// name. The names are those of QEMU, so that a feature has one name in all programs.
const KNOWN_FEATURES: [(u8, u8, &str); 8] = [
    (0, 0, "dirty bit"),
    (0, 1, "corrupt bit"),
    (0, 2, "external data file"),
    (0, 3, "compression type"),
    (0, 4, "extended L2 entries"),
    (1, 0, "lazy refcounts"),
    (2, 0, "bitmaps"),
    (2, 1, "raw external data"),
];

/// The feature name table of this program. Programs that do not know a feature show its name in
/// messages.
pub(crate) fn feature_names() -> Extension {
    let record = |(kind, bit, name): (u8, u8, &str)| {
        let mut record = vec![kind, bit];
        record.extend_from_slice(name.as_bytes());
        record.resize(FEATURE_RECORD, 0);
        record
    };
    Extension { kind: FEATURE_NAMES, data: KNOWN_FEATURES.into_iter().flat_map(record).collect() }
}

/// The name of an incompatible feature in the image's feature name table.
pub(crate) fn incompatible_feature_name(extensions: &[Extension], bit: u32) -> Option<String> {
    // The last record may be truncated: its name then ends where the record ends.
    let records = find(extensions, FEATURE_NAMES)?.chunks(FEATURE_RECORD);
    let wanted = |record: &&[u8]| record.len() > 2 && record[0] == 0 && u32::from(record[1]) == bit;
    let name = records.filter(wanted).map(|record| &record[2..]).next()?;
    let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
    Some(String::from_utf8_lossy(&name[..end]).escape_default().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_comes_back_as_it_was_stored() {
        let list = vec![
            Extension { kind: BACKING_FORMAT, data: b"raw".to_vec() },
            Extension { kind: 0x1234_5678, data: vec![9; 16] },
        ];
        let bytes = to_bytes(&list);
        assert_eq!(bytes.len() % 8, 0);
        assert_eq!(parse(&bytes, 0, bytes.len()), Ok(list));
    }

    #[test]
    fn a_record_beyond_the_room_is_refused() {
        let bytes = to_bytes(&[Extension { kind: 7, data: vec![0; 24] }]);
        assert_eq!(parse(&bytes, 0, 24).unwrap_err().1, 0);
    }

    #[test]
    fn features_are_called_by_the_name_in_the_image() {
        let mut record = vec![0, 9];
        record.extend_from_slice(b"time travel");
        record.resize(48, 0);
        let list = [Extension { kind: FEATURE_NAMES, data: record }];
        assert_eq!(incompatible_feature_name(&list, 9).as_deref(), Some("time travel"));
        assert_eq!(incompatible_feature_name(&list, 8), None);
        let own = [feature_names()];
        assert_eq!(own[0].data.len(), 384, "a header of 112 bytes has room for it in 512");
        assert_eq!(incompatible_feature_name(&own, 4).as_deref(), Some("extended L2 entries"));
    }
}
