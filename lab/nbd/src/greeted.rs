//! A connection in the handshake, for tests: it sends any bytes, and panics if the server breaks
//! the protocol.

use std::io::{Read, Write};
use std::path::Path;

use socket2::Socket;

use crate::client::Client;
use crate::handshake::{self, Export, OptionReply, allocation_query, go_data};
use crate::protocol::{Framing, option, reply};
use crate::socket::{Address, connect};

/// Fixed newstyle, no padding after EXPORT_NAME.
const CLIENT_FLAGS: u32 = 3;

/// A connection on which greetings were exchanged.
pub struct Greeted<S = Socket>(pub S);

impl Greeted {
    /// Connects and greets.
    ///
    /// # Panics
    /// When the server does not speak fixed newstyle.
    pub fn new(address: &Address) -> Self {
        Self::over(connect(address))
    }
}

impl<S: Read + Write> Greeted<S> {
    /// Greets on a new connection.
    ///
    /// # Panics
    /// When the server does not speak fixed newstyle.
    pub fn over(mut socket: S) -> Self {
        handshake::greet(&mut socket, CLIENT_FLAGS).expect("a greeting");
        Self(socket)
    }

    /// Sends the head of an option that claims to have `length` bytes of data.
    pub fn send_head(&mut self, number: u32, length: u32) -> std::io::Result<()> {
        self.0.write_all(&handshake::option_head(number, length))
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
            let last = reply.is_last();
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
        handshake::read_option_reply(&mut self.0, number).expect("a reply to the option")
    }

    /// Negotiates a framing, asks for block status if the framing can carry it, and opens an
    /// export.
    ///
    /// # Panics
    /// When the server has no such export.
    pub fn go(mut self, name: &str, framing: Framing) -> Client<S> {
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
        let export = replies.iter().find_map(|reply| Export::parse(&reply.data)).expect("a size");
        Client::new(self.0, framing, export)
    }
}

impl Client {
    /// Opens the export of this name at a Unix socket, with simple replies.
    pub fn at(socket: impl AsRef<Path>, export: &str) -> Self {
        Greeted::new(&Address::Unix(socket.as_ref().to_owned())).go(export, Framing::Simple)
    }

    /// Opens the default export with simple replies.
    pub fn open(address: &Address) -> Self {
        Self::open_with(address, Framing::Simple)
    }

    /// Opens the default export.
    pub fn open_with(address: &Address, framing: Framing) -> Self {
        Greeted::new(address).go("", framing)
    }
}
