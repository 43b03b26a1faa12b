//! Disks, limits and servers as people describe them (layer 5): one description each, which
//! arguments, the configuration, requests and hand-over have in common.
//!
//! Values are written in the same words everywhere. Each has one parser, whose errors say what
//! would be right. Nothing here opens or binds anything.
//!
//! - [`disk`], [`limits`], [`server`]: the descriptions
//! - [`file`](mod@file): a TOML file of them; [`setup`]: what is to run, as one whole
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
