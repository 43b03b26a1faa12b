//! TLS for NBD connections: X.509 certificates or pre-shared keys, between the socket and the
//! session.
//!
//! Guarantees: a client is served only after its handshake, with the identity proved in it. Options
//! that were negotiated before the handshake are discarded. TLS sessions are never resumed and
//! never renegotiated, so a credential that a reload revokes is refused on every later connection;
//! the server ends the existing connections of this credential. A refusal is logged as one line
//! that states what is wrong with the client's credentials.
//!
//! `blockhouse-tls` does the cryptography and no I/O; [`TlsChannel`] moves bytes between it and the
//! socket. A connection without TLS has no channel; its additional cost is one test of an `Option`
//! for each system call.

mod channel;
mod credentials;
mod pace;
mod refusal;

use std::path::PathBuf;
use std::sync::Arc;

pub(crate) use blockhouse_tls::SEND_LIMIT;
pub use blockhouse_tls::TlsError;
pub(crate) use channel::{AcceptError, TlsChannel};
pub(crate) use credentials::Credential;
pub use credentials::TlsServer;

/// Location of a server's secrets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TlsFiles {
    /// A folder with `server-cert.pem` and `server-key.pem`. With `ca-cert.pem`, clients must show
    /// a certificate that this authority has signed. With `ca-crl.pem`, the certificate must not be
    /// in this revocation list. The names are QEMU's.
    Certificates(PathBuf),
    /// A file with a line `IDENTITY:KEY` for each client, the key in hexadecimal digits, as psktool
    /// writes it.
    Psk(PathBuf),
}

/// Whether clients must use TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsMode {
    /// Clients may use TLS. A client without TLS cannot see exports that have a list of allowed
    /// clients.
    Optional,
    /// Every client must use TLS.
    Required,
}

/// TLS at a socket.
#[derive(Clone, Debug)]
pub struct SocketTls {
    /// The secrets, and the clients that each export admits.
    pub server: Arc<TlsServer>,
    /// Whether clients must use TLS.
    pub mode: TlsMode,
}

/// The identity that a client has shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientIdentity {
    /// The common names and DNS names of the client's certificate, or its PSK identity. Empty if
    /// the server requests no credential.
    pub names: Vec<String>,
}
