//! Objects as QEMU's users name them: secrets (`--object secret,id=ID,file=FILE`), and TLS
//! ([`tls_object`]).
//!
//! Guarantee: a key never has to be on the command line, where every user of the host can read it.
//! Under the names of QEMU's tools `data=KEY` is accepted as in QEMU, because the caller has
//! already exposed the key.

use std::os::fd::IntoRawFd;
use std::path::PathBuf;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use blockhouse_daemon::key_memory;

use crate::create_options::split;
use crate::{called_as, tls_object};

/// An object of a command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Object {
    /// A key.
    Secret(SecretObject),
    /// Credentials, which [`tls_object`] keeps.
    Tls,
}

/// A secret with a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecretObject {
    /// The name in options.
    pub id: String,
    /// The file whose whole content is the secret.
    pub file: PathBuf,
}

/// Parses `secret,id=ID,file=FILE[,format=raw]`, or the credentials of TLS; a comma in a value is
/// written twice.
///
/// # Errors
/// The text to type instead.
pub fn parse(text: &str) -> Result<Object, String> {
    let mut parts = split(text).into_iter();
    let kind = parts.next().unwrap_or_default();
    match kind.strip_prefix("qom-type=").unwrap_or(&kind) {
        "secret" => secret(parts).map(Object::Secret),
        kind @ ("tls-creds-x509" | "tls-creds-psk") => {
            tls_object::keep(kind, parts).map(|()| Object::Tls)
        }
        _ => {
            Err("objects are secrets (secret,id=ID,file=FILE), tls-creds-x509 and tls-creds-psk"
                .into())
        }
    }
}

fn secret(parts: impl Iterator<Item = String>) -> Result<SecretObject, String> {
    let (mut id, mut file, mut data, mut is_base64) = (None, None, None, false);
    for part in parts {
        match part.split_once('=') {
            Some(("id", value)) => id = Some(value.to_owned()),
            Some(("file", value)) => file = Some(PathBuf::from(value)),
            Some(("format", "raw")) => {}
            Some(("format", "base64")) if called_as::tool().is_some() => is_base64 = true,
            Some(("format", _)) => {
                return Err("a secret is the file's bytes as they are (format=raw); decode it into another file \
                            ('base64 -d')"
                    .into());
            }
            Some(("data", key)) if called_as::tool().is_some() => data = Some(key.to_owned()),
            Some(("data", _)) => {
                return Err("a key on the command line can be read by every user of this host; put it into a file that \
                            only you can read, and say secret,id=ID,file=FILE"
                    .into());
            }
            _ => return Err(format!("'{part}' is not understood; use secret,id=ID,file=FILE")),
        }
    }
    if let (true, Some(path)) = (is_base64, &file) {
        let read = std::fs::read_to_string(path);
        let read = read.map_err(|error| format!("{}: cannot read: {error}", path.display()))?;
        data = Some(read);
    }
    if let Some(data) = data {
        file = Some(if is_base64 {
            in_memory(&decoded(&data)?)?
        } else {
            in_memory(data.as_bytes())?
        });
    }
    match (id, file) {
        (Some(id), Some(file)) if !id.is_empty() => Ok(SecretObject { id, file }),
        _ => Err("a secret has a name and a file: secret,id=ID,file=FILE".into()),
    }
}

/// The bytes of a key in base64, which may have line feeds.
fn decoded(text: &str) -> Result<Vec<u8>, String> {
    let text: String = text.split_whitespace().collect();
    STANDARD.decode(text).map_err(|error| format!("the key is not in base64: {error}"))
}

/// A file in memory that contains the key and has no name. Returns its path, which is valid while
/// the process runs.
fn in_memory(key: &[u8]) -> Result<PathBuf, String> {
    let kept = key_memory::keep(key);
    let (path, memory) = kept.map_err(|error| format!("the key cannot be kept: {error}"))?;
    // The file stays open as long as the process runs.
    let _ = memory.into_raw_fd();
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_files_with_names() {
        let secret = parse("secret,id=key,file=a,,b,format=raw").unwrap();
        let expected = SecretObject { id: "key".into(), file: "a,b".into() };
        assert_eq!(secret, Object::Secret(expected));
        for (text, said) in [
            ("secret,id=key,data=word", "every user"),
            ("secret,id=key,file=f,format=base64", "base64 -d"),
            ("secret,file=f", "id=ID"),
            ("secret,id=key", "file=FILE"),
            ("secret,id=key,file=f,keyid=master", "keyid"),
            ("tls-creds-x509,id=t", "dir=DIR"),
            ("iothread,id=t", "secrets"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}
