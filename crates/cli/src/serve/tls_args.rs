//! The options of TLS.

use std::path::PathBuf;

use anyhow::Result;
use blockhouse_config::server::{ServerConfig, TlsChoice, parse_allowed};

use crate::tls_object;

/// TLS for NBD clients (docs/security.md).
#[derive(clap::Args)]
pub struct TlsArgs {
    /// Whether NBD clients use TLS: off, optional, or required. Left out: required with
    /// --tls-certificates or --tls-psk, otherwise off. A socket of an nbds:// URI requires it
    /// in any case.
    #[arg(long, value_name = "MODE")]
    tls: Option<Mode>,
    /// A folder with server-cert.pem and server-key.pem. With ca-cert.pem clients must show a
    /// certificate that it has signed, and with ca-crl.pem one that is not revoked. The names
    /// are those of QEMU and nbdkit. SIGHUP reads the files again.
    #[arg(long, value_name = "DIR", conflicts_with = "tls_psk")]
    tls_certificates: Option<PathBuf>,
    /// A file of pre-shared keys, with a line IDENTITY:HEXKEY for each client; psktool makes it.
    /// SIGHUP reads it again.
    #[arg(long, value_name = "FILE")]
    tls_psk: Option<PathBuf>,
    /// Let only this client use an export: by a name in its certificate (the common name, or a DNS
    /// name), or by its PSK identity. May be repeated, for more clients and exports. An export
    /// without this option is for all clients. An export with it is hidden from clients without
    /// TLS.
    #[arg(long, value_name = "EXPORT=NAME", value_parser = parse_allowed)]
    tls_allow: Vec<(String, String)>,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Mode {
    Off,
    Optional,
    Required,
}

impl TlsArgs {
    /// Requires TLS, with the certificates or keys of the object of this name.
    ///
    /// # Errors
    /// As [`tls_object::of_server`].
    pub fn use_object(&mut self, id: &str) -> Result<()> {
        let (certificates, keys) = tls_object::of_server(id)?;
        self.tls_certificates = certificates.map(Into::into);
        self.tls_psk = keys.map(Into::into);
        Ok(())
    }

    /// The server's configuration with these options.
    pub fn add_to(&self, server: ServerConfig) -> ServerConfig {
        ServerConfig {
            tls: self.tls.map(|mode| match mode {
                Mode::Off => TlsChoice::Off,
                Mode::Optional => TlsChoice::Optional,
                Mode::Required => TlsChoice::Required,
            }),
            tls_certificates: self.tls_certificates.clone(),
            tls_psk: self.tls_psk.clone(),
            tls_allow: self.tls_allow.clone(),
            ..server
        }
    }
}
