//! The options of TLS, and what of them contradicts itself.

use std::path::PathBuf;

use blockhouse_daemon::setup::TlsSetup;
use blockhouse_nbd::uri::{Address, NbdUri, Security};
use blockhouse_nbd::{TlsFiles, TlsMode};

/// TLS for NBD clients (docs/security.md).
#[derive(clap::Args)]
pub struct TlsArgs {
    /// Whether NBD clients use TLS: off, optional, or required. Left out: required with --tls-certificates or
    /// --tls-psk, otherwise off. A socket of an nbds:// URI requires it in any case.
    #[arg(long, value_name = "MODE")]
    tls: Option<Mode>,
    /// A folder with server-cert.pem and server-key.pem. With ca-cert.pem clients must show a certificate that it has
    /// signed, and with ca-crl.pem one that is not revoked. The names are those of QEMU and nbdkit. SIGHUP reads the
    /// files again.
    #[arg(long, value_name = "DIR", conflicts_with = "tls_psk")]
    tls_certificates: Option<PathBuf>,
    /// A file of pre-shared keys, with a line IDENTITY:HEXKEY for each client; psktool makes it. SIGHUP reads it again.
    #[arg(long, value_name = "FILE")]
    tls_psk: Option<PathBuf>,
    /// Let only this client use an export: by a name in its certificate (the common name, or a DNS name), or by its
    /// PSK identity. May be repeated, for more clients and exports. An export without any such line is for all
    /// clients. Clients without TLS do not find one with such a line.
    #[arg(long, value_name = "EXPORT=NAME", value_parser = parse_allowed)]
    tls_allow: Vec<(String, String)>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Mode {
    Off,
    Optional,
    Required,
}

fn parse_allowed(text: &str) -> Result<(String, String), String> {
    match text.rsplit_once('=') {
        Some((export, name)) if !name.is_empty() => Ok((export.into(), name.into())),
        _ => Err("say EXPORT=NAME; the empty export is =NAME".into()),
    }
}

impl TlsArgs {
    /// What is set up, for sockets of these URIs.
    ///
    /// # Errors
    /// What makes no sense together.
    pub fn setup(&self, uris: &[NbdUri]) -> Result<Option<TlsSetup>, String> {
        let only = addresses(uris, Security::Tls);
        let plain = addresses(uris, Security::Plain);
        if let Some(uri) =
            uris.iter().find(|uri| plain.contains(&uri.address) && only.contains(&uri.address))
        {
            return Err(format!(
                "--nbd {uri}: the same socket is named with TLS (nbds) and without (nbd); use one"
            ));
        }
        let files = match (&self.tls_certificates, &self.tls_psk) {
            (Some(folder), _) => Some(TlsFiles::Certificates(folder.clone())),
            (None, file) => file.clone().map(TlsFiles::Psk),
        };
        let off = self.tls == Some(Mode::Off);
        let Some(files) = files.filter(|_| !off) else {
            let needs = match (&only[..], self.tls) {
                ([_, ..], _) => "an nbds URI",
                (_, Some(Mode::Optional | Mode::Required)) => "--tls",
                _ if !self.tls_allow.is_empty() => "--tls-allow",
                _ => return Ok(None),
            };
            return Err(match off {
                true => format!("{needs} needs TLS; leave --tls off out"),
                false => format!(
                    "{needs} needs TLS to be set up: add --tls-certificates DIR or --tls-psk FILE"
                ),
            });
        };
        let mode = match self.tls {
            Some(Mode::Optional) => TlsMode::Optional,
            _ => TlsMode::Required,
        };
        Ok(Some(TlsSetup { mode, files, allowed: self.tls_allow.clone(), only }))
    }
}

fn addresses(uris: &[NbdUri], security: Security) -> Vec<Address> {
    let matching = uris.iter().filter(|uri| uri.security == security);
    matching.map(|uri| uri.address.clone()).collect()
}
