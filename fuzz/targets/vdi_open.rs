//! Any bytes as a VDI image, with or without zeros after them. `foreign` says what is asserted.
#![no_main]
#![forbid(unsafe_code)]

use blockhouse_format::ForeignKind;
use blockhouse_fuzz::foreign::{Mode, look_at};
use libfuzzer_sys::fuzz_target;

/// Zeros that follow: room for a few of the smallest blocks, and for no more entries of the table
/// than are soon checked.
const ZEROS: u64 = 16 << 10;

fuzz_target!(|data: &[u8]| {
    let Some((mode, bytes)) = Mode::split(data) else { return };
    let file = mode.file(bytes, &[], ZEROS);
    look_at(ForeignKind::Vdi, file.clone(), file);
});
