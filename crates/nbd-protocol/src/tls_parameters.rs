//! The TLS parameters of a client's URI, as the NBD URI standard and libnbd spell them.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use percent_encoding::percent_decode_str;

/// The credentials by which a client and its server authenticate each other. By default the server
/// shows a certificate of an authority that this host trusts, and the client shows none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsParameters {
    user: Option<String>,
    certificates: Option<PathBuf>,
    psk_file: Option<PathBuf>,
    hostname: Option<String>,
    verify_peer: Option<bool>,
}

impl TlsParameters {
    /// Parses the URI's user name and its `tls-` parameters. All values are percent-encoded.
    ///
    /// # Errors
    /// A parameter is unknown, is given twice, has an invalid value, or contradicts another.
    pub(crate) fn parse(user: &str, parameters: &[(&str, &str)]) -> Result<Self, String> {
        let mut all = Self::default();
        if !user.is_empty() {
            if user.contains(':') {
                return Err("a password is not taken; keys are in a file: tls-psk-file=FILE".into());
            }
            all.user = Some(text("the user name", user)?);
        }
        for (key, value) in parameters {
            let is_first = match *key {
                "tls-certificates" => all.certificates.replace(path(key, value)?).is_none(),
                "tls-psk-file" => all.psk_file.replace(path(key, value)?).is_none(),
                "tls-hostname" => all.hostname.replace(text(key, value)?).is_none(),
                "tls-verify-peer" => all.verify_peer.replace(truth(key, value)?).is_none(),
                _ => return Err(format!("the parameter {key} is unknown")),
            };
            if !is_first {
                return Err(format!("the parameter {key} is given twice"));
            }
        }
        all.check().map(|()| all)
    }

    fn check(&self) -> Result<(), String> {
        if self.psk_file.is_some() {
            if self.certificates.is_some() {
                return Err("tls-certificates and tls-psk-file: use one".into());
            }
            if self.user.is_none() {
                return Err("a key has an identity; write nbds://IDENTITY@ before the host".into());
            }
            if self.hostname.is_some() || self.verify_peer.is_some() {
                let key = if self.hostname.is_some() { "tls-hostname" } else { "tls-verify-peer" };
                return Err(format!("{key} is for certificates, and tls-psk-file has none"));
            }
        } else if self.user.is_some() && self.certificates.is_none() {
            return Err("a user name means a key in a file; add tls-psk-file=FILE".into());
        }
        Ok(())
    }

    /// A folder with `ca-cert.pem`, and with `client-cert.pem` and `client-key.pem` if the client
    /// shows a certificate.
    pub fn certificates(&self) -> Option<&Path> {
        self.certificates.as_deref()
    }

    /// The client's identity, and the file that has its pre-shared key.
    pub fn psk(&self) -> Option<(&str, &Path)> {
        Some((self.user.as_deref()?, self.psk_file.as_deref()?))
    }

    /// The name that the server's certificate must have, if that is not the host's name.
    pub fn hostname(&self) -> Option<&str> {
        self.hostname.as_deref()
    }

    /// Whether the server's certificate is verified.
    pub fn verifies_peer(&self) -> bool {
        self.verify_peer.unwrap_or(true)
    }

    /// The file or folder of this host that has the credentials.
    pub fn local_path(&self) -> Option<&Path> {
        self.certificates.as_deref().or(self.psk_file.as_deref())
    }
}

fn text(what: &str, value: &str) -> Result<String, String> {
    let value = percent_decode_str(value).decode_utf8();
    let value = value.map_err(|_| format!("{what} is not UTF-8"))?.into_owned();
    check(what, value.as_bytes()).map(|()| value)
}

fn path(key: &str, value: &str) -> Result<PathBuf, String> {
    let bytes: Vec<u8> = percent_decode_str(value).collect();
    check(key, &bytes)?;
    Ok(PathBuf::from(OsString::from_vec(bytes)))
}

fn check(what: &str, value: &[u8]) -> Result<(), String> {
    if value.is_empty() {
        return Err(format!("{what} is empty"));
    }
    if value.contains(&0) { Err(format!("{what} contains NUL")) } else { Ok(()) }
}

/// Parses a boolean as libnbd does.
fn truth(key: &str, value: &str) -> Result<bool, String> {
    match value.to_ascii_lowercase().as_str() {
        "1" | "true" | "t" | "yes" | "y" | "on" => Ok(true),
        "0" | "false" | "f" | "no" | "n" | "off" => Ok(false),
        _ => Err(format!("the parameter {key} is true or false")),
    }
}
