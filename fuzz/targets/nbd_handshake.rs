//! The NBD handshake against any client: answers are bounded, and how the bytes arrive in pieces changes
//! nothing of what is answered and decided.
#![no_main]
#![forbid(unsafe_code)]

use blockhouse_disk::Access;
use blockhouse_nbd::handshake::{Directory, Facts, Handshake, MAX_OPTION, OUTPUT_PAUSE, Progress};
use libfuzzer_sys::fuzz_target;

/// No single answer is longer: the list of our two exports, or a name sent back.
const MAX_REPLY: usize = MAX_OPTION as usize;

struct Exports;

fn facts(name: &str, access: Access) -> Facts {
    let description = format!("The export {name}");
    Facts { name: name.into(), description, size: 1 << 30, access, preferred_block: 4096 }
}

impl Directory for Exports {
    fn find(&self, name: &str) -> Option<Facts> {
        match name {
            "" | "disk" => Some(facts("disk", Access::ReadWrite)),
            "frozen" => Some(facts("frozen", Access::ReadOnly)),
            _ => None,
        }
    }

    fn list(&self) -> Vec<Facts> {
        vec![facts("disk", Access::ReadWrite), facts("frozen", Access::ReadOnly)]
    }
}

/// Plays a whole handshake; returns all that was answered, the decision, and what was not used.
fn play<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> (Vec<u8>, Progress, Vec<u8>) {
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
    let whole = play(std::iter::once(bytes));
    let pieces = play(bytes.chunks(usize::from(piece) + 1));
    assert_eq!(whole, pieces);
});
