//! The reason why a message is refused, for the log.

use std::fmt;

/// The reason of a refusal.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(String);

/// The outcome of a message.
pub type Result<T, E = Refusal> = std::result::Result<T, E>;

/// A refusal with this reason.
pub fn refused(why: impl fmt::Display) -> Refusal {
    Refusal(why.to_string())
}
