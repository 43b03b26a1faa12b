//! The NBD protocol, server and client.
#![forbid(unsafe_code)]
