//! Finds overlays of an image in some folders, because a change of the image would corrupt them.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use blockhouse_core::{Error, ErrorKind, Result};
use blockhouse_format::{Backing, probe};
use rustix::fs::OFlags;

use crate::qemu_name::plain_backing;

/// The qcow2 files of these folders whose backing file is `layer`, except `known` and incomplete
/// copies.
///
/// # Errors
/// Host errors, if a folder cannot be read.
fn images_over(layer: &Path, folders: &[&Path], known: &Path) -> Result<Vec<PathBuf>> {
    let failed = |path: &Path| {
        let name = path.display().to_string();
        move |error| Error::host("cannot look for images in", error).on(&name)
    };
    let wanted = layer.metadata().map_err(failed(layer))?;
    let mut found: Vec<PathBuf> = Vec::new();
    for folder in folders {
        for entry in fs::read_dir(folder).map_err(failed(folder))? {
            let path = entry.map_err(failed(folder))?.path();
            let is_part = path.extension().is_some_and(|extension| extension == "part");
            let names = |name: PathBuf| {
                let is_it =
                    |one: &fs::Metadata| (one.dev(), one.ino()) == (wanted.dev(), wanted.ino());
                fs::metadata(path.parent().unwrap_or(folder).join(name))
                    .is_ok_and(|one| is_it(&one))
            };
            // An unreadable file is ignored: this process could not open it as an image either.
            if !is_part && backing_of(&path).is_some_and(names) && !found.contains(&path) {
                found.push(path);
            }
        }
    }
    found.retain(|path| path != known);
    found.sort();
    Ok(found)
}

/// Refuses a layer that is the backing file of another image than `known`. Only images in the
/// folders of `layer` and `known` are found.
///
/// # Errors
/// `InvalidInput` with the names of the images; the host's error.
pub(crate) fn check_only_over(layer: &Path, known: &Path) -> Result<()> {
    let whole = |path: &Path| {
        let failed = |error| Error::host("cannot find", error).on(&path.to_string_lossy());
        path.canonicalize().map_err(failed)
    };
    let (layer, known) = (whole(layer)?, whole(known)?);
    let folder = |path: &'_ Path| path.parent().unwrap_or(Path::new("/")).to_owned();
    let others = images_over(&layer, &[&folder(&layer), &folder(&known)], &known)?;
    if others.is_empty() {
        return Ok(());
    }
    let names: Vec<_> = others.iter().map(|other| other.display().to_string()).collect();
    let what = format!("{} is the layer of {} as well", layer.display(), names.join(", "));
    let error = Error::new(ErrorKind::InvalidInput, what).on(&known.to_string_lossy());
    Err(error.hint("remove these first, or make them independent (stream)"))
}

/// The name of the backing file in the header of a qcow2 file.
fn backing_of(path: &Path) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStringExt;
    if !fs::symlink_metadata(path).ok()?.is_file() {
        return None;
    }
    // Another file may have replaced this file since the check, and opening a pipe would block.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
    let mut file: File = fs::OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    let mut header = [0; 20];
    file.read_exact(&mut header).ok()?;
    let place = probe::qcow2_backing_name(&header)?;
    let mut name = vec![0; place.length() as usize];
    file.read_exact_at(&mut name, place.offset()).ok()?;
    let backing = Backing { name, format: None };
    let (plain, _) = plain_backing(&backing, &path.to_string_lossy()).ok()?;
    Some(std::ffi::OsString::from_vec(plain.into_owned().name).into())
}

#[cfg(test)]
mod tests {
    use blockhouse_disk::ImageFormat;
    use blockhouse_engine::{EngineChoice, EventLoop};
    use blockhouse_format::qcow2::CreateOptions;

    use super::*;
    use crate::create::{create, open_created};

    #[test]
    fn images_are_found_by_what_their_names_lead_to() {
        let folder = tempfile::tempdir().unwrap();
        let other = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("layer"), [0; 512]).unwrap();
        std::os::unix::fs::symlink("layer", path("link")).unwrap();
        fs::create_dir(path("QFI")).unwrap();
        fs::write(path("short"), b"QFI\xfb").unwrap();
        let whole = path("layer");
        EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
            for (name, backing) in [
                (path("a"), "layer"),
                (path("b"), "./link"),
                (other.path().join("c"), whole.to_str().unwrap()),
                (path("d"), "a"),
                (path("e.part"), "layer"),
            ] {
                create(&name, 0, ImageFormat::Raw).await.unwrap();
                let storage = open_created(&name).await.unwrap();
                let backing = Backing { name: backing.into(), format: Some("raw".into()) };
                let backing = Some(backing);
                let options = CreateOptions { backing, ..CreateOptions::new(512) };
                blockhouse_format::qcow2::create(&storage, &options).await.unwrap();
            }
        });
        let folders = [folder.path(), other.path(), folder.path()];
        let mut wanted = vec![path("a"), path("b"), other.path().join("c")];
        wanted.sort();
        let none = path("none");
        assert_eq!(images_over(&whole, &folders, &none).unwrap(), wanted);
        let others: Vec<_> = wanted.into_iter().filter(|one| *one != path("a")).collect();
        assert_eq!(images_over(&whole, &folders, &path("a")).unwrap(), others);
        assert_eq!(images_over(&path("a"), &folders, &none).unwrap(), [path("d")]);
        assert!(images_over(&none, &folders, &none).is_err());
    }
}
