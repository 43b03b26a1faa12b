//! Requests of an NBD client after its handshake: every header is understood, refused or ends the
//! connection, and what is announced to follow it never depends on whether it makes sense.
#![no_main]
#![forbid(unsafe_code)]

use blockhouse_nbd::command::{Command, PayloadTooLong, understand};
use blockhouse_nbd::handshake::{BlockStatusUse, Terms};
use blockhouse_nbd::proto::request::RequestHeader;
use blockhouse_nbd::proto::{Framing, MAX_PAYLOAD};
use libfuzzer_sys::fuzz_target;

fn terms(choice: u8) -> Terms {
    let framing = match choice % 3 {
        0 => Framing::Simple,
        1 => Framing::Structured,
        _ => Framing::Extended,
    };
    let block_status = match framing.has_chunks() && choice >= 128 {
        true => BlockStatusUse::Negotiated,
        false => BlockStatusUse::NotNegotiated,
    };
    Terms { export: "disk".into(), framing, block_status }
}

fuzz_target!(|data: &[u8]| {
    let Some((&choice, mut stream)) = data.split_first() else { return };
    let terms = terms(choice);
    // A connection without its magic number is out of step and ends, so ends this.
    while let Ok(Some(header)) = RequestHeader::parse(terms.framing, stream) {
        let (head, rest) = stream.split_at(terms.framing.request_length());
        let mut encoded = Vec::new();
        header.encode(terms.framing, &mut encoded);
        assert_eq!(encoded, head);

        let announced = header.payload_length(terms.framing);
        let incoming = match understand(&header, &terms) {
            Ok(incoming) => incoming,
            Err(PayloadTooLong(length)) => {
                assert!(length == announced && length > u64::from(MAX_PAYLOAD));
                return;
            }
        };
        assert_eq!(u64::from(incoming.payload), announced);
        match incoming.command {
            Ok(Command::Write { length, .. }) => assert_eq!(length, incoming.payload),
            Ok(Command::Read { length, .. }) => assert!((1..=MAX_PAYLOAD).contains(&length)),
            Ok(Command::Disconnect) => return,
            Ok(_) | Err(_) => {}
        }
        stream = rest.get(incoming.payload as usize..).unwrap_or_default();
    }
});
