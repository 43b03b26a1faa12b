//! Whole handshakes, honest and hostile, byte for byte.

use blockhouse_disk::Access;
use proptest::prelude::*;

use super::*;
use crate::proto::Framing;
use crate::proto::option::{REPLY_MAGIC, ReplyType};

struct Two;

fn info(name: &str, access: Access) -> ExportInfo {
    let description = if name == "disk" { "The first disk" } else { "" };
    ExportInfo {
        name: name.into(),
        description: description.into(),
        size: 1 << 30,
        access,
        smallest_block: 1,
        preferred_block: 4096,
        is_shared: name == "disk",
        has_depth: name == "disk",
        bitmaps: if name == "frozen" { vec!["monday".into()] } else { Vec::new() },
    }
}

impl ExportLookup for Two {
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

const LIST: u32 = 3;
const STARTTLS: u32 = 5;
const INFO: u32 = 6;
const GO: u32 = 7;
const STRUCTURED: u32 = 8;
const LIST_META: u32 = 9;
const SET_META: u32 = 10;
const EXTENDED: u32 = 11;

fn flags(flags: u32) -> Vec<u8> {
    flags.to_be_bytes().to_vec()
}

fn header(number: u32, length: u32) -> Vec<u8> {
    [&OPTION_MAGIC.to_be_bytes()[..], &number.to_be_bytes(), &length.to_be_bytes()].concat()
}

fn option(number: u32, data: &[u8]) -> Vec<u8> {
    [header(number, data.len() as u32), data.to_vec()].concat()
}

fn counted(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}

fn go(number: u32, name: &str, wanted: &[u16]) -> Vec<u8> {
    let wanted: Vec<u8> = wanted.iter().flat_map(|one| one.to_be_bytes()).collect();
    let count = (wanted.len() as u16 / 2).to_be_bytes();
    option(number, &[&counted(name)[..], &count, &wanted].concat())
}

fn meta(number: u32, name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = counted(name);
    data.extend((queries.len() as u32).to_be_bytes());
    data.extend(queries.iter().flat_map(|query| counted(query)));
    option(number, &data)
}

/// Feeds the script in pieces of `piece` bytes and returns all output, the outcome and the bytes
/// that were left over.
fn run(script: &[u8], piece: usize) -> (Vec<u8>, Progress, Vec<u8>) {
    let mut handshake = Handshake::new();
    let mut all = Vec::new();
    let mut chunks = script.chunks(piece.max(1));
    loop {
        let Some(mut input) = chunks.next() else { return (all, Progress::More, Vec::new()) };
        loop {
            let mut output = Vec::new();
            let progress = handshake.feed(input, &Two, &mut output);
            all.extend(output);
            assert!(handshake.pending.len() <= (MAX_OPTION as usize).saturating_add(piece));
            match progress {
                Progress::More => break,
                Progress::Again => input = &[],
                over => {
                    let mut rest = handshake.into_rest();
                    chunks.for_each(|chunk| rest.extend_from_slice(chunk));
                    return (all, over, rest);
                }
            }
        }
    }
}

/// Splits option replies into (option, type, data).
fn replies(mut bytes: &[u8]) -> Vec<(u32, u32, Vec<u8>)> {
    let mut replies = Vec::new();
    while !bytes.is_empty() {
        let word = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!(bytes[..8], REPLY_MAGIC.to_be_bytes());
        let length = word(16) as usize;
        replies.push((word(8), word(12), bytes[20..20 + length].to_vec()));
        bytes = &bytes[20 + length..];
    }
    replies
}

/// The reply types to a script of options, without their data.
fn types(options: &[Vec<u8>]) -> Vec<u32> {
    let (output, _, _) = run(&[flags(3), options.concat()].concat(), usize::MAX);
    replies(&output).into_iter().map(|reply| reply.1).collect()
}

const ACK: u32 = ReplyType::Ack as u32;
const SERVER: u32 = ReplyType::Server as u32;
const REP_INFO: u32 = ReplyType::Info as u32;
const CONTEXT: u32 = ReplyType::MetaContext as u32;
const UNSUP: u32 = ReplyType::ErrUnsup as u32;
const INVALID: u32 = ReplyType::ErrInvalid as u32;
const UNKNOWN: u32 = ReplyType::ErrUnknown as u32;
const TOO_BIG: u32 = ReplyType::ErrTooBig as u32;
const EXT_REQD: u32 = ReplyType::ErrExtHeaderReqd as u32;

#[test]
fn the_greeting_offers_fixed_newstyle_without_zeroes() {
    assert_eq!(&Handshake::greeting(), b"NBDMAGICIHAVEOPT\x00\x03");
}

#[test]
fn a_modern_client_gets_everything() {
    let script = [
        flags(3),
        option(EXTENDED, b""),
        meta(SET_META, "disk", &["base:allocation"]),
        go(GO, "disk", &[1, 2, 3]),
        b"early".to_vec(),
    ]
    .concat();
    let (output, progress, rest) = run(&script, usize::MAX);
    let options = NegotiatedOptions {
        export: "disk".into(),
        framing: Framing::Extended,
        contexts: vec![(1, MetaContext::Allocation)],
    };
    assert_eq!(progress, Progress::Transmit(options));
    assert_eq!(rest, b"early");
    let replies = replies(&output);
    let size: [u8; 10] = [0, 0, 0, 0, 0, 0, 0x40, 0, 0, 0];
    assert_eq!(replies[0], (EXTENDED, ACK, vec![]));
    assert_eq!(replies[1], (SET_META, CONTEXT, b"\0\0\0\x01base:allocation".to_vec()));
    assert_eq!(replies[2], (SET_META, ACK, vec![]));
    assert_eq!(replies[3], (GO, REP_INFO, [&size[..], &[0x1d, 0xed]].concat()));
    assert_eq!(replies[4], (GO, REP_INFO, b"\0\x01disk".to_vec()));
    assert_eq!(replies[5], (GO, REP_INFO, b"\0\x02The first disk".to_vec()));
    let sizes = [0, 3, 0, 0, 0, 1, 0, 0, 0x10, 0, 2, 0, 0, 0].to_vec();
    assert_eq!(replies[6], (GO, REP_INFO, sizes));
    assert_eq!(replies[7], (GO, ACK, vec![]));
}

#[test]
fn every_way_of_cutting_the_stream_gives_the_same() {
    let script = [
        flags(3),
        option(LIST, b""),
        option(77, &[0; 300]),
        option(STRUCTURED, b""),
        meta(LIST_META, "", &[]),
        go(INFO, "frozen", &[3]),
        go(GO, "nowhere", &[]),
        go(GO, "", &[]),
        b"rest".to_vec(),
    ]
    .concat();
    let whole = run(&script, usize::MAX);
    assert!(matches!(whole.1, Progress::Transmit(_)), "{:?}", whole.1);
    for piece in 1..script.len() {
        assert_eq!(run(&script, piece), whole, "in pieces of {piece}");
    }
}

#[test]
fn a_stream_that_ends_anywhere_just_waits() {
    let script = [flags(3), option(LIST, b""), option(99, b"data"), go(GO, "disk", &[3])].concat();
    for end in 0..script.len() {
        assert_eq!(run(&script[..end], usize::MAX).1, Progress::More, "cut at {end}");
    }
}

#[test]
fn export_name_answers_with_or_without_padding() {
    let name = option(1, b"frozen");
    for (client, length) in [(0, 134), (1, 134), (3, 10), (2, 10)] {
        let (output, progress, _) = run(&[flags(client), name.clone()].concat(), usize::MAX);
        assert!(matches!(progress, Progress::Transmit(_)));
        assert_eq!(output.len(), length);
        assert_eq!(output[..10], [0, 0, 0, 0, 0x40, 0, 0, 0, 0x04, 0x0f]);
        assert!(output[10..].iter().all(|&byte| byte == 0));
    }
}

#[test]
fn what_cannot_be_answered_ends_the_connection() {
    for (script, error) in [
        (flags(4), HandshakeError::UnknownFlags(4)),
        ([flags(3), option(1, b"nowhere")].concat(), HandshakeError::NoSuchExport),
        ([flags(3), option(1, b"\xff")].concat(), HandshakeError::NoSuchExport),
        ([flags(3), option(1, &[b'x'; 5000])].concat(), HandshakeError::NoSuchExport),
        ([flags(3), vec![0; 16]].concat(), HandshakeError::BadMagic(0)),
        ([flags(3), header(LIST, u32::MAX)].concat(), HandshakeError::OptionTooLong(u32::MAX)),
        (
            [flags(3), header(99, MAX_SKIP + 1)].concat(),
            HandshakeError::OptionTooLong(MAX_SKIP + 1),
        ),
        ([flags(3), option(2, b"bye")].concat(), HandshakeError::Aborted),
        (
            [flags(3), option(EXTENDED, b""), option(1, b"disk")].concat(),
            HandshakeError::ExportNameForbidden,
        ),
    ] {
        let (_, progress, _) = run(&script, usize::MAX);
        assert_eq!(progress, Progress::Close(error));
    }
}

#[test]
fn abort_is_acknowledged_whatever_it_carries() {
    for length in [0, 5, 100_000] {
        let script = [flags(3), option(2, &vec![7; length])].concat();
        let (output, progress, _) = run(&script, 4096);
        assert_eq!(replies(&output), [(2, ACK, vec![])]);
        assert_eq!(progress, Progress::Close(HandshakeError::Aborted));
    }
}

#[test]
fn the_list_names_every_export() {
    let (output, _, _) = run(&[flags(3), option(LIST, b"")].concat(), usize::MAX);
    let disk = b"\0\0\0\x04diskThe first disk".to_vec();
    let frozen = b"\0\0\0\x06frozen".to_vec();
    let expected = [(LIST, SERVER, disk), (LIST, SERVER, frozen), (LIST, ACK, vec![])];
    assert_eq!(replies(&output), expected);
}

#[test]
fn unknown_options_are_refused_and_the_next_is_read() {
    for number in [0, 4, 12, 1000, u32::MAX] {
        assert_eq!(types(&[option(number, b"data"), option(LIST, b"")])[0], UNSUP);
        let long = option(number, &vec![0; MAX_OPTION as usize + 1]);
        assert_eq!(types(&[long, option(STRUCTURED, b"")]), [UNSUP, ACK]);
    }
}

#[test]
fn tls_is_refused_and_kept_apart_from_its_misuse() {
    assert_eq!(types(&[option(STARTTLS, b""), option(STARTTLS, b"x")]), [UNSUP, INVALID]);
}

#[test]
fn data_where_none_belongs_is_invalid() {
    for number in [LIST, STRUCTURED, EXTENDED] {
        assert_eq!(types(&[option(number, b"x"), option(STRUCTURED, b"")]), [INVALID, ACK]);
    }
}

#[test]
fn known_options_too_long_to_look_at_are_too_big() {
    let long = vec![0; MAX_OPTION as usize + 1];
    for number in [LIST, INFO, GO, LIST_META, SET_META] {
        assert_eq!(types(&[option(number, &long), option(STRUCTURED, b"")]), [TOO_BIG, ACK]);
    }
}

#[test]
fn extended_headers_take_precedence_over_structured_replies() {
    let (structured, extended) = (option(STRUCTURED, b""), option(EXTENDED, b""));
    let options = [structured.clone(), structured.clone(), extended.clone(), extended, structured];
    assert_eq!(types(&options), [ACK, INVALID, ACK, INVALID, EXT_REQD]);
}

#[test]
fn info_describes_and_stays_in_the_handshake() {
    let options = [go(INFO, "disk", &[]), go(INFO, "nowhere", &[3]), go(INFO, "frozen", &[1, 9])];
    assert_eq!(types(&options), [REP_INFO, ACK, UNKNOWN, REP_INFO, REP_INFO, ACK]);
    assert_eq!(types(&[option(INFO, b"short"), option(GO, b"")]), [INVALID, INVALID]);
}

#[test]
fn contexts_need_an_export_and_their_choice_needs_chunks() {
    assert_eq!(types(&[meta(SET_META, "disk", &["base:allocation"])]), [INVALID]);
    // QEMU's server lists contexts for clients of any framing, too.
    assert_eq!(types(&[meta(LIST_META, "disk", &["base:allocation"])]), [CONTEXT, ACK]);
    for number in [LIST_META, SET_META] {
        let options = [option(STRUCTURED, b""), meta(number, "nowhere", &[])];
        assert_eq!(types(&options), [ACK, UNKNOWN]);
    }
}

#[test]
fn listing_knows_wildcards_and_selecting_does_not() {
    for (queries, listed, set) in [
        (&[][..], true, false),
        (&["base:"][..], true, false),
        (&["base:allocation"][..], true, true),
        (&["base:other", "qemu:dirty-bitmap:x"][..], false, false),
    ] {
        for (number, expected) in [(LIST_META, listed), (SET_META, set)] {
            let types = types(&[option(STRUCTURED, b""), meta(number, "disk", queries)]);
            // All contexts, if the query is empty.
            let wanted: &[u32] = match (expected, queries) {
                (true, []) => &[ACK, CONTEXT, CONTEXT, ACK],
                (true, _) => &[ACK, CONTEXT, ACK],
                (false, _) => &[ACK, ACK],
            };
            assert_eq!(types, wanted, "option {number} with {queries:?}");
        }
    }
}

/// The ids of the contexts of block status after these options.
fn contexts_after(options: &[Vec<u8>]) -> Vec<u32> {
    let script = [flags(3), option(STRUCTURED, b""), options.concat()].concat();
    match run(&script, usize::MAX).1 {
        Progress::Transmit(options) => options.contexts.iter().map(|(id, _)| *id).collect(),
        other => panic!("no transmission phase: {other:?}"),
    }
}

#[test]
fn a_selection_holds_for_its_export_until_the_next() {
    let none: [u32; 0] = [];
    let select = |name| meta(SET_META, name, &["base:allocation"]);
    let enter = |name| go(GO, name, &[]);
    assert_eq!(contexts_after(&[select("disk"), enter("disk")]), [1]);
    assert_eq!(contexts_after(&[select("disk"), enter("")]), [1]);
    assert_eq!(contexts_after(&[select("disk"), option(1, b"disk")]), [1]);
    assert_eq!(contexts_after(&[select("disk"), enter("frozen")]), none);
    assert_eq!(contexts_after(&[select("disk"), select("frozen"), enter("disk")]), none);
    for spoiled in [
        meta(SET_META, "disk", &[]),
        meta(SET_META, "nowhere", &["base:allocation"]),
        option(SET_META, b"x"),
        option(SET_META, &vec![0; MAX_OPTION as usize + 1]),
    ] {
        assert_eq!(contexts_after(&[select("disk"), spoiled, enter("disk")]), none);
    }
}

#[test]
fn bitmaps_are_listed_and_selected_by_their_names() {
    let queries = ["qemu:dirty-bitmap:monday", "base:allocation", "qemu:dirty-bitmap:other"];
    for (number, id) in [(LIST_META, 0), (SET_META, 2)] {
        let script = [flags(3), option(STRUCTURED, b""), meta(number, "frozen", &queries[..1])];
        let (output, ..) = run(&script.concat(), usize::MAX);
        let context = [&[0, 0, 0, id], queries[0].as_bytes()].concat();
        assert_eq!(replies(&output)[1..], [(number, CONTEXT, context), (number, ACK, vec![])]);
    }
    let enter = go(GO, "frozen", &[]);
    let after = |queries| contexts_after(&[meta(SET_META, "frozen", queries), enter.clone()]);
    assert_eq!(after(&queries), [1, 2]);
    assert_eq!(after(&queries[..1]), [2]);
    assert_eq!(after(&["qemu:", "qemu:dirty-bitmap:"]), [0; 0]);
}

/// The transmission flags of the last reply that has them.
fn flags_after(options: &[Vec<u8>]) -> u16 {
    let (output, ..) = run(&[flags(3), options.concat()].concat(), usize::MAX);
    let replies = replies(&output);
    let mut infos = replies.iter().rev().filter(|(_, kind, _)| *kind == REP_INFO);
    let data = &infos.next().expect("information").2;
    u16::from_be_bytes([data[10], data[11]])
}

#[test]
fn a_status_with_a_payload_is_offered_where_a_context_can_be_selected() {
    const OFFERED: u16 = 1 << 12;
    let select = |name| meta(SET_META, name, &["base:allocation"]);
    let is_offered = |options: &[Vec<u8>]| flags_after(options) & OFFERED != 0;
    let (extended, go_disk) = (option(EXTENDED, b""), go(GO, "disk", &[]));
    assert!(is_offered(&[extended.clone(), select("disk"), go_disk.clone()]));
    assert!(is_offered(&[extended.clone(), go(INFO, "disk", &[])]));
    assert!(!is_offered(&[extended.clone(), go_disk.clone()]));
    assert!(!is_offered(&[extended, select("frozen"), go_disk.clone()]));
    assert!(!is_offered(&[option(STRUCTURED, b""), select("disk"), go_disk]));
}

#[test]
fn an_export_for_one_client_or_without_depth_says_so() {
    const MULTI: u16 = 1 << 8;
    assert_eq!(flags_after(&[go(INFO, "disk", &[])]) & MULTI, MULTI);
    assert_eq!(flags_after(&[go(INFO, "frozen", &[])]) & MULTI, 0);
    let depth = |name| meta(SET_META, name, &["qemu:allocation-depth"]);
    assert_eq!(contexts_after(&[depth("disk"), go(GO, "disk", &[])]), [2]);
    assert_eq!(contexts_after(&[depth("frozen"), go(GO, "frozen", &[])]), [0; 0]);
    let listed = types(&[option(STRUCTURED, b""), meta(LIST_META, "frozen", &[])]);
    assert_eq!(listed, [ACK, CONTEXT, CONTEXT, ACK], "base:allocation and the bitmap");
}

#[test]
fn a_flood_of_options_is_answered_in_portions_and_then_ends() {
    let flood = option(LIST, b"").repeat(MAX_OPTIONS as usize + 1);
    let mut handshake = Handshake::new();
    let mut input = [flags(3), flood].concat();
    let mut portions = 0;
    let error = loop {
        let mut output = Vec::new();
        match handshake.feed(&input, &Two, &mut output) {
            Progress::Close(error) => break error,
            Progress::Again => portions += 1,
            other => panic!("{other:?}"),
        }
        assert!(output.len() < OUTPUT_PAUSE + 200, "{} bytes at once", output.len());
        input.clear();
    };
    assert_eq!(error, HandshakeError::TooManyOptions);
    assert!(portions > 10);
}

proptest! {
    /// No bytes make the handshake panic, grow, or answer something that is no reply.
    #[test]
    fn any_bytes_are_survived(
        numbers in prop::collection::vec((0u32..14, prop::collection::vec(any::<u8>(), 0..40)), 0..20),
        noise in prop::collection::vec(any::<u8>(), 0..40),
        piece in 1usize..100,
    ) {
        // EXPORT_NAME answers without a reply header, so its output could not be parsed.
        let options = numbers.iter().filter(|(number, _)| *number != 1);
        let options: Vec<u8> = options.flat_map(|(number, data)| option(*number, data)).collect();
        let (output, _, _) = run(&[flags(3), options, noise].concat(), piece);
        replies(&output);
    }
}
