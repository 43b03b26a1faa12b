//! The snapshot that `-l` names, as qemu-img and qemu-nbd take it.

use std::path::Path;

use blockhouse_core::{Error, ErrorKind, Result};
use blockhouse_disk::{ImageDisk, ImageOptions, Snapshot, open};

use crate::create_options::split;

/// The name of a snapshot on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotName {
    /// A name; if no snapshot has it, an id.
    NameOrId(String),
    /// `snapshot.id=ID,snapshot.name=NAME`, or one of the two.
    Exact { id: Option<String>, name: Option<String> },
}

/// A name or id, or `snapshot.id=ID,snapshot.name=NAME`, where a comma in a value is written twice.
///
/// # Errors
/// The text has another part beside these two.
pub fn parse_snapshot(text: &str) -> Result<SnapshotName, String> {
    if !["snapshot.id=", "snapshot.name="].iter().any(|prefix| text.starts_with(prefix)) {
        return Ok(SnapshotName::NameOrId(text.to_owned()));
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

/// As [`parse_snapshot`], for a server, which takes a name or an id.
///
/// # Errors
/// As [`parse_snapshot`]; also if the text has both.
pub fn parse_one(text: &str) -> Result<String, String> {
    match parse_snapshot(text)? {
        SnapshotName::NameOrId(one)
        | SnapshotName::Exact { id: Some(one), name: None }
        | SnapshotName::Exact { id: None, name: Some(one) } => Ok(one),
        SnapshotName::Exact { .. } => Err("say its name or its id, not both".into()),
    }
}

/// Opens an image, or the disk of one of its snapshots.
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
        Some(SnapshotName::NameOrId(name)) => Some(name.clone()),
        Some(SnapshotName::Exact { id, name }) => {
            let disk = open(path, options.clone()).await?;
            let listed = disk.snapshots().list().await;
            disk.close().await?;
            Some(name_of(disk.name(), &listed?, (id.as_deref(), name.as_deref()))?)
        }
    };
    open(path, options.at_snapshot(name.as_deref())).await
}

/// The name or id by which [`open`] finds the snapshot: an id is found if no snapshot has it as its
/// name.
fn name_of(
    image: &str,
    listed: &[Snapshot],
    (id, name): (Option<&str>, Option<&str>),
) -> Result<String> {
    let refuse = |what: String, hint: &'static str| {
        Err(Error::new(ErrorKind::InvalidInput, what).on(image).hint(hint))
    };
    let is_wanted = |one: &&Snapshot| {
        id.is_none_or(|id| one.id == id) && name.is_none_or(|name| one.name == name)
    };
    let Some(found) = listed.iter().find(is_wanted) else {
        let wanted = [id, name].into_iter().flatten().collect::<Vec<_>>().join(", ");
        let what = format!("has no snapshot '{wanted}'");
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
        let Ok(SnapshotName::Exact { id, name }) = parse_snapshot(text) else { panic!("{text}") };
        name_of("i", &listed(all), (id.as_deref(), name.as_deref())).ok()
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
        ] {
            assert_eq!(found(&all, text).as_deref(), name, "{text}");
        }
        assert_eq!(found(&[("1", "x"), ("2", "x"), ("3", "2")], "snapshot.id=2"), None);
    }

    #[test]
    fn other_texts_are_names_or_ids() {
        for text in ["a", "1", "snapshot.x", "a,snapshot.id=1"] {
            assert_eq!(parse_snapshot(text), Ok(SnapshotName::NameOrId(text.to_owned())));
        }
        assert!(parse_snapshot("snapshot.id=1,b").is_err());
        assert_eq!(parse_one("snapshot.name=a"), Ok("a".to_owned()));
        assert!(parse_one("snapshot.id=1,snapshot.name=a").is_err());
    }
}
