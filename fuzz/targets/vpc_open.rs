//! Any bytes as a VHD image; and, because few inputs have sound checksums, the same bytes with the checksums of a
//! footer at the end and of a header after the copy at the start.
#![no_main]
#![forbid(unsafe_code)]

use blockhouse_format::ForeignKind;
use blockhouse_fuzz::walk::look_at_foreign;
use libfuzzer_sys::fuzz_target;

/// Bytes of a footer, and of its copy at the start.
const FOOTER: usize = 512;
/// Bytes of the header of a dynamic image.
const HEADER: usize = 1024;

fuzz_target!(|data: &[u8]| {
    look_at_foreign(ForeignKind::Vpc, data);
    let mut sealed = data.to_vec();
    if sealed.len() >= 2 * FOOTER + HEADER {
        let last = sealed.len() - FOOTER;
        seal(&mut sealed[last..], 64);
        seal(&mut sealed[..FOOTER], 64);
        seal(&mut sealed[FOOTER..][..HEADER], 36);
        look_at_foreign(ForeignKind::Vpc, &sealed);
    }
});

/// Stores the checksum at `field`: the complement of the sum of all other bytes.
fn seal(bytes: &mut [u8], field: usize) {
    bytes[field..field + 4].fill(0);
    let sum: u32 = bytes.iter().map(|&byte| u32::from(byte)).sum();
    bytes[field..field + 4].copy_from_slice(&(!sum).to_be_bytes());
}
