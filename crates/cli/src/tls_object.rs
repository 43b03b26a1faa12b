//! TLS in QEMU's syntax: `--object tls-creds-x509,id=ID,dir=DIR` or `tls-creds-psk,...`, and
//! `tls-creds=ID` where the object is used.
//!
//! The objects of a command line are global in the process, because the options of images name
//! them, and many places parse these options.

use std::path::Path;
use std::sync::Mutex;

use anyhow::{Result, anyhow, bail};
use blockhouse_images::{ClientTls, ClientTlsKind as Kind, QemuTls};

static OBJECTS: Mutex<Vec<TlsObject>> = Mutex::new(Vec::new());

/// The credentials of a client or a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsObject {
    id: String,
    is_of_client: bool,
    tls: ClientTls,
}

/// Parses the options that follow the object's type, and stores the object.
///
/// # Errors
/// The option that is not understood or missing.
pub fn keep(kind: &str, options: impl Iterator<Item = String>) -> Result<(), String> {
    let object = parse(kind, options)?;
    OBJECTS.lock().expect("no thread panics with it").push(object);
    Ok(())
}

fn parse(kind: &str, options: impl Iterator<Item = String>) -> Result<TlsObject, String> {
    let is_psk = kind == "tls-creds-psk";
    let (mut id, mut folder, mut user) = (None, None, ClientTls::DEFAULT_USER.to_owned());
    let (mut is_of_client, mut verifies_peer) = (true, true);
    for option in options {
        match option.split_once('=') {
            Some(("id", value)) => id = Some(value.to_owned()),
            Some(("dir", value)) => folder = Some(value.to_owned()),
            Some(("endpoint", "client")) => is_of_client = true,
            Some(("endpoint", "server")) => is_of_client = false,
            Some(("username", value)) if is_psk => value.clone_into(&mut user),
            Some(("verify-peer", "on" | "yes" | "true")) => verifies_peer = true,
            Some(("verify-peer", "off" | "no" | "false")) if !is_psk => verifies_peer = false,
            Some(("sanity-check", _)) => {}
            _ => {
                return Err(format!(
                    "'{option}' is not understood; use {kind},id=ID,dir=DIR,endpoint=client"
                ));
            }
        }
    }
    let kind = if is_psk { Kind::Keys { user } } else { Kind::Certificates { verifies_peer } };
    match (id, folder) {
        (Some(id), Some(folder)) => {
            Ok(TlsObject { id, is_of_client, tls: ClientTls { folder, kind } })
        }
        _ => Err("credentials have a name and a folder: id=ID,dir=DIR".into()),
    }
}

/// The object of this name, of a client or of a server.
fn find(id: &str, is_of_client: bool) -> Result<TlsObject> {
    let objects = OBJECTS.lock().expect("no thread panics with it");
    let object = objects.iter().rfind(|object| object.id == id);
    let object = object.ok_or_else(|| anyhow!("No TLS credentials with id '{id}'"))?;
    if object.is_of_client != is_of_client {
        let endpoint = if is_of_client { "client" } else { "server" };
        bail!("Expecting TLS credentials with a {endpoint} endpoint");
    }
    Ok(object.clone())
}

/// The folder with a server's certificates, or its file of keys, from the object of this name.
///
/// # Errors
/// No server object has this name; the folder lacks `ca-cert.pem`, by which clients are checked
/// unless the object says `verify-peer=no`; the folder has that file, and the object says so.
pub fn of_server(id: &str) -> Result<(Option<String>, Option<String>)> {
    let ClientTls { folder, kind } = find(id, false)?.tls;
    let Kind::Certificates { verifies_peer } = kind else {
        return Ok((None, Some(format!("{folder}/keys.psk"))));
    };
    // The server checks clients if the file is there.
    let authority = Path::new(&folder).join("ca-cert.pem");
    match (verifies_peer, authority.metadata()) {
        (true, Err(error)) => {
            bail!("Unable to access credentials {}: {error}", authority.display())
        }
        (false, Ok(_)) => bail!(
            "clients must show a certificate because of {}: leave verify-peer out, or name a folder without that file",
            authority.display()
        ),
        (true, Ok(_)) | (false, Err(_)) => Ok((Some(folder), None)),
    }
}

/// The URI of an export, with the TLS parameters of the object that an image's options name.
///
/// # Errors
/// There is no client object of this name, or the image is no export.
pub fn with_tls(uri: &str, tls: &QemuTls) -> Result<String> {
    let object = find(&tls.credentials, true)?;
    object.tls.uri_of(uri, tls.hostname.as_deref()).map_err(anyhow::Error::msg)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(kind: &str, options: &str) -> Result<TlsObject, String> {
        parse(kind, options.split(',').map(str::to_owned))
    }

    #[test]
    fn credentials_become_parameters_of_a_uri() {
        for (kind, options, rest, hostname, uri) in [
            (
                "tls-creds-x509",
                "id=t,dir=/etc/pki,endpoint=client",
                "://h:1/a",
                Some("store"),
                "nbds://h:1/a?tls-certificates=/etc/pki&tls-hostname=store",
            ),
            (
                "tls-creds-x509",
                "id=t,dir=/p,verify-peer=no",
                "+unix:///a?socket=/s",
                None,
                "nbds+unix:///a?socket=/s&tls-certificates=/p&tls-verify-peer=false",
            ),
            (
                "tls-creds-psk",
                "id=t,dir=/p,username=u",
                "+unix:///?socket=/s",
                None,
                "nbds+unix://u@/?socket=/s&tls-psk-file=/p/keys.psk",
            ),
            (
                "tls-creds-psk",
                "id=t,dir=/p",
                "://h/",
                None,
                "nbds://qemu@h/?tls-psk-file=/p/keys.psk",
            ),
        ] {
            let made =
                object(kind, options).expect(options).tls.uri_of(&format!("nbd{rest}"), hostname);
            let made = made.expect("an export");
            assert_eq!(made, uri);
            made.parse::<blockhouse_nbd::uri::ClientUri>().expect("a URI");
        }
    }

    #[test]
    fn credentials_that_say_what_cannot_be_are_refused() {
        for (kind, options, said) in [
            ("tls-creds-x509", "id=t", "dir=DIR"),
            ("tls-creds-x509", "dir=/p", "id=ID"),
            ("tls-creds-x509", "id=t,dir=/p,priority=NORMAL", "priority"),
            ("tls-creds-x509", "id=t,dir=/p,username=u", "username"),
            ("tls-creds-psk", "id=t,dir=/p,verify-peer=off", "verify-peer"),
        ] {
            let error = object(kind, options).expect_err(options);
            assert!(error.contains(said), "{options}: {error}");
        }
    }
}
