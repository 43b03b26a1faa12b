//! A VHDX image whose structures have any bytes: as few inputs have sound checksums and are long
//! enough, the input is cut into the structures, each gets its checksum, and they are put where
//! they belong. The rest of the file is zeros. An input that begins with the signature of a file is
//! the file instead. `foreign` says what is asserted.
#![no_main]
#![forbid(unsafe_code)]

use blockhouse_format::ForeignKind;
use blockhouse_fuzz::foreign::{Mode, look_at};
use blockhouse_fuzz::sparse_file::SparseFile;
use libfuzzer_sys::fuzz_target;

const FILE_SIGNATURE: &[u8] = b"vhdxfile";

/// Bytes of a structure that are in the input, its place in the file, how many bytes its checksum
/// covers (0 for none), and its signature.
const STRUCTURES: [(usize, u64, usize, &[u8]); 6] = [
    (80, 64 << 10, 4096, b"head"),
    (112, 192 << 10, 64 << 10, b"regi"),
    (512, 2 << 20, 0, b"metadata"),
    (64, (2 << 20) + (64 << 10), 0, b""),
    (128, 3 << 20, 0, b""),
    (4096 + 4096, 1 << 20, 0, b"loge"),
];
/// Bytes of the file: headers, a log, the metadata, the block table, and if it is extended two
/// blocks.
const FILE: u64 = 4 << 20;
const BLOCKS: u64 = 2 << 20;
/// The longest structure that gets its checksum: a region table, or an entry of the log.
const MAX_SEALED: usize = 64 << 10;
static ZEROS: [u8; MAX_SEALED] = [0; MAX_SEALED];

fuzz_target!(|data: &[u8]| {
    let Some((mode, bytes)) = Mode::split(data) else { return };
    let file = if bytes.starts_with(FILE_SIGNATURE) {
        mode.file(bytes, &[], FILE)
    } else {
        structures(mode, bytes)
    };
    look_at(ForeignKind::Vhdx, file.clone(), file);
});

/// The file whose structures have these bytes.
fn structures(mode: Mode, mut rest: &[u8]) -> SparseFile {
    let mut pieces = vec![(0, FILE_SIGNATURE.to_vec())];
    for (length, place, sealed, signature) in STRUCTURES {
        let (bytes, after) = rest.split_at(length.min(rest.len()));
        rest = after;
        let mut bytes = bytes.to_vec();
        bytes.resize(bytes.len().max(signature.len()), 0);
        bytes[..signature.len()].copy_from_slice(signature);
        // An entry of the log says how long it is.
        let sealed = match bytes.get(8..12) {
            Some(length) if signature == b"loge" => {
                u32::from_le_bytes(length.try_into().expect("four")) as usize
            }
            _ => sealed,
        };
        if (12..=MAX_SEALED).contains(&sealed) {
            seal(&mut bytes, sealed);
        }
        pieces.push((place, bytes));
    }
    pieces.sort_by_key(|(place, _)| *place);
    SparseFile::new(mode.block, if mode.is_extended { FILE + BLOCKS } else { FILE }, pieces)
}

/// Stores the CRC-32C of the bytes in themselves: of the first `length`, where zeros follow those
/// that are here.
fn seal(bytes: &mut Vec<u8>, length: usize) {
    bytes.resize(bytes.len().max(12), 0);
    bytes[4..8].fill(0);
    let there = &bytes[..length.min(bytes.len())];
    let sum = crc32c::crc32c(there);
    let sum = crc32c::crc32c_append(sum, &ZEROS[there.len()..length]);
    bytes[4..8].copy_from_slice(&sum.to_le_bytes());
}
