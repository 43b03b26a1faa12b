//! `transaction`: one change, or none. Several changes at one moment are no call of the control socket, so they are refused.

use std::rc::Rc;

use serde_json::json;

use super::arguments::Arguments;
use super::context::Context;
use super::errors::{QmpError, Returned};
use super::{bitmaps, snapshots};

/// The kinds of actions that there are.
const KINDS: &[&str] = &[
    "abort",
    "block-dirty-bitmap-add",
    "block-dirty-bitmap-remove",
    "block-dirty-bitmap-clear",
    "block-dirty-bitmap-enable",
    "block-dirty-bitmap-disable",
    "block-dirty-bitmap-merge",
    "blockdev-snapshot-internal-sync",
];

/// Carries the only action out, unless one of them is to fail.
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
    if parsed.iter().any(|(kind, _)| *kind == "abort") {
        return Err(QmpError::generic("Transaction aborted using Abort action"));
    }
    let mut parsed = parsed.into_iter();
    match (parsed.next(), parsed.next()) {
        (None, _) => Ok(json!({})),
        (Some((kind, data)), None) => act(context, kind, data).await,
        (Some(_), Some(_)) => Err(QmpError::generic(
            "a transaction has one action here: several cannot be made at one moment",
        )),
    }
}

async fn act(context: &Rc<Context>, kind: &str, data: Arguments) -> Returned {
    match kind {
        "block-dirty-bitmap-add" => bitmaps::add(context, data).await,
        "block-dirty-bitmap-remove" => bitmaps::remove(context, data).await,
        "block-dirty-bitmap-clear" => bitmaps::clear(context, data).await,
        "block-dirty-bitmap-enable" => bitmaps::enable(context, data).await,
        "block-dirty-bitmap-disable" => bitmaps::disable(context, data).await,
        "block-dirty-bitmap-merge" => bitmaps::merge(context, data).await,
        _ => snapshots::create(context, data).await,
    }
}
