//! TLS as the command line and the configuration ask for it, and what of that contradicts itself.

use std::path::PathBuf;

use blockhouse_nbd::uri::{Address, NbdUri, Security};
use blockhouse_nbd::{TlsFiles, TlsMode};

use crate::setup::TlsSetup;

/// The options of TLS, by the names that they have for users.
#[derive(Clone, Debug, Default)]
pub struct TlsOptions {
    /// `tls`. Left out: required where there are secrets, otherwise off.
    pub choice: Option<TlsChoice>,
    /// `tls-certificates`: a folder.
    pub certificates: Option<PathBuf>,
    /// `tls-psk`: a file of pre-shared keys.
    pub psk: Option<PathBuf>,
    /// `tls-allow`: pairs of an export and a client that may use it.
    pub allowed: Vec<(String, String)>,
}

/// Whether NBD clients use TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TlsChoice {
    /// They do not.
    Off,
    /// They may.
    Optional,
    /// They must.
    Required,
}

impl TlsOptions {
    /// The TLS setup for sockets of these URIs. `None`: no TLS.
    ///
    /// # Errors
    /// What makes no sense together, in the words of the options.
    pub fn setup(self, uris: &[NbdUri]) -> Result<Option<TlsSetup>, String> {
        let only = addresses(uris, Security::Tls);
        let plain = addresses(uris, Security::Plain);
        if let Some(uri) =
            uris.iter().find(|uri| plain.contains(&uri.address) && only.contains(&uri.address))
        {
            return Err(format!(
                "{uri}: the same socket is named with TLS (nbds) and without (nbd); use one"
            ));
        }
        let files = match (&self.certificates, &self.psk) {
            (Some(_), Some(_)) => return Err("tls-certificates and tls-psk: use one".into()),
            (Some(folder), None) => Some(TlsFiles::Certificates(folder.clone())),
            (None, file) => file.clone().map(TlsFiles::Psk),
        };
        let Some(files) = files.filter(|_| self.choice != Some(TlsChoice::Off)) else {
            return self.check_unused(!only.is_empty()).map(|()| None);
        };
        let mode = match self.choice {
            Some(TlsChoice::Optional) => TlsMode::Optional,
            _ => TlsMode::Required,
        };
        Ok(Some(TlsSetup { mode, files, allowed: self.allowed, only }))
    }

    /// Refuses what makes no sense without TLS.
    fn check_unused(&self, has_tls_uri: bool) -> Result<(), String> {
        let needs = match self.choice {
            _ if has_tls_uri => "an nbds URI",
            Some(TlsChoice::Optional | TlsChoice::Required) => "--tls",
            _ if !self.allowed.is_empty() => "--tls-allow",
            _ => return Ok(()),
        };
        Err(match self.choice {
            Some(TlsChoice::Off) => format!("{needs} needs TLS; leave --tls off out"),
            _ => format!(
                "{needs} needs TLS to be set up: add --tls-certificates DIR or --tls-psk FILE"
            ),
        })
    }
}

/// Reads `EXPORT=NAME`: a client that may use an export.
///
/// # Errors
/// There is no `=`, or no name.
pub fn parse_allowed(text: &str) -> Result<(String, String), String> {
    match text.rsplit_once('=') {
        Some((export, name)) if !name.is_empty() => Ok((export.into(), name.into())),
        _ => Err("say EXPORT=NAME; the empty export is =NAME".into()),
    }
}

fn addresses(uris: &[NbdUri], security: Security) -> Vec<Address> {
    let matching = uris.iter().filter(|uri| uri.security == security);
    matching.map(|uri| uri.address.clone()).collect()
}
