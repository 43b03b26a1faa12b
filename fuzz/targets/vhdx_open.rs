//! A VHDX image whose structures have any bytes: as few inputs have sound checksums and are long enough, the input is cut
//! into the structures, each gets its checksum, and they are put where they belong. The rest of the file is zeros.
#![no_main]
#![forbid(unsafe_code)]

use blockhouse_format::ForeignKind;
use blockhouse_fuzz::walk::look_at_foreign;
use libfuzzer_sys::fuzz_target;

/// Bytes of a structure that are in the input, its place in the file, how many bytes its checksum covers (0 for none),
/// and its signature.
const STRUCTURES: [(usize, usize, usize, &[u8]); 6] = [
    (80, 64 << 10, 4096, b"head"),
    (112, 192 << 10, 64 << 10, b"regi"),
    (512, 2 << 20, 0, b"metadata"),
    (64, (2 << 20) + (64 << 10), 0, b""),
    (128, 3 << 20, 0, b""),
    (4096 + 4096, 1 << 20, 0, b"loge"),
];
/// Bytes of the file: headers, a log, the metadata, the block table, two blocks.
const FILE: usize = 6 << 20;

fuzz_target!(|data: &[u8]| {
    look_at_foreign(ForeignKind::Vhdx, data);
    let mut file = vec![0; FILE];
    file[..8].copy_from_slice(b"vhdxfile");
    let mut rest = data;
    for (length, place, sealed, signature) in STRUCTURES {
        let (bytes, after) = rest.split_at(length.min(rest.len()));
        rest = after;
        file[place..place + bytes.len()].copy_from_slice(bytes);
        file[place..place + signature.len()].copy_from_slice(signature);
        // An entry of the log says how long it is.
        let sealed = match signature {
            b"loge" => {
                u32::from_le_bytes(file[place + 8..place + 12].try_into().expect("four")) as usize
            }
            _ => sealed,
        };
        if (12..=FILE - place).contains(&sealed) {
            seal(&mut file[place..place + sealed]);
        }
    }
    look_at_foreign(ForeignKind::Vhdx, &file);
});

/// Stores the CRC-32C of the bytes in themselves.
fn seal(bytes: &mut [u8]) {
    bytes[4..8].fill(0);
    let sum = crc32c::crc32c(bytes);
    bytes[4..8].copy_from_slice(&sum.to_le_bytes());
}
