//! Any bytes as a VDI image.
#![no_main]
#![forbid(unsafe_code)]

use blockhouse_format::ForeignKind;
use blockhouse_fuzz::walk::look_at_foreign;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| look_at_foreign(ForeignKind::Vdi, data));
