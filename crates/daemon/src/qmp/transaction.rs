//! `transaction`: several changes at one moment, or none. Each transaction is one call of the control socket, so it has either overlays, or
//! bitmaps, or one snapshot.

use std::rc::Rc;

use serde_json::json;

use super::arguments::Arguments;
use super::context::Context;
use super::errors::{QmpError, Returned};
use super::{bitmaps, overlays, snapshots};

/// The kinds of actions that there are.
const KINDS: &[&str] = &[
    "abort",
    "block-dirty-bitmap-add",
    "block-dirty-bitmap-remove",
    "block-dirty-bitmap-clear",
    "block-dirty-bitmap-enable",
    "block-dirty-bitmap-disable",
    "block-dirty-bitmap-merge",
    "blockdev-snapshot",
    "blockdev-snapshot-sync",
    "blockdev-snapshot-internal-sync",
];

/// Actions that are made together.
#[derive(Default)]
struct Actions {
    overlays: Vec<overlays::Overlay>,
    bitmaps: bitmaps::Changes,
    snapshots: Vec<Arguments>,
}

/// Carries the actions out, unless one of them is to fail.
pub(super) async fn run(context: &Rc<Context>, mut given: Arguments) -> Returned {
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
        let is_alone = |kinds: [bool; 2]| !kinds.contains(&true);
        let (has_overlays, has_bitmaps) = (!self.overlays.is_empty(), !self.bitmaps.is_empty());
        match (self.snapshots.pop(), has_overlays) {
            (None, false) if !has_bitmaps => Ok(json!({})),
            (None, false) => self.bitmaps.run(context).await,
            (None, true) if !has_bitmaps => overlays::put_on(context, self.overlays).await,
            (Some(data), false) if self.snapshots.is_empty() && is_alone([has_bitmaps, has_overlays]) => {
                snapshots::create(context, data).await
            }
            _ => Err(QmpError::generic(
                "a transaction has overlays, or bitmaps, or one internal snapshot here: these are not made at one moment",
            )),
        }
    }
}
