//! The process and its service manager: threads with event loops, signals, the watchdog, the pid
//! file, kept and passed sockets.

pub(crate) mod blocking;
pub(crate) mod clients;
pub mod kept_sockets;
pub mod key_memory;
pub mod passed_sockets;
pub(crate) mod pid_file;
pub(crate) mod service_manager;
pub(crate) mod stdin;
pub mod stop_request;
pub(crate) mod stopping_notice;
pub(crate) mod watchdog;
pub(crate) mod workers;
