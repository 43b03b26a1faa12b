//! The NBD handshake against any client: answers are bounded, and how the bytes arrive in pieces
//! changes nothing of what is answered and decided.
#![no_main]
#![forbid(unsafe_code)]

use blockhouse_disk::Access;
use blockhouse_nbd::handshake::{
    ExportInfo, ExportLookup, Handshake, MAX_OPTION, OUTPUT_PAUSE, Progress,
};
use libfuzzer_sys::fuzz_target;

/// No single answer is longer: the list of our two exports, or a name sent back.
const MAX_REPLY: usize = MAX_OPTION as usize;

struct Exports;

fn info(name: &str, access: Access) -> ExportInfo {
    let description = format!("The export {name}");
    let bitmaps = vec!["monday".into(), "b".into()];
    let is_disk = name == "disk";
    ExportInfo {
        name: name.into(),
        description,
        size: 1 << 30,
        access,
        smallest_block: 1,
        preferred_block: 4096,
        is_shared: is_disk,
        has_depth: is_disk,
        bitmaps,
    }
}

impl ExportLookup for Exports {
    fn find(&self, name: &str) -> Option<ExportInfo> {
        match name {
            "" | "disk" => Some(info("disk", Access::ReadWrite)),
            "frozen" => Some(info("frozen", Access::ReadOnly)),
            _ => None,
        }
    }

    fn list(&self) -> Vec<ExportInfo> {
        vec![info("disk", Access::ReadWrite), info("frozen", Access::ReadOnly)]
    }
}

/// Runs a whole handshake; returns all that was answered, the decision, and what was not used.
fn run_handshake<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> (Vec<u8>, Progress, Vec<u8>) {
    let mut handshake = Handshake::new();
    let mut answered = Vec::new();
    let mut late = Vec::new();
    let mut progress = Progress::More;
    for piece in pieces {
        if progress != Progress::More {
            late.extend_from_slice(piece);
            continue;
        }
        let mut input = piece;
        loop {
            let mut output = Vec::new();
            progress = handshake.feed(input, &Exports, &mut output);
            assert!(output.len() <= OUTPUT_PAUSE + MAX_REPLY, "{} bytes", output.len());
            answered.append(&mut output);
            if progress != Progress::Again {
                break;
            }
            input = &[];
        }
    }
    let mut rest = handshake.into_rest();
    rest.append(&mut late);
    (answered, progress, rest)
}

fuzz_target!(|data: &[u8]| {
    let Some((&piece, bytes)) = data.split_first() else { return };
    let whole = run_handshake(std::iter::once(bytes));
    let pieces = run_handshake(bytes.chunks(usize::from(piece) + 1));
    assert_eq!(whole, pieces);
});
