//! The common settings of servers' and clients' contexts: versions, ciphers, certificates and
//! revocation lists.

use std::io;
use std::path::Path;

use openssl::ssl::{
    SslContext, SslContextBuilder, SslFiletype, SslMethod, SslMode, SslOptions,
    SslSessionCacheMode, SslVersion,
};
use openssl::x509::store::{X509Lookup, X509StoreBuilderRef};
use openssl::x509::verify::X509VerifyFlags;

use crate::files::{TlsError, check_readable, unfit};

/// The suites of TLS 1.3, the cheapest first.
const SUITES: &str = "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";
/// The suites of TLS 1.2 with certificates: with forward secrecy and authenticated encryption.
const CERTIFICATE_CIPHERS: &str = "ECDHE+AESGCM:ECDHE+CHACHA20";
/// The suites of TLS 1.2 with pre-shared keys.
const PSK_CIPHERS: &str = "kECDHEPSK+CHACHA20:kPSK+AESGCM:kPSK+CHACHA20";

/// The credentials by which the two sides authenticate each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CipherKind {
    /// X.509 certificates.
    Certificates,
    /// Pre-shared keys.
    Psk,
}

/// A context without secrets, of `SslMethod::tls_server` or `SslMethod::tls_client`: TLS 1.2 or
/// later, no renegotiation, no resumption, no compression.
///
/// # Errors
/// OpenSSL cannot be set up.
pub fn context(method: SslMethod, kind: CipherKind) -> Result<SslContextBuilder, TlsError> {
    let mut builder = SslContext::builder(method)?;
    builder.set_min_proto_version(Some(SslVersion::TLS1_2))?;
    builder.set_options(
        SslOptions::NO_RENEGOTIATION
            | SslOptions::NO_TICKET
            | SslOptions::NO_COMPRESSION
            | SslOptions::CIPHER_SERVER_PREFERENCE,
    );
    // A resumed session would admit a client whose credential was revoked meanwhile.
    builder.set_session_cache_mode(SslSessionCacheMode::OFF);
    builder.set_mode(SslMode::ACCEPT_MOVING_WRITE_BUFFER);
    builder.set_ciphersuites(SUITES)?;
    builder.set_cipher_list(match kind {
        CipherKind::Certificates => CERTIFICATE_CIPHERS,
        CipherKind::Psk => PSK_CIPHERS,
    })?;
    Ok(builder)
}

/// Sets the credentials of this side: a certificate with its chain up to the authority, and its
/// key.
///
/// # Errors
/// A file cannot be read or is not in PEM, or the key does not match the certificate.
pub fn use_identity(
    builder: &mut SslContextBuilder,
    certificate: &Path,
    key: &Path,
) -> Result<(), TlsError> {
    check_readable(certificate)?;
    builder
        .set_certificate_chain_file(certificate)
        .map_err(unfit(certificate, "is no certificate in PEM"))?;
    check_readable(key)?;
    builder
        .set_private_key_file(key, SslFiletype::PEM)
        .map_err(unfit(key, "is no private key in PEM"))?;
    builder.check_private_key().map_err(unfit(key, "is not the key of the certificate beside it"))
}

/// Refuses the certificates in the file `revoked`, a revocation list, if the file exists. Returns
/// whether the file exists.
///
/// # Errors
/// The file cannot be read or is not in PEM.
pub fn use_revoked(store: &mut X509StoreBuilderRef, revoked: &Path) -> Result<bool, TlsError> {
    // A file that exists and cannot be read is an error below: it must not admit every certificate.
    if revoked.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
        return Ok(false);
    }
    store.set_flags(X509VerifyFlags::CRL_CHECK)?;
    store
        .add_lookup(X509Lookup::file())?
        .load_crl_file(revoked, SslFiletype::PEM)
        .map_err(unfit(revoked, "is no list of revoked certificates in PEM"))?;
    Ok(true)
}
