//! `--pid-file`: the file that names the process that serves.
//!
//! Guarantees: the file is complete when the server reports that it is ready. After a hand-over it
//! names the new process as soon as that serves. It is removed at the end of the server, unless
//! another process has written it since.

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
    /// Writes the number of this process. A file that is there is replaced in one step.
    ///
    /// # Errors
    /// That of the kernel, with the path.
    pub(crate) fn write(path: &Path) -> Result<Self> {
        let name = path.display();
        let failed = |error: io::Error| {
            anyhow::anyhow!(
                "{name}: cannot write the pid file: {error}; name one in a folder where this user may write"
            )
        };
        // The folder that it is in may be changed later.
        let path = std::path::absolute(path).map_err(failed)?;
        let new = path.with_added_extension(format!("{}.new", std::process::id()));
        let mut options = fs::OpenOptions::new();
        let mut file =
            options.write(true).create_new(true).mode(0o644).open(&new).map_err(failed)?;
        let written = file.write_all(number().as_bytes()).and_then(|()| fs::rename(&new, &path));
        if written.is_err() {
            // The first failure is the one to tell.
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
            // A file that cannot be removed names a process that has ended, as after a kill.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Whether the file is one with the number of this process. Another program may have put anything
/// in its place: a link, a pipe, a file without an end.
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
