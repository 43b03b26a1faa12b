//! Requests of an NBD client after its handshake: every header is understood, refused or ends the
//! connection, and what is announced to follow it never depends on whether it makes sense.
#![no_main]
#![forbid(unsafe_code)]

use blockhouse_nbd::command::{Command, PayloadTooLong, decode};
use blockhouse_nbd::handshake::{MetaContext, NegotiatedOptions};
use blockhouse_nbd::proto::request::RequestHeader;
use blockhouse_nbd::proto::{Framing, MAX_PAYLOAD};
use blockhouse_nbd::status_payload::SelectedStatus;
use libfuzzer_sys::fuzz_target;

fn options(choice: u8) -> NegotiatedOptions {
    let framing = match choice % 3 {
        0 => Framing::Simple,
        1 => Framing::Structured,
        _ => Framing::Extended,
    };
    let contexts = if framing.has_chunks() && choice >= 128 {
        vec![(1, MetaContext::Allocation), (2, MetaContext::DirtyBitmap("b".into()))]
    } else {
        Vec::new()
    };
    NegotiatedOptions { export: "disk".into(), framing, contexts }
}

fuzz_target!(|data: &[u8]| {
    let Some((&choice, mut stream)) = data.split_first() else { return };
    let options = options(choice);
    // A connection without its magic number is out of step and ends, so ends this.
    while let Ok(Some(header)) = RequestHeader::parse(options.framing, stream) {
        let (head, rest) = stream.split_at(options.framing.request_length());
        let mut encoded = Vec::new();
        header.encode(options.framing, &mut encoded);
        assert_eq!(encoded, head);

        let announced = header.payload_length(options.framing);
        let decoded = match decode(&header, &options) {
            Ok(decoded) => decoded,
            Err(PayloadTooLong(length)) => {
                assert!(length == announced && length > u64::from(MAX_PAYLOAD));
                return;
            }
        };
        assert_eq!(u64::from(decoded.payload), announced);
        match decoded.command {
            Ok(Command::Write { length, .. }) => assert_eq!(length, decoded.payload),
            Ok(Command::SelectedStatus { offset, length, .. }) => {
                assert_eq!(length, decoded.payload);
                let payload = &rest[..rest.len().min(length as usize)];
                if let Ok(selected) = SelectedStatus::parse(payload, offset, &options.contexts) {
                    assert!(!selected.contexts.is_empty() && !selected.range.is_empty());
                }
            }
            Ok(Command::Read { length, .. }) => assert!((1..=MAX_PAYLOAD).contains(&length)),
            Ok(Command::Disconnect) => return,
            Ok(_) | Err(_) => {}
        }
        stream = rest.get(decoded.payload as usize..).unwrap_or_default();
    }
});
