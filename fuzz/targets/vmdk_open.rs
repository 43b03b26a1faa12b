//! Any bytes as a VMDK image, or as a descriptor. All files that a descriptor names have these bytes, too.
#![no_main]
#![forbid(unsafe_code)]

use blockhouse_format::ForeignKind;
use blockhouse_fuzz::walk::look_at_foreign;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| look_at_foreign(ForeignKind::Vmdk, data));
