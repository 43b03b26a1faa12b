//! The handshake, fixed newstyle.

use std::io::{Read, Write};

use socket2::Socket;

use super::transmission::{Client, Framing};
use super::{Address, connect};

/// Options of clients.
#[expect(missing_docs, reason = "the names are the protocol\'s own")]
pub mod option {
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const STARTTLS: u32 = 5;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Types of replies to options.
#[expect(missing_docs, reason = "the names are the protocol\'s own")]
pub mod reply {
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    pub const ERR_UNSUP: u32 = 0x8000_0001;
    pub const ERR_INVALID: u32 = 0x8000_0003;
    pub const ERR_UNKNOWN: u32 = 0x8000_0006;
    pub const ERR_TOO_BIG: u32 = 0x8000_0009;
}

const GREETING: &[u8; 16] = b"NBDMAGICIHAVEOPT";
const OPTION_MAGIC: &[u8; 8] = b"IHAVEOPT";
const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Fixed newstyle, no padding after EXPORT_NAME.
const CLIENT_FLAGS: u32 = 3;

/// One reply to an option.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OptionReply {
    /// One of [`reply`].
    pub kind: u32,
    /// What comes with it.
    pub data: Vec<u8>,
}

/// A connection on which greetings were exchanged.
pub struct Greeted(pub Socket);

impl Greeted {
    /// Connects and greets.
    ///
    /// # Panics
    /// When the server does not speak fixed newstyle.
    pub fn new(address: &Address) -> Self {
        let mut socket = connect(address);
        let mut greeting = [0; 18];
        socket.read_exact(&mut greeting).expect("a greeting");
        assert_eq!(&greeting[..16], GREETING);
        assert_eq!(greeting[17] & 1, 1, "fixed newstyle");
        socket.write_all(&CLIENT_FLAGS.to_be_bytes()).expect("the flags are taken");
        Self(socket)
    }

    /// Sends the head of an option that claims to have `length` bytes of data.
    pub fn send_head(&mut self, number: u32, length: u32) -> std::io::Result<()> {
        let head = [&OPTION_MAGIC[..], &number.to_be_bytes(), &length.to_be_bytes()].concat();
        self.0.write_all(&head)
    }

    /// Sends an option and receives its replies up to the last one.
    ///
    /// # Panics
    /// When the server ends the connection.
    pub fn option(&mut self, number: u32, data: &[u8]) -> Vec<OptionReply> {
        self.send_head(number, data.len() as u32).expect("the server listens");
        self.0.write_all(data).expect("the server listens");
        let mut replies = Vec::new();
        loop {
            let reply = self.reply(number);
            let last = reply.kind == reply::ACK || reply.kind >= 1 << 31;
            replies.push(reply);
            if last {
                return replies;
            }
        }
    }

    /// Sends an option and returns the type of its last reply.
    pub fn outcome(&mut self, number: u32, data: &[u8]) -> u32 {
        self.option(number, data).last().expect("there is a last reply").kind
    }

    /// Receives one reply to the option `number`.
    ///
    /// # Panics
    /// When the server ends the connection, or replies to something else.
    pub fn reply(&mut self, number: u32) -> OptionReply {
        let mut head = [0; 20];
        self.0.read_exact(&mut head).expect("a reply to an option");
        assert_eq!(head[..8], REPLY_MAGIC.to_be_bytes());
        let field = |at: usize| u32::from_be_bytes(*head[at..].first_chunk().expect("in the head"));
        assert_eq!(field(8), number, "the reply is to another option");
        let mut data = vec![0; field(16) as usize];
        self.0.read_exact(&mut data).expect("the data of a reply");
        OptionReply { kind: field(12), data }
    }

    /// Agrees on a framing, asks for block status if the framing can carry it, and opens an export.
    ///
    /// # Panics
    /// When the server has no such export.
    pub fn go(mut self, name: &str, framing: Framing) -> Client {
        let agreed = match framing {
            Framing::Simple => reply::ACK,
            Framing::Structured => self.outcome(option::STRUCTURED_REPLY, &[]),
            Framing::Extended => self.outcome(option::EXTENDED_HEADERS, &[]),
        };
        assert_eq!(agreed, reply::ACK, "{framing:?}");
        if framing != Framing::Simple {
            let replies = self.option(option::SET_META_CONTEXT, &allocation_query(name));
            let context = replies.iter().find(|reply| reply.kind == reply::META_CONTEXT);
            assert!(context.is_some(), "base:allocation: {replies:?}");
        }
        let replies = self.option(option::GO, &go_data(name));
        assert_eq!(replies.last().expect("a last reply").kind, reply::ACK, "{replies:?}");
        let export = replies.iter().find(|reply| reply.data.starts_with(&[0, 0])).expect("a size");
        let size = u64::from_be_bytes(*export.data[2..].first_chunk().expect("eight bytes"));
        Client::new(self.0, framing, size)
    }
}

/// The data of INFO and GO that asks for nothing special.
pub fn go_data(name: &str) -> Vec<u8> {
    [&(name.len() as u32).to_be_bytes(), name.as_bytes(), &[0, 0]].concat()
}

fn allocation_query(name: &str) -> Vec<u8> {
    let string = |text: &str| [&(text.len() as u32).to_be_bytes(), text.as_bytes()].concat();
    [string(name), 1u32.to_be_bytes().to_vec(), string("base:allocation")].concat()
}
