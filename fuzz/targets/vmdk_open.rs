//! Any bytes as a VMDK image with tables, with or without zeros after them; or where they begin as
//! text does, as a descriptor up to the first zero byte, and the bytes after that as the file of
//! all its extents. `foreign` says what is asserted; of images with large grains, fewer are read.
#![no_main]
#![forbid(unsafe_code)]

use blockhouse_format::ForeignKind;
use blockhouse_fuzz::foreign::{Mode, look_at};
use libfuzzer_sys::fuzz_target;

/// Zeros that follow: room for grains of 64 KiB.
const ZEROS: u64 = 512 << 10;

fuzz_target!(|data: &[u8]| {
    let Some((mode, bytes)) = Mode::split(data) else { return };
    if bytes.first() == Some(&b'#') {
        let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
        let descriptor = Mode { is_extended: false, ..mode }.file(&bytes[..end], &[], 0);
        let extents = mode.file(bytes.get(end + 1..).unwrap_or_default(), &[], ZEROS);
        look_at(ForeignKind::Vmdk, descriptor, extents);
    } else {
        let file = mode.file(bytes, &[], ZEROS);
        look_at(ForeignKind::Vmdk, file.clone(), file);
    }
});
