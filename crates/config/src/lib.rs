//! Descriptions of disks, limits and servers (layer 7), which the command line, the configuration
//! file, control requests and hand-over share.
//!
//! A value has the same syntax everywhere, and one parser, whose errors say what is valid. This
//! crate opens and binds nothing.
//!
//! - [`disk`], [`limits`], [`server`]: the descriptions
//! - [`file`](mod@file): a TOML file of them; [`setup`]: all that a server is to run
//! - [`offers`]: which images sockets offer; [`export_address`]: where a disk is served
//! - [`control_socket`], [`metrics_address`], [`socket_options`], [`user_options`]: sockets and
//!   users
//! - [`size`], [`switch`], [`threshold`], [`text_fields`]: values
#![forbid(unsafe_code)]

pub mod control_socket;
pub mod disk;
pub mod export_address;
pub mod file;
pub mod limits;
pub mod metrics_address;
pub mod offers;
pub mod server;
pub mod setup;
pub mod size;
pub mod socket_options;
pub mod switch;
pub mod text_fields;
pub mod threshold;
pub mod user_options;
