//! Objects (`object-add`): named settings that nodes, exports and the NBD server refer to.
//!
//! An object starts nothing by itself. A throttle group becomes the group of a disk's limits when a
//! node names it, and a secret becomes a key file. An iothread adds no thread: exports use the
//! server's threads. The TLS settings of the server are applied before anything listens; the TLS
//! settings of a client become a part of a node's URI.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use blockhouse_daemon::key_memory;
use blockhouse_images::{ClientTls, ClientTlsKind, QemuTls};
use serde_json::{Map, Value, json};

use super::arguments::{Arguments, is_well_formed};
use super::context::Context;
use super::errors::{QmpError, Returned};
use super::state::Object;

/// The kinds of objects that are supported.
const KINDS: &[&str] = &["iothread", "secret", "throttle-group", "tls-creds-psk", "tls-creds-x509"];

/// The keys of limits in QEMU's throttle group, and in a disk's `limits`.
const LIMITS: [(&str, &str); 6] = [
    ("iops-total", "iops"),
    ("iops-read", "iops-read"),
    ("iops-write", "iops-write"),
    ("bps-total", "bps"),
    ("bps-read", "bps-read"),
    ("bps-write", "bps-write"),
];

/// `object-add`.
pub(super) async fn add(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let kind = given.needed_word("qom-type", KINDS)?;
    let id = given.text("id")?;
    if !is_well_formed(&id) {
        return Err(QmpError::generic("Parameter 'id' expects an identifier"));
    }
    if context.state.borrow().objects.contains_key(&id) {
        return Err(QmpError::generic(format!(
            "attempt to add duplicate property '{id}' to object (type 'container')"
        )));
    }
    let object = match kind {
        "iothread" => {
            // These have no effect: --poll-max-us sets for how long a loop busy-polls.
            for name in ["poll-max-ns", "poll-grow", "poll-shrink", "aio-max-batch"]
                .into_iter()
                .chain(["thread-pool-min", "thread-pool-max"])
            {
                given.some_unsigned(name)?;
            }
            Object::IoThread
        }
        "secret" => secret(&mut given)?,
        "throttle-group" => Object::ThrottleGroup(limits(&mut given)?),
        _ => tls(context, kind, &id, &mut given)?,
    };
    given.end()?;
    context.state.borrow_mut().objects.insert(id, object);
    Ok(json!({}))
}

/// A secret is a file's content, or `data`, which is then stored in a memfd of this process.
fn secret(given: &mut Arguments) -> Result<Object, QmpError> {
    let why = "secrets are not encrypted here";
    given.only("keyid", &[], why)?;
    given.only("iv", &[], why)?;
    given.only("format", &[json!("raw")], "a secret is its bytes as they are")?;
    match (given.some_text("file")?, given.some_text("data")?) {
        (Some(file), None) => {
            let failed = |error: std::io::Error| QmpError::generic(format!("{file}: {error}"));
            // The file may be a pipe, so it is read only once, when a node uses it.
            std::fs::metadata(&file).map_err(failed)?;
            let path = std::path::absolute(&file).map_err(failed)?;
            Ok(Object::Secret { path, memory: None })
        }
        (None, Some(data)) => {
            let failed = |error: std::io::Error| QmpError::generic(format!("the key: {error}"));
            let (path, memory) = key_memory::keep(&data).map_err(failed)?;
            Ok(Object::Secret { path, memory: Some(memory) })
        }
        (Some(_), Some(_)) => Err(QmpError::generic("'file' and 'data' are mutually exclusive")),
        (None, None) => Err(QmpError::generic("Either 'file' or 'data' must be provided")),
    }
}

/// Parses the limits of a throttle group into the keys of a disk's limits.
fn limits(given: &mut Arguments) -> Result<Map<String, Value>, QmpError> {
    let mut of_object = given.some_object("limits")?;
    let mut take = |name: String| match &mut of_object {
        Some(limits) => limits.some_unsigned(&name),
        None => given.some_unsigned(&format!("x-{name}")),
    };
    let mut limits = Map::new();
    let mut burst: Option<(f64, u64)> = None;
    for (theirs, ours) in LIMITS {
        let rate = take(theirs.into())?.filter(|rate| *rate > 0);
        let most = take(format!("{theirs}-max"))?.filter(|most| *most > 0);
        let seconds = take(format!("{theirs}-max-length"))?.unwrap_or(1);
        let Some(rate) = rate else {
            match most {
                Some(_) => {
                    let why = "bps_max/iops_max require corresponding bps/iops values";
                    return Err(QmpError::generic(why));
                }
                None => continue,
            }
        };
        limits.insert(ours.into(), rate.into());
        let own = (most.unwrap_or(rate) as f64 / rate as f64, seconds);
        if own.0 < 1.0 {
            return Err(QmpError::generic("bps_max/iops_max cannot be lower than bps/iops"));
        }
        match burst {
            Some(other) if other != own => {
                let why =
                    "the limits of a group may be exceeded by one factor and for one time here";
                return Err(QmpError::generic(why));
            }
            _ => burst = Some(own),
        }
    }
    if take("iops-size".into())?.is_some_and(|size| size > 0) {
        return Err(QmpError::generic(
            "'iops-size' is not possible here: each request counts once",
        ));
    }
    if let Some(of_object) = of_object {
        of_object.end()?;
    }
    if let Some((factor, seconds)) = burst.filter(|(factor, _)| *factor > 1.0) {
        limits.insert("burst".into(), factor.into());
        limits.insert("burst-seconds".into(), seconds.into());
    }
    Ok(limits)
}

/// TLS credentials: of the server itself, or of a node that is another server's export. The server
/// has set up its TLS at the start, from the object of the command line.
fn tls(context: &Context, kind: &str, id: &str, given: &mut Arguments) -> Result<Object, QmpError> {
    given.only("priority", &[], "the ciphers are those of TLS 1.2 and 1.3")?;
    given.only("passwordid", &[], "the key is a file without a passphrase")?;
    given.only("sanity-check", &[json!(true)], "files that do not fit are refused")?;
    let is_psk = kind == "tls-creds-psk";
    if given.word("endpoint", &["client", "server"])? != Some("server") {
        return client_tls(is_psk, given).map(Object::ClientTls);
    }
    given.some_text("dir")?;
    let why = "clients are checked where the folder has ca-cert.pem";
    given.only("verify-peer", &[json!(true)], why)?;
    given.only("username", &[], "keys.psk has the names of clients")?;
    if context.tls_object.as_deref() == Some(id) {
        Ok(Object::ServerTls)
    } else {
        Err(QmpError::generic(
            "TLS is set up at the start: by one --object of qemu-storage-daemon, or by 'serve --tls'",
        ))
    }
}

/// The credentials of a client; their files are read when a node connects.
fn client_tls(is_psk: bool, given: &mut Arguments) -> Result<ClientTls, QmpError> {
    let folder = given.some_text("dir")?;
    let folder = folder.ok_or_else(|| QmpError::generic("Missing 'dir' property value"))?;
    let kind = if is_psk {
        given.only("verify-peer", &[json!(true)], "a key proves the server, too")?;
        let user = given.some_text("username")?;
        let user = user.unwrap_or_else(|| ClientTls::DEFAULT_USER.to_owned());
        ClientTlsKind::Keys { user }
    } else {
        ClientTlsKind::Certificates { verifies_peer: given.flag("verify-peer", true)? }
    };
    let needed = if is_psk { "keys.psk" } else { "ca-cert.pem" };
    let file = Path::new(&folder).join(needed);
    let failed = |error: std::io::Error| {
        QmpError::generic(format!("Unable to access credentials {}: {error}", file.display()))
    };
    file.metadata().map_err(failed)?;
    let folder = std::path::absolute(&folder).map_err(failed)?.to_string_lossy().into_owned();
    Ok(ClientTls { folder, kind })
}

/// `object-del`.
pub(super) async fn delete(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let id = given.text("id")?;
    given.end()?;
    let mut state = context.state.borrow_mut();
    let is_used = state.filters.values().any(|filter| filter.group.as_ref() == Some(&id))
        || state.nbd_server.as_ref().is_some_and(|server| server.tls.as_ref() == Some(&id));
    if is_used {
        return Err(QmpError::generic(format!("object '{id}' is in use, can not be deleted")));
    }
    match state.objects.remove(&id) {
        Some(object) => {
            if let Object::Secret { path, memory: Some(memory) } = object {
                state.deleted_secrets.push((path, memory));
            }
            Ok(json!({}))
        }
        None => Err(QmpError::generic(format!("object '{id}' not found"))),
    }
}

/// The file of a secret.
pub(super) fn key_file(context: &Context, id: &str) -> Result<PathBuf, QmpError> {
    match context.state.borrow().objects.get(id) {
        Some(Object::Secret { path, .. }) => Ok(path.clone()),
        _ => Err(QmpError::generic(format!("No secret with id '{id}'"))),
    }
}

/// The parameter `limits` of a disk in a throttle group.
pub(super) fn limits_of(context: &Context, group: &str) -> Result<Value, QmpError> {
    match context.state.borrow().objects.get(group) {
        Some(Object::ThrottleGroup(limits)) => {
            let mut limits = limits.clone();
            if limits.is_empty() {
                return Ok(json!({}));
            }
            limits.insert("group".into(), group.into());
            Ok(limits.into())
        }
        _ => Err(QmpError::generic(format!("Throttle group '{group}' does not exist"))),
    }
}

/// Refuses an iothread that does not exist.
pub(super) fn check_thread(context: &Context, id: &str) -> Result<(), QmpError> {
    match context.state.borrow().objects.get(id) {
        Some(Object::IoThread) => Ok(()),
        _ => Err(QmpError::generic(format!("iothread \"{id}\" not found"))),
    }
}

/// Refuses credentials that do not exist, or are not for a server.
pub(super) fn check_server_tls(context: &Context, id: &str) -> Result<(), QmpError> {
    match context.state.borrow().objects.get(id) {
        Some(Object::ServerTls) => Ok(()),
        object => Err(no_tls(object, id, "server")),
    }
}

/// The URI of an export with the TLS that a node's options name.
pub(super) fn with_tls(context: &Context, uri: &str, tls: &QemuTls) -> Result<String, QmpError> {
    match context.state.borrow().objects.get(&tls.credentials) {
        Some(Object::ClientTls(of)) => {
            of.uri_of(uri, tls.hostname.as_deref()).map_err(QmpError::generic)
        }
        object => Err(no_tls(object, &tls.credentials, "client")),
    }
}

fn no_tls(object: Option<&Object>, id: &str, endpoint: &str) -> QmpError {
    QmpError::generic(match object {
        Some(Object::ServerTls | Object::ClientTls(_)) => {
            format!("Expected TLS credentials for a {endpoint} endpoint")
        }
        Some(_) => format!("Object with id '{id}' is not TLS credentials"),
        None => format!("No TLS credentials with id '{id}'"),
    })
}
