//! Decodes a request header into a command, or into the error that the client gets.
//!
//! This module checks only the rules of the protocol: types, flags, reserved fields, lengths beyond
//! the announced limits. The disk checks ranges and access, in one place for all exports. A payload
//! is expected after the header even if the request is invalid, because the next request starts
//! after the payload. Only a payload beyond the announced maximum ends the connection.

use blockhouse_core::{ByteRange, Durability, Fallback, Unmap};
use blockhouse_disk::Operation;

use crate::handshake::NegotiatedOptions;
use crate::proto::request::{RequestHeader, kind};
use crate::proto::{CommandFlags, Errno, Framing, MAX_PAYLOAD};

/// The command of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Return `length` bytes, at least one and at most [`MAX_PAYLOAD`].
    Read {
        /// First byte of the export.
        offset: u64,
        /// The number of bytes.
        length: u32,
    },
    /// Store the payload, at least one byte and at most [`MAX_PAYLOAD`].
    Write {
        /// First byte of the export.
        offset: u64,
        /// The number of bytes.
        length: u32,
        /// The data that must be stable before the reply.
        durability: Durability,
    },
    /// Make the range read as zeros.
    WriteZeroes {
        /// The bytes of the export.
        range: ByteRange,
        /// Whether a hole may be left.
        unmap: Unmap,
        /// Whether zeros may be written as data if there is no faster way.
        fallback: Fallback,
        /// The data that must be stable before the reply.
        durability: Durability,
    },
    /// Discard the range, whose content is no longer needed.
    Trim {
        /// The bytes of the export.
        range: ByteRange,
        /// The data that must be stable before the reply.
        durability: Durability,
    },
    /// Make all writes durable whose replies were sent.
    Flush,
    /// Prefetch the range, which will be read soon.
    Cache {
        /// The bytes of the export.
        range: ByteRange,
    },
    /// Describe the range, which is not empty.
    BlockStatus {
        /// The bytes of the export.
        range: ByteRange,
        /// Whether one extent is requested.
        req_one: ReqOne,
    },
    /// Describe the range in the payload, in the contexts that it selects
    /// ([`SelectedStatus`](crate::status_payload::SelectedStatus)).
    SelectedStatus {
        /// First byte of the export.
        offset: u64,
        /// How many bytes the payload has.
        length: u32,
        /// Whether one extent is requested.
        req_one: ReqOne,
    },
    /// Succeed and do nothing: a request of length zero, of the given type.
    Empty(EmptyKind),
    /// Complete the requests in flight and close; there is no reply.
    Disconnect,
}

impl Command {
    /// Whether the command changes the export's content.
    pub fn is_change(&self) -> bool {
        matches!(self, Self::Write { .. } | Self::WriteZeroes { .. } | Self::Trim { .. })
    }
}

impl Command {
    /// The operation of the statistics in which the command is counted.
    pub fn operation(&self) -> Operation {
        match self {
            Self::Write { durability: Durability::None, .. } => Operation::Write,
            Self::Write { .. } => Operation::WriteFua,
            Self::WriteZeroes { .. } => Operation::WriteZeroes,
            Self::Trim { .. } => Operation::Discard,
            Self::Flush => Operation::Flush,
            Self::Cache { .. } => Operation::Prefetch,
            Self::BlockStatus { .. } | Self::SelectedStatus { .. } => Operation::BlockStatus,
            Self::Read { .. } | Self::Empty(_) | Self::Disconnect => Operation::Read,
        }
    }
}

/// The type of a request of length zero. The reply depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EmptyKind {
    /// A read, whose reply must be a chunk if chunks were negotiated.
    Read,
    /// Anything else.
    Other,
}

/// `NBD_CMD_FLAG_REQ_ONE`: how many extents a block status reply may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReqOne {
    /// Exactly one.
    Set,
    /// As many as there are.
    Unset,
}

/// The error that the client gets for a failed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestError {
    /// The protocol's error number, for the client's program.
    pub errno: Errno,
    /// One line for the client's user.
    pub message: &'static str,
}

/// A decoded request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodedRequest {
    /// The command, or the error to reply with.
    pub command: Result<Command, RequestError>,
    /// The number of payload bytes that follow the header; they must be received even if the
    /// command is an error. At most [`MAX_PAYLOAD`], and for [`Command::Write`] and
    /// [`Command::SelectedStatus`] equal to their length.
    pub payload: u32,
}

/// The request's payload, of this many bytes, is longer than the server accepts. The connection
/// ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a request has a payload of {0} bytes, more than the announced {MAX_PAYLOAD}")]
pub struct PayloadTooLong(pub u64);

/// Decodes a request under the negotiated options.
///
/// # Errors
/// A payload beyond [`MAX_PAYLOAD`]: the connection ends.
pub fn decode(
    header: &RequestHeader,
    options: &NegotiatedOptions,
) -> Result<DecodedRequest, PayloadTooLong> {
    let payload = header.payload_length(options.framing);
    if payload > u64::from(MAX_PAYLOAD) {
        return Err(PayloadTooLong(payload));
    }
    let command = decode_command(header, options);
    Ok(DecodedRequest { command, payload: payload as u32 })
}

fn decode_command(
    header: &RequestHeader,
    options: &NegotiatedOptions,
) -> Result<Command, RequestError> {
    check_flags(header, options)?;
    let RequestHeader { flags, offset, length, .. } = *header;
    let durability =
        if flags.contains(CommandFlags::FUA) { Durability::Data } else { Durability::None };
    let empty = length == 0;
    match header.kind {
        kind::READ if empty => Ok(Command::Empty(EmptyKind::Read)),
        kind::READ => Ok(Command::Read { offset, length: read_length(length, options.framing)? }),
        kind::WRITE | kind::TRIM | kind::CACHE | kind::WRITE_ZEROES if empty => {
            Ok(Command::Empty(EmptyKind::Other))
        }
        // `decode` has checked that the payload, which is the length, is within the maximum.
        kind::WRITE => Ok(Command::Write { offset, length: length as u32, durability }),
        kind::DISC => Ok(Command::Disconnect),
        kind::FLUSH if offset != 0 || !empty => {
            Err(invalid("a flush has an offset or a length other than 0"))
        }
        kind::FLUSH => Ok(Command::Flush),
        kind::TRIM => Ok(Command::Trim { range: range(header, Errno::Inval)?, durability }),
        kind::CACHE => Ok(Command::Cache { range: range(header, Errno::Inval)? }),
        kind::WRITE_ZEROES => {
            let no_hole = flags.contains(CommandFlags::NO_HOLE);
            let fast = flags.contains(CommandFlags::FAST_ZERO);
            Ok(Command::WriteZeroes {
                range: range(header, Errno::NoSpc)?,
                unmap: if no_hole { Unmap::Forbidden } else { Unmap::Allowed },
                fallback: if fast { Fallback::Forbidden } else { Fallback::Allowed },
                durability,
            })
        }
        // Only BLOCK_STATUS is left: `check_flags` refuses unknown types.
        _ => block_status(header, options),
    }
}

/// Checks that the type is known, and that the request has only flags that are allowed for the type
/// and were offered.
fn check_flags(header: &RequestHeader, options: &NegotiatedOptions) -> Result<(), RequestError> {
    let allowed = match header.kind {
        kind::READ if options.framing.has_chunks() => CommandFlags::DF,
        kind::WRITE if options.framing == Framing::Extended => CommandFlags::PAYLOAD_LEN,
        kind::WRITE_ZEROES => CommandFlags::NO_HOLE | CommandFlags::FAST_ZERO,
        kind::BLOCK_STATUS if options.framing == Framing::Extended => {
            CommandFlags::REQ_ONE | CommandFlags::PAYLOAD_LEN
        }
        kind::BLOCK_STATUS => CommandFlags::REQ_ONE,
        kind::READ..=kind::CACHE => CommandFlags::empty(),
        _ => return Err(invalid("the request type is unknown")),
    };
    // SEND_FUA offers the flag for all requests, even where it has no effect.
    if (allowed | CommandFlags::FUA).contains(header.flags) {
        Ok(())
    } else {
        Err(invalid("a flag does not belong to the request or was not offered"))
    }
}

fn read_length(length: u64, framing: Framing) -> Result<u32, RequestError> {
    match u32::try_from(length) {
        Ok(length) if length <= MAX_PAYLOAD => Ok(length),
        // EOVERFLOW may be sent only to clients that have negotiated chunks.
        _ => Err(RequestError {
            errno: if framing.has_chunks() { Errno::Overflow } else { Errno::Inval },
            message: "a read is longer than the announced maximum",
        }),
    }
}

fn block_status(
    header: &RequestHeader,
    options: &NegotiatedOptions,
) -> Result<Command, RequestError> {
    if options.contexts.is_empty() {
        return Err(invalid("no metadata context was selected for this export"));
    }
    if header.length == 0 {
        return Err(invalid("there is no status of no bytes"));
    }
    let is_one = header.flags.contains(CommandFlags::REQ_ONE);
    let req_one = if is_one { ReqOne::Set } else { ReqOne::Unset };
    let RequestHeader { offset, length, .. } = *header;
    if header.flags.contains(CommandFlags::PAYLOAD_LEN) {
        let length = check_status_payload(length, options.contexts.len())?;
        return Ok(Command::SelectedStatus { offset, length, req_one });
    }
    Ok(Command::BlockStatus { range: range(header, Errno::Inval)?, req_one })
}

/// The length of a payload that selects at least one of `contexts` contexts: 8 bytes, and 4 for
/// each.
pub(crate) fn check_status_payload(length: u64, contexts: usize) -> Result<u32, RequestError> {
    let ids = length.checked_sub(8).filter(|ids| ids.is_multiple_of(4)).map(|ids| ids / 4);
    match ids {
        Some(1..) if ids <= Some(contexts as u64) => Ok(length as u32),
        _ => Err(invalid("the payload's length is not that of a selection of contexts")),
    }
}

fn range(header: &RequestHeader, past_end: Errno) -> Result<ByteRange, RequestError> {
    ByteRange::new(header.offset, header.length)
        .ok_or(RequestError { errno: past_end, message: "the range ends beyond 64 bits" })
}

pub(crate) fn invalid(message: &'static str) -> RequestError {
    RequestError { errno: Errno::Inval, message }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::handshake::MetaContext;

    fn options(framing: Framing) -> NegotiatedOptions {
        let contexts =
            if framing.has_chunks() { vec![(1, MetaContext::Allocation)] } else { Vec::new() };
        NegotiatedOptions { export: String::new(), framing, contexts }
    }

    fn header(kind: u16, flags: CommandFlags, offset: u64, length: u64) -> RequestHeader {
        RequestHeader { flags, kind, cookie: 1, offset, length }
    }

    fn errno(framing: Framing, header: RequestHeader) -> Option<Errno> {
        let decoded = decode(&header, &options(framing)).unwrap();
        decoded.command.err().map(|error| error.errno)
    }

    const NONE: CommandFlags = CommandFlags::empty();
    const ALL: [Framing; 3] = [Framing::Simple, Framing::Structured, Framing::Extended];

    #[test]
    fn flags_are_accepted_exactly_where_they_belong() {
        let tables = [
            (kind::READ, CommandFlags::DF),
            (kind::WRITE_ZEROES, CommandFlags::NO_HOLE),
            (kind::WRITE_ZEROES, CommandFlags::FAST_ZERO),
            (kind::BLOCK_STATUS, CommandFlags::REQ_ONE),
        ];
        for kind in [kind::READ, kind::TRIM, kind::CACHE, kind::WRITE_ZEROES, kind::BLOCK_STATUS] {
            for bit in 0..16 {
                let flag = CommandFlags::from_bits_retain(1 << bit);
                let belongs = flag == CommandFlags::FUA || tables.contains(&(kind, flag));
                let got = errno(Framing::Structured, header(kind, flag, 0, 512));
                assert_eq!(got.is_none(), belongs, "request type {kind}, flag {flag:?}");
            }
        }
    }

    #[test]
    fn dont_fragment_is_not_offered_without_chunks() {
        let read = header(kind::READ, CommandFlags::DF, 0, 512);
        assert_eq!(errno(Framing::Simple, read), Some(Errno::Inval));
        assert_eq!(errno(Framing::Extended, read), None);
    }

    #[test]
    fn block_status_needs_a_selected_context() {
        let status = header(kind::BLOCK_STATUS, NONE, 0, 512);
        assert_eq!(errno(Framing::Simple, status), Some(Errno::Inval));
        assert_eq!(errno(Framing::Structured, status), None);
    }

    #[test]
    fn unknown_types_are_invalid_in_every_framing() {
        for framing in ALL {
            for kind in [8, 9, 0x7fff, 0xffff] {
                assert_eq!(errno(framing, header(kind, NONE, 0, 0)), Some(Errno::Inval));
            }
        }
    }

    #[test]
    fn an_extended_write_has_a_payload_whether_it_says_so_or_not() {
        for flags in [CommandFlags::PAYLOAD_LEN, NONE] {
            let write = header(kind::WRITE, flags, 0, 512);
            let decoded = decode(&write, &options(Framing::Extended)).unwrap();
            assert_eq!(decoded.payload, 512);
            assert!(decoded.command.is_ok());
        }
    }

    #[test]
    fn a_status_of_selected_contexts_has_a_payload_that_fits_them() {
        let status = |framing, length| {
            let header = header(kind::BLOCK_STATUS, CommandFlags::PAYLOAD_LEN, 512, length);
            decode(&header, &options(framing)).unwrap()
        };
        let selected = Command::SelectedStatus { offset: 512, length: 12, req_one: ReqOne::Unset };
        let decoded = status(Framing::Extended, 12);
        assert_eq!(decoded, DecodedRequest { command: Ok(selected), payload: 12 });
        for length in [0, 4, 8, 11, 13, 16, u64::from(MAX_PAYLOAD)] {
            let decoded = status(Framing::Extended, length);
            assert_eq!(u64::from(decoded.payload), length, "it is consumed");
            assert_eq!(decoded.command.unwrap_err().errno, Errno::Inval, "{length}");
        }
        let decoded = status(Framing::Structured, 12);
        assert_eq!((decoded.payload, decoded.command.is_err()), (0, true), "it is not offered");
    }

    #[test]
    fn a_payload_where_none_belongs_is_consumed_and_refused() {
        let read = header(kind::READ, CommandFlags::PAYLOAD_LEN, 0, 512);
        let decoded = decode(&read, &options(Framing::Extended)).unwrap();
        assert_eq!(decoded.payload, 512);
        assert_eq!(decoded.command.unwrap_err().errno, Errno::Inval);
        let write = header(kind::WRITE, CommandFlags::NO_HOLE, 0, 512);
        let decoded = decode(&write, &options(Framing::Simple)).unwrap();
        assert_eq!(decoded.payload, 512);
        assert_eq!(decoded.command.unwrap_err().errno, Errno::Inval);
    }

    #[test]
    fn reads_beyond_the_maximum_fail_politely_and_writes_end_the_connection() {
        let long = u64::from(MAX_PAYLOAD) + 1;
        let read = header(kind::READ, NONE, 0, long);
        assert_eq!(errno(Framing::Simple, read), Some(Errno::Inval));
        assert_eq!(errno(Framing::Structured, read), Some(Errno::Overflow));
        assert_eq!(
            errno(Framing::Extended, header(kind::READ, NONE, 0, 1 << 40)),
            Some(Errno::Overflow)
        );
        let write = header(kind::WRITE, NONE, 0, long);
        assert_eq!(decode(&write, &options(Framing::Simple)), Err(PayloadTooLong(long)));
        assert_eq!(errno(Framing::Simple, header(kind::READ, NONE, 0, long - 1)), None);
    }

    #[test]
    fn effects_may_be_longer_than_any_payload() {
        for kind in [kind::TRIM, kind::CACHE, kind::WRITE_ZEROES, kind::BLOCK_STATUS] {
            assert_eq!(errno(Framing::Extended, header(kind, NONE, 0, 1 << 40)), None);
        }
    }

    #[test]
    fn ranges_beyond_64_bits_are_past_the_end() {
        let past = |kind| errno(Framing::Extended, header(kind, NONE, u64::MAX, 2));
        assert_eq!(past(kind::TRIM), Some(Errno::Inval));
        assert_eq!(past(kind::BLOCK_STATUS), Some(Errno::Inval));
        assert_eq!(past(kind::WRITE_ZEROES), Some(Errno::NoSpc));
    }

    #[test]
    fn a_flush_has_no_range() {
        assert_eq!(errno(Framing::Simple, header(kind::FLUSH, CommandFlags::FUA, 0, 0)), None);
        assert_eq!(errno(Framing::Simple, header(kind::FLUSH, NONE, 0, 1)), Some(Errno::Inval));
        assert_eq!(errno(Framing::Simple, header(kind::FLUSH, NONE, 1, 0)), Some(Errno::Inval));
    }

    proptest! {
        /// The payload's treatment never depends on whether the request makes sense.
        #[test]
        fn any_header_is_decoded_or_ends_the_connection(
            framing in prop::sample::select(ALL.to_vec()),
            (flags, kind) in (any::<u16>(), 0u16..12),
            (offset, length) in (any::<u64>(), prop_oneof![0u64..1 << 26, any::<u64>()]),
        ) {
            let flags = CommandFlags::from_bits_retain(flags);
            let header = header(kind, flags, offset, length);
            let payload = header.payload_length(framing);
            match decode(&header, &options(framing)) {
                Ok(decoded) => {
                    prop_assert_eq!(u64::from(decoded.payload), payload);
                    match decoded.command {
                        Ok(
                            Command::Write { length, .. } | Command::SelectedStatus { length, .. },
                        ) => prop_assert_eq!(length, decoded.payload),
                        Ok(_) => prop_assert_eq!(payload, 0),
                        Err(_) => {}
                    }
                }
                Err(PayloadTooLong(length)) => {
                    prop_assert!(length == payload && length > u64::from(MAX_PAYLOAD));
                }
            }
        }
    }
}
