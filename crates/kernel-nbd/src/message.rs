//! Messages of generic netlink, as bytes (`<linux/netlink.h>`, `<linux/genetlink.h>`). All fields
//! are in the host's byte order.
//!
//! Guarantee: whatever lengths the kernel's bytes contain, nothing outside of them is read, and
//! parsing ends.

/// `NLM_F_REQUEST` and `NLM_F_ACK`.
const REQUEST_WITH_ACK: u16 = 1 | 4;
/// `NLMSG_ERROR`: the end of each request, with its errno or 0.
const ERROR: u16 = 2;
/// `NLA_F_NESTED`, and with `NLA_F_NET_BYTEORDER` the bits of a type that are not its number.
const NESTED: u16 = 1 << 15;
const FLAGS: u16 = NESTED | 1 << 14;
/// Bytes of `struct nlmsghdr`, of `struct genlmsghdr` after it, and of `struct nlattr`.
const HEADER: usize = 16;
const GENERIC: usize = 4;
const ATTRIBUTE: usize = 4;

/// A message to be sent.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    bytes: Vec<u8>,
}

impl Request {
    /// A command of a family, whose version is 1.
    pub(crate) fn new(family: u16, command: u8, sequence: u32) -> Self {
        let mut bytes = vec![0; 4];
        bytes.extend(family.to_ne_bytes());
        bytes.extend(REQUEST_WITH_ACK.to_ne_bytes());
        bytes.extend(sequence.to_ne_bytes());
        // The sender's port may be 0, because the kernel knows the sender by its socket.
        bytes.extend([0; 4]);
        bytes.extend([command, 1, 0, 0]);
        Self { bytes }
    }

    /// Adds an attribute.
    pub(crate) fn attribute(mut self, kind: u16, data: &[u8]) -> Self {
        self.bytes.extend(attribute(kind, data));
        self
    }

    /// Adds an attribute that consists of others ([`attribute`]).
    pub(crate) fn nested(self, kind: u16, attributes: &[u8]) -> Self {
        self.attribute(kind | NESTED, attributes)
    }

    /// The message's bytes, with its length filled in.
    pub(crate) fn into_bytes(mut self) -> Vec<u8> {
        let length = self.bytes.len() as u32;
        self.bytes[..4].copy_from_slice(&length.to_ne_bytes());
        self.bytes
    }
}

/// An attribute as bytes.
///
/// # Panics
/// For more than 64 KiB.
pub(crate) fn attribute(kind: u16, data: &[u8]) -> Vec<u8> {
    let length = u16::try_from(ATTRIBUTE + data.len()).expect("a short attribute");
    let mut bytes = length.to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(data);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Parses attributes into types and data, up to the first incomplete one.
fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(half(bytes, 0)?);
        let kind = half(bytes, 2)? & !FLAGS;
        let data = bytes.get(ATTRIBUTE..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, data))
    })
}

/// The kernel's answer to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// The attributes of a message.
    Message(Vec<(u16, Vec<u8>)>),
    /// The end, with an errno or 0.
    End(i32),
}

/// The replies in a datagram that belong to this request.
pub(crate) fn replies(mut bytes: &[u8], sequence: u32) -> Vec<Reply> {
    let mut found = Vec::new();
    while let (Some(length), Some(kind), Some(number)) =
        (word(bytes, 0), half(bytes, 4), word(bytes, 8))
    {
        let length = length as usize;
        let Some(body) = bytes.get(HEADER..length) else { break };
        if number == sequence {
            found.extend(reply(kind, body));
        }
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    found
}

fn reply(kind: u16, body: &[u8]) -> Option<Reply> {
    if kind == ERROR {
        let code = word(body, 0)? as i32;
        return Some(Reply::End(code.checked_neg().unwrap_or(i32::MAX)));
    }
    let owned = |(kind, data): (u16, &[u8])| (kind, data.to_vec());
    Some(Reply::Message(attributes(body.get(GENERIC..)?).map(owned).collect()))
}

fn half(bytes: &[u8], start: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(start..start + 2)?.try_into().ok()?))
}

fn word(bytes: &[u8], start: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(start..start + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_request_has_its_fields_where_the_kernel_reads_them() {
        let bytes = Request::new(27, 3, 9)
            .attribute(2, b"nbd\0")
            .nested(7, &attribute(1, &5_u32.to_ne_bytes()))
            .into_bytes();
        assert_eq!(bytes.len(), 16 + 4 + 8 + 12);
        assert_eq!(word(&bytes, 0), Some(40));
        assert_eq!((half(&bytes, 4), half(&bytes, 6)), (Some(27), Some(5)));
        assert_eq!((word(&bytes, 8), word(&bytes, 12)), (Some(9), Some(0)));
        assert_eq!(bytes[16..20], [3, 1, 0, 0]);
        assert_eq!((half(&bytes, 20), half(&bytes, 22)), (Some(8), Some(2)));
        assert_eq!((half(&bytes, 28), half(&bytes, 30)), (Some(12), Some(NESTED | 7)));
        let found: Vec<_> = attributes(&bytes[20..]).collect();
        assert_eq!(found[0], (2, &b"nbd\0"[..]));
        assert_eq!(attributes(found[1].1).collect::<Vec<_>>(), [(1, &5_u32.to_ne_bytes()[..])]);
    }

    /// A message of the kernel.
    fn message(kind: u16, sequence: u32, body: &[u8]) -> Vec<u8> {
        let mut bytes = ((HEADER + body.len()) as u32).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend([0; 2]);
        bytes.extend(sequence.to_ne_bytes());
        bytes.extend([0; 4]);
        bytes.extend(body);
        bytes
    }

    #[test]
    fn replies_are_those_of_the_request() {
        let body = [vec![1, 1, 0, 0], attribute(1, &7_u32.to_ne_bytes())].concat();
        let failed = (-17_i32).to_ne_bytes();
        let all =
            [message(27, 4, &body), message(27, 5, &body), message(ERROR, 5, &failed)].concat();
        let expected = [Reply::Message(vec![(1, 7_u32.to_ne_bytes().to_vec())]), Reply::End(17)];
        assert_eq!(replies(&all, 5), expected);
        assert_eq!(replies(&all[..all.len() - 1], 5), expected[..1]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_to_an_end(bytes in proptest::collection::vec(any::<u8>(), 0..200), short in 0_u8..40) {
            let _ = replies(&bytes, 0);
            // Small lengths, of which more lie inside of the bytes.
            let small: Vec<u8> = bytes.iter().map(|byte| byte % (short + 1)).collect();
            let _ = replies(&small, u32::from_ne_bytes([short; 4]));
            prop_assert!(attributes(&small).count() <= small.len());
        }
    }
}
