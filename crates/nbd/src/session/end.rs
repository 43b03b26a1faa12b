//! Why a connection ended.

use std::io;
use std::time::Duration;

use blockhouse_core::Error;

use crate::command::PayloadTooLong;
use crate::proto::request::BadMagic;

/// The action of the client that the server waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Receive its replies.
    Send,
    /// Send the rest of a request.
    Receive,
}

impl Direction {
    /// Both, in the order of their numbers.
    pub const BOTH: [Self; 2] = [Self::Send, Self::Receive];
}

/// Why the transmission phase ended.
#[derive(Debug, thiserror::Error)]
pub enum End {
    /// The client sent `NBD_CMD_DISC`.
    #[error("the client disconnected")]
    Disconnected,
    /// The client closed the connection between two requests.
    #[error("the client closed the connection")]
    Closed,
    /// The client closed the connection in the middle of a request.
    #[error("the connection ended inside of a request")]
    Truncated,
    /// Shutdown was requested, for example because the server or the export ends, or another client
    /// is admitted in place of this one.
    #[error("the server ended it")]
    Drained,
    /// The server requested a pause.
    #[error("the server has paused it")]
    Paused,
    /// The client did not receive its replies, or did not send the rest of a request.
    #[error("the client {} for {limit:?}", match direction {
        Direction::Send => "did not take its replies",
        Direction::Receive => "did not send the rest of a request",
    })]
    Stalled {
        /// The action that the client did not take in time.
        direction: Direction,
        /// The minimum time that the server waited.
        limit: Duration,
    },
    /// The client sent no request.
    #[error("the client asked for nothing for {0:?}")]
    Idle(Duration),
    /// A socket operation failed.
    #[error("the connection failed: {0}")]
    Failed(#[from] io::Error),
    /// ENOMEM for the connection's own memory.
    #[error("{0}")]
    NoMemory(Error),
    /// A request without the magic number: the two ends disagree about where a request starts.
    #[error(transparent)]
    BadMagic(#[from] BadMagic),
    /// A payload that is longer than the announced limit.
    #[error(transparent)]
    PayloadTooLong(#[from] PayloadTooLong),
}

impl End {
    /// The reason for the end if a request was incomplete: `Closed` becomes `Truncated`.
    pub fn inside_request(self) -> Self {
        match self {
            Self::Closed => Self::Truncated,
            other => other,
        }
    }
}
