//! Where a server listens: URIs from the command line, sockets from systemd, or a sensible place.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use blockhouse_nbd::uri::{Address, NbdUri};
use blockhouse_nbd::{Bound, bind};
use listenfd::ListenFd;

/// A listening socket and the export names that its clients will ask for.
pub struct Place {
    /// The socket.
    pub bound: Bound,
    /// Names; never empty.
    pub exports: Vec<String>,
}

/// Listens at every URI. URIs of one address share its socket. One that names no export stands for
/// all of `exports`.
pub fn at_uris(uris: &[NbdUri], exports: &[String]) -> Result<Vec<Place>> {
    let mut places: Vec<(&Address, Vec<String>)> = Vec::new();
    for NbdUri { address, export } in uris {
        let index = places.iter().position(|(known, _)| *known == address);
        let index = index.unwrap_or_else(|| {
            places.push((address, Vec::new()));
            places.len() - 1
        });
        let names = if export.is_empty() { exports } else { std::slice::from_ref(export) };
        for name in names {
            if places[index].1.contains(name) {
                bail!("two URIs mean the same export; leave one out");
            }
            places[index].1.push(name.clone());
        }
    }
    places
        .into_iter()
        .map(|(address, exports)| Ok(Place { bound: bind(address)?, exports }))
        .collect()
}

/// The listening sockets that systemd passed to this process (`sd_listen_fds(3)`).
pub fn from_systemd(exports: &[String]) -> Result<Vec<Place>> {
    let mut passed = ListenFd::from_env();
    (0..passed.len()).map(|index| take(&mut passed, index, exports)).collect()
}

fn take(passed: &mut ListenFd, index: usize, exports: &[String]) -> Result<Place> {
    let refused = || format!("socket {index} from systemd is no listening stream socket");
    let (socket, address) = match passed.take_unix_listener(index) {
        Ok(Some(listener)) => {
            let path = listener.local_addr().with_context(refused)?;
            let path = path.as_pathname().with_context(refused)?.to_owned();
            (OwnedFd::from(listener), Address::Unix(path))
        }
        _ => {
            let listener = passed.take_tcp_listener(index).with_context(refused)?;
            let listener = listener.with_context(refused)?;
            let local = listener.local_addr().with_context(refused)?;
            let (host, port) = (local.ip().to_string(), local.port());
            (OwnedFd::from(listener), Address::Tcp { host, port })
        }
    };
    let bound = Bound { socket, address, file: None };
    Ok(Place { bound, exports: exports.to_vec() })
}

/// Listens at a Unix socket named after the image, in a folder that only this user can enter.
pub fn at_default(image: &Path, exports: &[String]) -> Result<Place> {
    let folder = runtime_folder()?;
    let name = image.file_name().context("the image's path has no file name")?;
    let path = folder.join(name).with_added_extension("sock");
    Ok(Place { bound: bind(&Address::Unix(path))?, exports: exports.to_vec() })
}

/// `$XDG_RUNTIME_DIR/blockhouse`, or `blockhouse-UID` among the temporary files.
fn runtime_folder() -> Result<PathBuf> {
    let user = rustix::process::getuid().as_raw();
    let folder = match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(base) if !base.is_empty() => PathBuf::from(base).join("blockhouse"),
        _ => std::env::temp_dir().join(format!("blockhouse-{user}")),
    };
    let cannot = || format!("{}: cannot make the folder for sockets", folder.display());
    match fs::DirBuilder::new().mode(0o700).create(&folder) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(error).with_context(cannot);
        }
        _ => {}
    }
    // Somebody else may have made it first, to be asked for our disks' data.
    let found = fs::symlink_metadata(&folder).with_context(cannot)?;
    if !found.is_dir() || found.uid() != user || found.mode() & 0o077 != 0 {
        bail!(
            "{}: not a folder of this user alone; remove it or name a socket with --nbd",
            folder.display()
        );
    }
    Ok(folder)
}
