//! The files of certificates and keys.

use std::collections::HashMap;
use std::path::Path;

use openssl::error::ErrorStack;
use openssl::x509::{X509NameRef, X509Ref};

/// Why TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file is missing, or has other content than its name says.
    #[error("{path}: {why}")]
    File {
        /// The file.
        path: String,
        /// The fault.
        why: String,
    },
    /// OpenSSL cannot be set up.
    #[error("TLS cannot be set up: {0}")]
    Library(#[from] ErrorStack),
}

/// The error of a file that cannot be used; `why` is the reason.
pub fn file_error(path: &Path, why: &str) -> TlsError {
    TlsError::File { path: path.display().to_string(), why: why.to_owned() }
}

/// The error of a file that OpenSSL rejects; `what` says what the file is not.
pub fn unfit(path: &Path, what: &'static str) -> impl Fn(ErrorStack) -> TlsError {
    move |error| file_error(path, &format!("{what}: {error}"))
}

/// Checks that a file can be read.
///
/// # Errors
/// Why the file cannot be read.
pub fn check_readable(path: &Path) -> Result<(), TlsError> {
    let opened = std::fs::File::open(path);
    opened.map(drop).map_err(|error| file_error(path, &error.to_string()))
}

/// The names in a certificate that its owner may be known by: common names, then DNS names.
pub fn names_of(certificate: &X509Ref) -> Vec<String> {
    let common = common_names(certificate.subject_name());
    let others = certificate.subject_alt_names();
    let others = others.iter().flatten().filter_map(|name| name.dnsname().map(str::to_owned));
    let mut names: Vec<_> = common.into_iter().chain(others).collect();
    names.dedup();
    names
}

fn common_names(subject: &X509NameRef) -> Vec<String> {
    let entries = subject.entries_by_nid(openssl::nid::Nid::COMMONNAME);
    let text = |entry: &openssl::x509::X509NameEntryRef| entry.data().to_string().ok();
    entries.filter_map(text).collect()
}

/// The pre-shared keys of a file by their identities: a line `IDENTITY:KEY` for each, the key in
/// hexadecimal digits, as psktool writes it.
///
/// # Errors
/// The file cannot be read, has a line of another form, or has no key.
pub fn read_keys(path: &Path) -> Result<HashMap<String, Vec<u8>>, TlsError> {
    let text =
        std::fs::read_to_string(path).map_err(|error| file_error(path, &error.to_string()))?;
    let mut keys = HashMap::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let wrong = || {
            file_error(
                path,
                &format!("line {} is not IDENTITY:KEY in hexadecimal digits", number + 1),
            )
        };
        let (identity, key) = line.rsplit_once(':').ok_or_else(wrong)?;
        let key = from_hexadecimal(key).filter(|key| !key.is_empty()).ok_or_else(wrong)?;
        keys.insert(identity.to_owned(), key);
    }
    if keys.is_empty() {
        Err(file_error(path, "has no key; 'psktool -u NAME -p FILE' makes one"))
    } else {
        Ok(keys)
    }
}

fn from_hexadecimal(text: &str) -> Option<Vec<u8>> {
    // `from_str_radix` also takes a sign.
    if !text.len().is_multiple_of(2) || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let byte = |index| u8::from_str_radix(&text[index..index + 2], 16).ok();
    (0..text.len()).step_by(2).map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_hexadecimal_digits_are_a_key() {
        assert_eq!(from_hexadecimal("00fF7e"), Some(vec![0, 0xff, 0x7e]));
        for text in ["+f+f", "-0", " f", "f", "0x", "\u{e9}"] {
            assert_eq!(from_hexadecimal(text), None, "{text}");
        }
    }
}
