//! The hand-over of a running server to another process: `blockhouse upgrade`, and SIGUSR2.
//!
//! README.md here has the steps, the owner of each resource at each step, and the state after a
//! crash there.
//!
//! - [`mod@format`]: all that crosses the socket pair
//! - [`channel`]: frames with descriptors
//! - [`source`]: the server that hands over
//! - [`destination`]: the process that takes over
//! - [`frontends`]: front-ends of vhost-user-blk devices as the format has them
//! - [`fault`]: deaths at chosen steps, for tests

pub mod channel;
pub mod destination;
mod fault;
pub mod format;
mod frontends;
pub mod source;
