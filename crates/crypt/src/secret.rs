//! The key to a slot: a passphrase, or the bytes of a key file.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use blockhouse_core::{Error, ErrorKind, Result};
use blockhouse_engine::LockedBytes;

/// Maximum bytes of a secret.
pub const MAX_SECRET: usize = 64 << 10;

/// A secret, in locked memory that is wiped.
#[derive(Debug)]
pub struct Secret(LockedBytes);

impl Secret {
    /// Reads a key file: all its bytes, including a line feed at the end.
    ///
    /// # Errors
    /// Names the file, which cannot be read, is empty, or has more than [`MAX_SECRET`] bytes.
    pub fn from_key_file(path: &Path) -> Result<Self> {
        read(path)
    }

    /// Reads a passphrase as a person types it: the first line of a file, without its line feed.
    ///
    /// # Errors
    /// As [`from_key_file`](Self::from_key_file); also if the first line is empty.
    pub fn from_passphrase_file(path: &Path) -> Result<Self> {
        let mut secret = read(path)?;
        let line = secret.0.iter().position(|&byte| byte == b'\n');
        secret.0.truncate(line.unwrap_or(usize::MAX));
        if secret.0.is_empty() {
            Err(useless(path, "begins with an empty line, which is no passphrase"))
        } else {
            Ok(secret)
        }
    }

    /// The secret itself.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

fn read(path: &Path) -> Result<Secret> {
    let host = |error| {
        let error = Error::host("cannot read the key", error).on(&path.display().to_string());
        error.hint("name a file that has the key and that this user may read")
    };
    let mut file = File::open(path).map_err(host)?;
    // One more byte detects a file that is too long.
    let mut bytes = LockedBytes::new(MAX_SECRET + 1).map_err(host)?;
    let mut length = 0;
    loop {
        match file.read(&mut bytes[length..]) {
            Ok(0) => break,
            Ok(count) => length += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(host(error)),
        }
    }
    bytes.truncate(length);
    if !bytes.is_in_memory() {
        tracing::warn!(
            "keys may get to the swap device: memory cannot be locked; raise the limit (ulimit -l), or name \
             the image when the server starts"
        );
    }
    match length {
        0 => Err(useless(path, "is empty, which is no key")),
        1..=MAX_SECRET => Ok(Secret(bytes)),
        _ => Err(useless(path, "is longer than 64 KiB, which no key is")),
    }
}

fn useless(path: &Path, what: &'static str) -> Error {
    let error = Error::new(ErrorKind::InvalidInput, what).on(&path.display().to_string());
    error.hint("name the file with the passphrase, or the key file")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_file_counts_whole_and_a_passphrase_to_the_end_of_its_line() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("key");
        let write = |bytes: &[u8]| std::fs::write(&path, bytes).expect("written");
        write(b"word\nmore\n");
        assert_eq!(Secret::from_key_file(&path).expect("a key").bytes(), b"word\nmore\n");
        assert_eq!(Secret::from_passphrase_file(&path).expect("a line").bytes(), b"word");
        write(b"word");
        assert_eq!(Secret::from_passphrase_file(&path).expect("a line").bytes(), b"word");
        for (bytes, why) in [(vec![], "empty"), (vec![1; MAX_SECRET + 1], "64 KiB")] {
            write(&bytes);
            let error = Secret::from_key_file(&path).expect_err(why).to_string();
            assert!(error.contains(why) && error.contains("key"), "{error}");
        }
        write(b"\nword");
        assert!(Secret::from_key_file(&path).is_ok());
        assert!(Secret::from_passphrase_file(&path).is_err());
    }
}
