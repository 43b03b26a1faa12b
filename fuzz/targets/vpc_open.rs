//! Any bytes as a VHD image; the last 512 are at the end of the file, where zeros are between. Few
//! inputs have sound checksums: inputs with bit 2 of their mode get those of a footer at the end,
//! of its copy at the start and of a header after that. `foreign` says what is asserted.
#![no_main]
#![forbid(unsafe_code)]

use blockhouse_format::ForeignKind;
use blockhouse_fuzz::foreign::{Mode, look_at};
use libfuzzer_sys::fuzz_target;

/// Bytes of a footer, and of its copy at the start.
const FOOTER: usize = 512;
/// Bytes of the header of a dynamic image.
const HEADER: usize = 1024;
/// The bit of the mode.
const SEALED: u8 = 4;
/// Zeros before the footer: room for blocks of 2 MiB.
const ZEROS: u64 = 8 << 20;

fuzz_target!(|data: &[u8]| {
    let Some((mode, bytes)) = Mode::split(data) else { return };
    let (start, end) = bytes.split_at(bytes.len().saturating_sub(FOOTER));
    let (mut start, mut end) = (start.to_vec(), end.to_vec());
    if data[0] & SEALED != 0 && start.len() >= FOOTER + HEADER {
        seal(&mut end, 64);
        seal(&mut start[..FOOTER], 64);
        seal(&mut start[FOOTER..][..HEADER], 36);
    }
    let file = mode.file(&start, &end, ZEROS);
    look_at(ForeignKind::Vpc, file.clone(), file);
});

/// Stores the checksum at `field`: the complement of the sum of all other bytes.
fn seal(bytes: &mut [u8], field: usize) {
    bytes[field..field + 4].fill(0);
    let sum: u32 = bytes.iter().map(|&byte| u32::from(byte)).sum();
    bytes[field..field + 4].copy_from_slice(&(!sum).to_be_bytes());
}
