//! A client of QMP that sends any bytes, in any pieces: each message is a value or an error, the
//! same ones however the bytes are cut, and memory is bounded.
//!
//! The first byte of an input is the length of the pieces, 0 for all at once.
#![no_main]
#![forbid(unsafe_code)]

use blockhouse_fuzz::in_bounded_memory;
use blockhouse_qmp::read_all;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((length, bytes)) = input.split_first() else { return };
    in_bounded_memory(|| {
        let whole = read_all(bytes.chunks(bytes.len().max(1)));
        let pieces = read_all(bytes.chunks(usize::from(*length).max(1)));
        assert_eq!(whole, pieces, "a message depends on how its bytes come");
        assert!(whole.iter().flat_map(|message| message.as_ref().err()).all(|why| !why.is_empty()));
    });
});
