//! TLS (layer 1): one end of a connection, a server's or a client's, as bytes in and bytes out.
//!
//! Guarantees: nothing here waits, and nothing here knows a socket. OpenSSL does the cryptography:
//! [`TlsSession`] gives it bytes from a buffer and takes bytes into another, and the owner of the
//! socket moves these. Connections have TLS 1.2 or later, with authenticated encryption; none is
//! resumed, renegotiated or compressed. Files of certificates and keys have the names and the form
//! that QEMU, libnbd and nbdkit give them.
#![forbid(unsafe_code)]

mod context;
mod files;
mod pipe;
mod session;

pub use context::{CipherKind, context, use_identity, use_revoked};
pub use files::{TlsError, check_readable, file_error, names_of, read_keys, unfit};
pub use session::{ReadError, SEND_LIMIT, TlsSession};

/// Whether OpenSSL was built from source for this binary, so that it knows no distribution's
/// folders.
pub const IS_VENDORED: bool = cfg!(feature = "vendored");
