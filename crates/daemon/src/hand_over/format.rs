//! What crosses the socket pair of a hand-over: all of it is told here.
//!
//! A frame is a header of 32 bytes, one byte for each batch of descriptors, a message as JSON, and bytes:
//!
//! | offset | length | contents (integers are little-endian) |
//! | --- | --- | --- |
//! | 0 | 8 | `BHANDOVR` |
//! | 8 | 4 | the version of the format: [`VERSION`] |
//! | 12 | 4 | how many descriptors come with the frame |
//! | 16 | 8 | how many bytes of JSON |
//! | 24 | 8 | how many bytes after it |
//!
//! After the header come the descriptors (`SCM_RIGHTS`), in batches of up to [`BATCH`], each with one byte of any
//! value. Then the JSON, then the bytes. The header is the same in all versions, so that each can refuse another. A
//! change of anything else is another version: fields are never ignored and have no defaults. A test holds the
//! frames of each version as bytes.
//!
//! Order of the descriptors. [`Message::Offer`]: for each file of each image the file, then its second open file for the
//! last block and the one that is flushed, as far as it has them; for each socket the socket, then its file (`O_PATH`) if
//! it has one; the same for the control socket. [`Message::Yours`]: one for each connection.

use blockhouse_nbd::handshake::{BlockStatusState, NegotiatedOptions};
use blockhouse_nbd::proto::Framing;
use serde::{Deserialize, Serialize};

/// What a frame begins with.
pub const MAGIC: [u8; 8] = *b"BHANDOVR";
/// The version of the format.
pub const VERSION: u32 = 1;
/// Bytes of a header.
pub const HEADER_BYTES: usize = 32;
/// Descriptors that come together: fewer than the kernel takes (`SCM_MAX_FD`, 253).
pub const BATCH: usize = 128;

/// A message; the order is Offer, Ready or Refused, Yours, Mine or Refused.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Message {
    /// The source has this, and goes on to serve it.
    Offer(Offer),
    /// The destination can take it, and has its loops.
    Ready,
    /// The destination cannot take over, changes nothing, and ends.
    Refused {
        /// Why, in one line.
        why: String,
    },
    /// The source executes nothing any more. The destination may take over.
    Yours(Yours),
    /// The destination owns images and connections from now on.
    Mine,
}

/// What the source serves.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Offer {
    /// The images, in the order of the command line.
    pub images: Vec<Image>,
    /// The listening sockets of NBD clients.
    pub sockets: Vec<Socket>,
    /// The control socket: whether its file is to be removed at the end.
    pub control: Option<Control>,
}

/// An image with all files of its chain, from the top.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Image {
    /// The files: of each image of the chain the image, then its data file if it has one.
    pub files: Vec<File>,
}

/// A file.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct File {
    /// The path by which it was opened.
    pub path: String,
    /// Whether it is open a second time, for the last block.
    pub has_tail: bool,
    /// Whether it is open once more, to be flushed.
    pub has_flushed: bool,
}

/// A listening socket.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Socket {
    /// Where it listens.
    pub address: Address,
    /// Whether its file is to be removed at the end.
    pub has_file: bool,
    /// What its clients find: names, and the images' places on the command line.
    pub exports: Vec<(String, usize)>,
}

/// The control socket.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Control {
    /// Where it listens.
    pub address: Address,
    /// Whether its file is to be removed at the end.
    pub has_file: bool,
}

/// The address of a socket.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Address {
    /// A Unix socket: the bytes of its path.
    Unix(Vec<u8>),
    /// TCP.
    Tcp {
        /// The host, as it was named.
        host: String,
        /// The port, never 0.
        port: u16,
    },
}

/// What the source stopped to serve.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Yours {
    /// For each image the errno of the failed flush that is remembered, of the image and of its data file.
    pub flush_failures: Vec<[Option<i32>; 2]>,
    /// The connections that have paused.
    pub connections: Vec<Connection>,
}

/// A connection. Its bytes are those of the frame, after the bytes of the connections before it.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Connection {
    /// The place of its listening socket.
    pub socket: usize,
    /// The canonical name of its export.
    pub export: String,
    /// How requests and replies are framed.
    pub framing: FramingName,
    /// Whether `base:allocation` was negotiated.
    pub block_status: bool,
    /// Whether it has ever sent a request.
    pub is_used: bool,
    /// Bytes that were received, and belong to no request that was executed.
    pub received: u64,
}

/// A framing of NBD.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FramingName {
    /// Compact requests, simple replies.
    Simple,
    /// Compact requests, structured replies.
    Structured,
    /// Extended requests and replies.
    Extended,
}

impl Connection {
    /// What the handshake agreed on.
    pub fn options(&self) -> NegotiatedOptions {
        NegotiatedOptions {
            export: self.export.clone(),
            framing: match self.framing {
                FramingName::Simple => Framing::Simple,
                FramingName::Structured => Framing::Structured,
                FramingName::Extended => Framing::Extended,
            },
            block_status: match self.block_status {
                true => BlockStatusState::Negotiated,
                false => BlockStatusState::NotNegotiated,
            },
        }
    }
}

impl From<Framing> for FramingName {
    fn from(framing: Framing) -> Self {
        match framing {
            Framing::Simple => Self::Simple,
            Framing::Structured => Self::Structured,
            Framing::Extended => Self::Extended,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer() -> Message {
        let file = |path: &str, has_tail| File { path: path.into(), has_tail, has_flushed: false };
        Message::Offer(Offer {
            images: vec![Image { files: vec![file("a.qcow2", true), file("base", false)] }],
            sockets: vec![Socket {
                address: Address::Tcp { host: "::1".into(), port: 10809 },
                has_file: false,
                exports: vec![("disk".into(), 0)],
            }],
            control: Some(Control { address: Address::Unix(b"s".to_vec()), has_file: true }),
        })
    }

    fn yours() -> Message {
        let connection = Connection {
            socket: 0,
            export: "disk".into(),
            framing: FramingName::Structured,
            block_status: true,
            is_used: true,
            received: 28,
        };
        Message::Yours(Yours {
            flush_failures: vec![[Some(5), None]],
            connections: vec![connection],
        })
    }

    /// Another version of the program reads exactly this: whoever changes it raises [`VERSION`], and keeps these.
    #[test]
    fn version_1_is_written_and_read_as_it_always_was() {
        assert_eq!(VERSION, 1);
        let texts = [
            (
                offer(),
                r#"{"offer":{"images":[{"files":[{"path":"a.qcow2","has-tail":true,"has-flushed":false},{"path":"base","has-tail":false,"has-flushed":false}]}],"sockets":[{"address":{"tcp":{"host":"::1","port":10809}},"has-file":false,"exports":[["disk",0]]}],"control":{"address":{"unix":[115]},"has-file":true}}}"#,
            ),
            (Message::Ready, r#""ready""#),
            (Message::Refused { why: "no".into() }, r#"{"refused":{"why":"no"}}"#),
            (
                yours(),
                r#"{"yours":{"flush-failures":[[5,null]],"connections":[{"socket":0,"export":"disk","framing":"structured","block-status":true,"is-used":true,"received":28}]}}"#,
            ),
            (Message::Mine, r#""mine""#),
        ];
        for (message, text) in texts {
            assert_eq!(serde_json::to_string(&message).expect("plain values"), text);
            assert_eq!(serde_json::from_str::<Message>(text).expect(text), message);
        }
    }

    #[test]
    fn what_is_not_known_is_refused() {
        for text in [r#"{"refused":{"why":"no","x":1}}"#, r#"{"refused":{}}"#, r#""soon""#] {
            assert!(serde_json::from_str::<Message>(text).is_err(), "{text}");
        }
    }
}
