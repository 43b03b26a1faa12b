//! The server as a whole: its start, its orderly end, an upgrade, and the order of each.

pub(crate) mod run;
pub(crate) mod stopper;
#[doc(hidden)]
pub mod strangers;
pub(crate) mod warnings;
