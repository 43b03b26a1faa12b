//! `transaction`: several changes at one moment, or none. Each transaction is one call of the
//! control socket, so it has either overlays, or bitmaps and backups, or one snapshot.

use std::rc::Rc;

use serde_json::json;

use super::arguments::Arguments;
use super::context::Context;
use super::errors::{QmpError, Returned};
use super::{backups, bitmaps, overlays, snapshots};

/// The kinds of actions that are supported.
const KINDS: &[&str] = &[
    "abort",
    "block-dirty-bitmap-add",
    "block-dirty-bitmap-remove",
    "block-dirty-bitmap-clear",
    "block-dirty-bitmap-enable",
    "block-dirty-bitmap-disable",
    "block-dirty-bitmap-merge",
    "blockdev-backup",
    "blockdev-snapshot",
    "blockdev-snapshot-sync",
    "blockdev-snapshot-internal-sync",
];

/// Actions that are made together.
#[derive(Default)]
struct Actions {
    overlays: Vec<overlays::Overlay>,
    bitmaps: bitmaps::Changes,
    backups: Vec<backups::Backup>,
    snapshots: Vec<Arguments>,
}

/// Carries the actions out, unless one of them is invalid or is `abort`.
pub(super) async fn run(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let _claim = context.running.claims().claim(given.nodes()).await;
    let actions = given.list("actions")?;
    given.only(
        "properties",
        &[json!({}), json!({ "completion-mode": "individual" })],
        "jobs complete one by one",
    )?;
    given.end()?;
    let mut parsed = Vec::new();
    for (index, action) in actions.into_iter().enumerate() {
        let mut action = Arguments::element("actions", index, action)?;
        let kind = action.needed_word("type", KINDS)?;
        parsed.push((kind, action.object("data")?));
        action.end()?;
    }
    let mut taken = Actions::default();
    for (kind, data) in parsed {
        taken.take(context, kind, data).await?;
    }
    taken.run(context).await
}

impl Actions {
    async fn take(
        &mut self,
        context: &Rc<Context>,
        kind: &'static str,
        data: Arguments,
    ) -> Result<(), QmpError> {
        match kind {
            "abort" => {
                data.end()?;
                return Err(QmpError::generic("Transaction aborted using Abort action"));
            }
            "blockdev-backup" => {
                self.backups.push(backups::take(context, &self.bitmaps, data).await?);
            }
            "blockdev-snapshot" => self.overlays.push(overlays::of_node(context, data)?),
            "blockdev-snapshot-sync" => self.overlays.push(overlays::to_create(context, data)?),
            "blockdev-snapshot-internal-sync" => self.snapshots.push(data),
            _ => {
                let action = kind.strip_prefix("block-dirty-bitmap-").unwrap_or(kind);
                self.bitmaps.take(context, action, data).await?;
            }
        }
        Ok(())
    }

    async fn run(mut self, context: &Rc<Context>) -> Returned {
        let has_bitmaps = !self.bitmaps.is_empty() || !self.backups.is_empty();
        let first = self.snapshots.pop();
        match (first, self.snapshots.len(), has_bitmaps, self.overlays.is_empty()) {
            (None, _, false, true) => Ok(json!({})),
            (None, _, false, false) => overlays::put_on(context, self.overlays).await,
            (None, _, true, true) if self.backups.is_empty() => self.bitmaps.run(context).await,
            (None, _, true, true) => {
                backups::begin(context, self.bitmaps.into_params(), self.backups).await
            }
            (Some(data), 0, false, true) => snapshots::create(context, data).await,
            _ => Err(QmpError::generic(
                "a transaction has overlays, or bitmaps and backups, or one internal snapshot here: these are not made at one moment",
            )),
        }
    }
}
