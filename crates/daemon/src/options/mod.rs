//! Values as people write them, on the command line, in the configuration and to the control
//! socket: sizes, limits, rates, thresholds, users, and sockets' modes. Each has one parser, whose
//! errors say what would be right.

pub mod control_socket;
pub mod limit_options;
pub mod limits;
pub mod qcow2_words;
pub mod rate_limits;
pub mod size;
pub mod socket_options;
pub mod switch;
pub(crate) mod text_fields;
pub mod threshold;
pub mod user_options;
