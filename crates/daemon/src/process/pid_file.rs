//! `--pid-file`: the file with the id of the serving process.
//!
//! Guarantees: the file is complete when the server reports that it is ready. After a hand-over it
//! has the id of the new process as soon as that process serves. It is removed at the end of the
//! server, unless another process has written it since.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use rustix::fs::OFlags;

/// The file while this process serves.
pub(crate) struct PidFile {
    path: PathBuf,
}

impl PidFile {
    /// Writes the id of this process. An existing file is replaced atomically.
    ///
    /// # Errors
    /// The kernel's error, with the path.
    pub(crate) fn write(path: &Path) -> Result<Self> {
        let name = path.display();
        let failed = |error: io::Error| {
            anyhow::anyhow!(
                "{name}: cannot write the pid file: {error}; name one in a folder where this user may write"
            )
        };
        // The working directory may change later.
        let path = std::path::absolute(path).map_err(failed)?;
        let new = path.with_added_extension(format!("{}.new", std::process::id()));
        // A killed process with the same id, as in a container, has left the file. Mostly there is
        // none.
        let _ = fs::remove_file(&new);
        let mut options = fs::OpenOptions::new();
        let mut file =
            options.write(true).create_new(true).mode(0o644).open(&new).map_err(failed)?;
        let written = file.write_all(number().as_bytes()).and_then(|()| fs::rename(&new, &path));
        if written.is_err() {
            // The first error is the one to report.
            let _ = fs::remove_file(&new);
        }
        written.map_err(failed)?;
        Ok(Self { path })
    }

    /// Leaves the file to the process that has taken over.
    pub(crate) fn leave(self) {
        std::mem::forget(self);
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        if has_number(&self.path).unwrap_or(false) {
            // If the removal fails, the file has the id of an ended process, as after a kill.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Whether this is a regular file with the id of this process. Another program may have replaced it
/// by anything: a link, a pipe, an endless file.
fn has_number(path: &Path) -> io::Result<bool> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
    let file = fs::OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let mut content = Vec::new();
    let is_file = file.metadata()?.is_file();
    file.take(number().len() as u64 + 1).read_to_end(&mut content)?;
    Ok(is_file && content == number().as_bytes())
}

fn number() -> String {
    format!("{}\n", std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_removed_unless_another_process_wrote_it() {
        let folder = std::env::temp_dir().join(format!("blockhouse-pid-{}", std::process::id()));
        fs::create_dir(&folder).expect("a folder");
        let path = folder.join("server.pid");
        fs::write(&path, "1\n").expect("an older file");
        let left = folder.join(format!("server.pid.{}.new", std::process::id()));
        fs::write(left, "").expect("the rest of a killed process");
        let file = PidFile::write(&path).expect("it is replaced");
        assert_eq!(fs::read_to_string(&path).expect("a file"), number());
        drop(file);
        assert!(!path.exists());
        let file = PidFile::write(&path).expect("a new file");
        fs::write(&path, "1\n").expect("another process");
        drop(file);
        assert_eq!(fs::read_to_string(&path).expect("it stays"), "1\n");
        assert_eq!(fs::read_dir(&folder).expect("a folder").count(), 1);
        fs::remove_dir_all(&folder).expect("the folder");
        assert!(PidFile::write(&path).is_err_and(|error| error.to_string().contains("server.pid")));
    }
}
