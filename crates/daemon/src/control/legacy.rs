//! The messages of `snapshot --control` and `upgrade --control`. Each line is a request, and has one line as its answer,
//! both JSON in the form that QEMU's monitors have:
//!
//! ```json
//! {"execute":"snapshot-create","arguments":{"image":"/vm/disk.qcow2","name":"before"}}
//! {"return":{"id":"1","pause-us":840}}
//! {"execute":"snapshot-delete","arguments":{"name":"other"}}
//! {"error":{"desc":"/vm/disk.qcow2: has no snapshot 'other' ('snapshot list' names those that it has)"}}
//! ```
//!
//! The image is named by its canonical path; where only one is served it may be left out. What cannot be
//! understood is answered with an error; only a line that is too long ends the connection.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Listed;
use super::pause_log::log;
use super::snapshots::{delete_snapshot, take_snapshot};
use crate::running::{ClaimedDisk, Running};

/// What can be asked for: of snapshots, and of the server.
#[derive(Debug, Deserialize, Serialize)]
#[serde(tag = "execute", content = "arguments", deny_unknown_fields)]
pub enum Request {
    /// Answers a list of [`Listed`].
    #[serde(rename = "snapshot-list")]
    List(ListArgs),
    /// Answers [`CreateReply`].
    #[serde(rename = "snapshot-create")]
    Create(SnapshotArgs),
    /// Is refused: it would change the disk while guests use it.
    #[serde(rename = "snapshot-apply")]
    Apply(SnapshotArgs),
    /// Answers [`PauseReply`].
    #[serde(rename = "snapshot-delete")]
    Delete(SnapshotArgs),
    /// Answers [`PauseReply`].
    #[serde(rename = "snapshot-rename")]
    Rename(RenameArgs),
    /// Has another process go on. Answers [`UpgradeReply`], after which the connection ends.
    #[serde(rename = "upgrade")]
    Upgrade(UpgradeArgs),
}

/// The process that goes on.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct UpgradeArgs {
    /// The program; left out, the one that the server was started from, as it is at its path by now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub binary: Option<PathBuf>,
    /// Whether clients with TLS are disconnected first.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub disconnect_tls: bool,
}

/// An upgrade that succeeded.
#[derive(Debug, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct UpgradeReply {
    /// The id of the process that serves now.
    pub process: u32,
    /// For how long nothing was served, in microseconds.
    pub gap_us: u64,
}

/// An image.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ListArgs {
    /// Its canonical path, or nothing for the only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<PathBuf>,
}

/// A snapshot of an image.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotArgs {
    /// As of [`ListArgs`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<PathBuf>,
    /// Its name, or its id where there is one already.
    pub name: String,
}

/// A snapshot and its new name.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct RenameArgs {
    /// As of [`ListArgs`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<PathBuf>,
    /// Its name or id.
    pub name: String,
    /// What it is called from now on.
    pub new_name: String,
}

impl Request {
    /// The method of JSON-RPC that does the same.
    pub(super) fn method(&self) -> &'static str {
        match self {
            Self::List(_) => "snapshot.list",
            Self::Create(_) => "snapshot.create",
            // It is refused for another reason.
            Self::Apply(_) => "snapshot.list",
            Self::Delete(_) => "snapshot.delete",
            Self::Rename(_) => "snapshot.rename",
            Self::Upgrade(_) => "server.upgrade",
        }
    }

    fn image(&self) -> Option<&Path> {
        match self {
            Self::List(ListArgs { image })
            | Self::Create(SnapshotArgs { image, .. })
            | Self::Apply(SnapshotArgs { image, .. })
            | Self::Delete(SnapshotArgs { image, .. })
            | Self::Rename(RenameArgs { image, .. }) => image.as_deref(),
            Self::Upgrade(_) => None,
        }
    }
}

/// A change that was made.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct PauseReply {
    /// For how long the guests' changes were held off, in microseconds.
    pub pause_us: u64,
}

/// A snapshot that was taken.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct CreateReply {
    /// The snapshot's id.
    pub id: String,
    /// As of [`PauseReply`].
    pub pause_us: u64,
}

/// The answer to a request.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Reply {
    /// What was asked for.
    Return(serde_json::Value),
    /// Nothing has changed.
    Error {
        /// Why: one line, as on standard error.
        desc: String,
    },
}

/// Carries a request out that is about an image.
pub(super) async fn execute(
    running: &Running,
    request: Request,
    is_cancelled: &dyn Fn() -> bool,
) -> Result<Value> {
    let claimed = claim(running, request.image()).await?;
    let (disk, image) = (&claimed.disk, claimed.disk.path());
    let image = image.display();
    let snapshots = disk.disk.snapshots();
    Ok(match request {
        Request::Upgrade(_) => bail!("an upgrade is of the server as a whole"),
        Request::List(_) => {
            let snapshots = snapshots.list().await?;
            serde_json::to_value(snapshots.iter().map(Listed::from).collect::<Vec<_>>())?
        }
        Request::Create(SnapshotArgs { name, .. }) => {
            let (id, pause_us) = take_snapshot(disk, &name, is_cancelled).await?;
            serde_json::to_value(CreateReply { id, pause_us })?
        }
        Request::Apply(SnapshotArgs { name, .. }) => bail!(
            "{image}: is being served, and its bytes must not change while guests use them; stop the \
             server, then apply {name:?}"
        ),
        Request::Delete(SnapshotArgs { name, .. }) => {
            let pause_us = delete_snapshot(disk, &name, is_cancelled).await?;
            serde_json::to_value(PauseReply { pause_us })?
        }
        Request::Rename(RenameArgs { name, new_name, .. }) => {
            let pause = snapshots.rename(&name, &new_name).await?;
            let what = format!("the snapshot {name:?} is {new_name:?} now");
            serde_json::to_value(PauseReply { pause_us: log(disk, pause, &what) })?
        }
    })
}

/// The image that is meant.
async fn claim<'a>(running: &'a Running, wanted: Option<&Path>) -> Result<ClaimedDisk<'a>> {
    let disks = running.disks();
    let names = || {
        let paths = disks.iter().map(|disk| disk.path().display().to_string());
        paths.collect::<Vec<_>>().join(", ")
    };
    let disk = match (wanted, &disks[..]) {
        (None, [only]) => only,
        (None, _) => bail!("several images are served; say which: {}", names()),
        (Some(path), _) => disks.iter().find(|disk| disk.path() == path).with_context(|| {
            format!("{}: is not served here; these are: {}", path.display(), names())
        })?,
    };
    running.claim_disk(disk.name()).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_read_as_they_are_written() {
        let written = |request: &Request| serde_json::to_string(request).expect("plain names");
        let request = Request::Rename(RenameArgs {
            image: Some("/vm/disk.qcow2".into()),
            name: "one".into(),
            new_name: "a\nb".into(),
        });
        let line = written(&request);
        let rename =
            r#"{"execute":"snapshot-rename","arguments":{"image":"/vm/disk.qcow2","name":"one","#;
        assert_eq!(line, format!(r#"{rename}"new-name":"a\nb"}}}}"#));
        let read: Request = serde_json::from_str(&line).expect("what was just written");
        assert_eq!(written(&read), line);
        assert_eq!(
            written(&Request::List(ListArgs { image: None })),
            r#"{"execute":"snapshot-list","arguments":{}}"#
        );
    }

    #[test]
    fn what_is_not_known_is_refused() {
        let refusals = [
            (r#"{"execute":"quit"}"#, "unknown variant `quit`"),
            (r#"{"execute":"snapshot-create","arguments":{}}"#, "missing field `name`"),
            (r#"{"execute":"snapshot-list","arguments":{"imag":"x"}}"#, "unknown field `imag`"),
            (r#"{"execute":"snapshot-list","arguments":{},"x":1}"#, "x"),
            ("[]", "invalid"),
            ("", "EOF"),
        ];
        for (line, why) in refusals {
            let error = serde_json::from_str::<Request>(line).expect_err(line).to_string();
            assert!(error.contains(why), "{line}: {error}");
        }
    }
}
