//! The hand-over of a running server to another process: `blockhouse upgrade`, and SIGUSR2.
//!
//! README.md here has the steps, the owner of each resource at each step, and the state after a
//! crash at each step.
//!
//! - [`mod@format`]: all messages on the socket pair
//! - [`channel`]: frames with descriptors
//! - [`source`]: the server that hands over
//! - [`destination`]: the process that takes over
//! - [`frontends`]: conversion of vhost-user-blk front-ends to and from the format
//! - [`fault`]: crashes at chosen steps, for tests

pub mod channel;
pub mod destination;
mod fault;
pub mod format;
mod frontends;
pub mod source;
