//! TLS (layer 1): one end of a connection, a server's or a client's, as bytes in and bytes out.
//!
//! Guarantees: nothing here waits, and nothing here knows a socket. OpenSSL does the cryptography:
//! [`TlsSession`] passes received bytes to it from one buffer and collects bytes to send in
//! another; the owner of the socket receives and sends them. Connections have TLS 1.2 or later,
//! with authenticated encryption; none is resumed, renegotiated or compressed. Files of
//! certificates and keys have the names and the form that QEMU, libnbd and nbdkit give them.
#![forbid(unsafe_code)]

mod context;
mod files;
mod pipe;
mod session;

pub use context::{CipherKind, context, use_identity, use_revoked};
pub use files::{TlsError, check_readable, file_error, names_of, read_keys, unfit};
pub use session::{ReadError, SEND_LIMIT, TlsSession};

/// Whether OpenSSL was built from source for this binary. Then it does not use a distribution's
/// folders for certificates.
pub const IS_VENDORED: bool = cfg!(feature = "vendored");
