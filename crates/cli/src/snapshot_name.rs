//! The snapshot that `-l` names, as qemu-img and qemu-nbd take it.

use std::path::Path;

use blockhouse_core::{Error, ErrorKind, Result};
use blockhouse_disk::{ImageDisk, Snapshot};
use blockhouse_images::{ImageOptions, open};

use crate::called_as;
use crate::create_options::split;

/// The name of a snapshot on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotName {
    /// An id; if no snapshot has it, a name. Reason: QEMU looks for ids first.
    IdOrName(String),
    /// `snapshot.id=ID,snapshot.name=NAME`, or one of the two.
    Exact { id: Option<String>, name: Option<String> },
}

/// An id or name, or `snapshot.id=ID,snapshot.name=NAME`. A comma in a value is written twice.
///
/// # Errors
/// The text has another part beside these two.
pub fn parse_snapshot(text: &str) -> Result<SnapshotName, String> {
    if !["snapshot.id=", "snapshot.name="].iter().any(|prefix| text.starts_with(prefix)) {
        return Ok(SnapshotName::IdOrName(text.to_owned()));
    }
    let (mut id, mut name) = (None, None);
    for part in split(text) {
        match part.split_once('=') {
            Some(("snapshot.id", value)) => id = Some(value.to_owned()),
            Some(("snapshot.name", value)) => name = Some(value.to_owned()),
            _ => return Err(format!("'{part}' is neither snapshot.id=ID nor snapshot.name=NAME")),
        }
    }
    Ok(SnapshotName::Exact { id, name })
}

/// Opens an image, or the disk of one of its snapshots. An [`IdOrName`](SnapshotName::IdOrName) is
/// a name first, unless the program is called qemu-img.
///
/// # Errors
/// The image cannot be opened, or has no such snapshot.
pub async fn open_snapshot(
    path: &Path,
    options: ImageOptions,
    wanted: Option<&SnapshotName>,
) -> Result<ImageDisk> {
    let name = match wanted {
        None => None,
        Some(SnapshotName::IdOrName(name)) if !called_as::is_qemu_img() => Some(name.clone()),
        Some(wanted) => Some(find_name(path, options.clone(), wanted).await?),
    };
    open(path, options.at_snapshot(name.as_deref())).await
}

/// As [`name_in`], in the image at `path`.
///
/// # Errors
/// As [`name_in`]; the image cannot be opened.
pub async fn find_name(
    path: &Path,
    options: ImageOptions,
    wanted: &SnapshotName,
) -> Result<String> {
    let disk = open(path, options).await?;
    let name = name_in(&disk, wanted).await;
    disk.close().await?;
    name
}

/// The name or id by which a disk finds the snapshot that QEMU's programs find.
///
/// # Errors
/// The image has no such snapshot, or neither its name nor its id finds it.
pub async fn name_in(disk: &ImageDisk, wanted: &SnapshotName) -> Result<String> {
    name_of(disk.name(), &disk.snapshots().list().await?, wanted)
}

/// An id is found if no snapshot has it as its name.
fn name_of(image: &str, listed: &[Snapshot], wanted: &SnapshotName) -> Result<String> {
    let refuse = |what: String, hint: &'static str| {
        Err(Error::new(ErrorKind::InvalidInput, what).on(image).hint(hint))
    };
    let (id, name) = match wanted {
        SnapshotName::IdOrName(id) if listed.iter().any(|one| one.id == *id) => (Some(id), None),
        SnapshotName::IdOrName(name) => (None, Some(name)),
        SnapshotName::Exact { id, name } => (id.as_ref(), name.as_ref()),
    };
    let is_wanted = |one: &&Snapshot| {
        id.is_none_or(|id| one.id == *id) && name.is_none_or(|name| one.name == *name)
    };
    let Some(found) = listed.iter().find(is_wanted) else {
        let wanted = [id, name].into_iter().flatten().map(String::as_str).collect::<Vec<_>>();
        let what = format!("has no snapshot '{}'", wanted.join(", "));
        return refuse(what, "'snapshot list' names those that it has");
    };
    let named = |name: &str| listed.iter().find(|one| one.name == name);
    if named(&found.name).is_some_and(|first| first.id == found.id) {
        return Ok(found.name.clone());
    }
    match named(&found.id) {
        None => Ok(found.id.clone()),
        Some(other) => {
            let what = format!("its snapshot {} has the id of another one as its name", other.id);
            refuse(what, "rename that snapshot first")
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn listed(all: &[(&str, &str)]) -> Vec<Snapshot> {
        let one = |(id, name): &(&str, &str)| Snapshot {
            id: (*id).to_owned(),
            name: (*name).to_owned(),
            created: Duration::ZERO,
            vm_clock: Duration::ZERO,
            vm_state_size: 0,
            disk_size: 0,
            instruction_count: None,
        };
        all.iter().map(one).collect()
    }

    fn found(all: &[(&str, &str)], text: &str) -> Option<String> {
        name_of("i", &listed(all), &parse_snapshot(text).unwrap()).ok()
    }

    /// As qemu-img 10.0.2 finds them with `convert -l`.
    #[test]
    fn an_id_is_found_before_a_name() {
        let all = [("1", "2"), ("2", "1")];
        for (text, name) in [
            ("1", Some("2")),
            ("2", Some("1")),
            ("snapshot.id=1", Some("2")),
            ("snapshot.name=1", Some("1")),
            ("snapshot.id=1,snapshot.name=2", Some("2")),
            ("snapshot.id=1,snapshot.name=1", None),
        ] {
            assert_eq!(found(&all, text).as_deref(), name, "{text}");
        }
    }

    #[test]
    fn an_id_and_a_name_are_those_of_one_snapshot() {
        let all = [("1", "a,b"), ("2", "same"), ("3", "same"), ("4", "1")];
        for (text, name) in [
            ("snapshot.id=2", Some("same")),
            ("snapshot.id=3", Some("3")),
            ("snapshot.name=same", Some("same")),
            ("snapshot.id=3,snapshot.name=same", Some("3")),
            ("snapshot.name=a,,b,snapshot.id=1", Some("a,b")),
            ("snapshot.id=1", Some("a,b")),
            ("snapshot.name=1", Some("1")),
            ("snapshot.id=1,snapshot.name=same", None),
            ("snapshot.name=2", None),
            ("1", Some("a,b")),
            ("3", Some("3")),
            ("same", Some("same")),
            ("5", None),
        ] {
            assert_eq!(found(&all, text).as_deref(), name, "{text}");
        }
        assert_eq!(found(&[("1", "x"), ("2", "x"), ("3", "2")], "snapshot.id=2"), None);
    }

    #[test]
    fn other_texts_are_ids_or_names() {
        for text in ["a", "1", "snapshot.x", "a,snapshot.id=1"] {
            assert_eq!(parse_snapshot(text), Ok(SnapshotName::IdOrName(text.to_owned())));
        }
        assert!(parse_snapshot("snapshot.id=1,b").is_err());
    }
}
