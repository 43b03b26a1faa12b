//! The findings of OpenSSL's callbacks about a client, for the log.
//!
//! The callbacks run inside a step of a handshake. Nothing interrupts a step, so a thread's note is
//! about the client whose step runs.

use std::cell::RefCell;

use openssl::error::ErrorStack;
use openssl::ssl;

/// The findings of a handshake.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Note {
    /// The PSK identity that the client named.
    pub identity: Option<String>,
    /// Whether there is no key for this identity.
    pub is_unknown: bool,
    /// The fault of the client's certificate, with the certificate's names and the reason.
    pub certificate: Option<String>,
}

thread_local! {
    static NOTE: RefCell<Note> = RefCell::default();
}

/// Changes the note of the step that runs.
pub fn note(change: impl FnOnce(&mut Note)) {
    NOTE.with_borrow_mut(change);
}

/// Exchanges `note` and the thread's current note. Called before and after each step of the
/// client's handshake.
pub fn swap(note: &mut Note) {
    NOTE.with_borrow_mut(|current| std::mem::swap(current, note));
}

/// The reason why a handshake failed, for operators.
pub fn describe(note: &Note, error: &ssl::Error) -> String {
    if let Some(why) = &note.certificate {
        return why.clone();
    }
    let reason = error.ssl_error().map(reason).unwrap_or_default();
    let is = |part: &str| reason.contains(part);
    match &note.identity {
        Some(identity) if note.is_unknown => {
            return format!("there is no key for its PSK identity {identity:?}");
        }
        Some(identity) if is("binder") || is("bad record mac") || is("decryption failed") => {
            return format!("its key for the PSK identity {identity:?} is wrong");
        }
        _ => {}
    }
    if is("peer did not return a certificate") {
        return "it sent no certificate, and with ca-cert.pem clients must send one".into();
    }
    if is("no shared cipher") || is("no suitable signature") {
        return "it shares no cipher with this server: a server with certificates cannot serve a \
                client with a PSK, nor the other way round"
            .into();
    }
    if is("unsupported protocol") || is("version too low") {
        return "it has no TLS 1.2 or later".into();
    }
    if is("alert") {
        return format!("it ended the handshake: {reason}");
    }
    if is("wrong version number") || is("http request") || is("unexpected message") {
        return "it did not send TLS".into();
    }
    match error.io_error() {
        Some(error) => error.to_string(),
        None if reason.is_empty() => error.to_string(),
        None => reason,
    }
}

/// OpenSSL's reasons, without their codes.
fn reason(errors: &ErrorStack) -> String {
    let reasons: Vec<_> =
        errors.errors().iter().filter_map(openssl::error::Error::reason).collect();
    reasons.join(", ")
}
