//! `blockdev-set-active`: hands an image from one daemon to another. An inactive node reads its
//! image without a lock.

use std::rc::Rc;

use blockhouse_disk::{Access, is_inactive};
use serde_json::json;

use super::arguments::Arguments;
use super::context::Context;
use super::errors::{QmpError, Returned};

/// `blockdev-set-active`: for one node, or for all.
pub(super) async fn set_active(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let name = given.some_text("node-name")?;
    let is_active = given.needed_flag("active")?;
    given.end()?;
    let disks = match &name {
        Some(name) => disk_to_change(context, name, is_active)?.into_iter().collect(),
        None => context.running.disks().all().iter().map(|disk| disk.name().to_owned()).collect(),
    };
    let disks: Vec<String> = disks;
    if !is_active && disks.iter().any(|disk| has_writers(context, disk)) {
        let what = if name.is_some() { "node" } else { "all nodes" };
        let why = format!("Failed to inactivate {what}: Operation not permitted");
        return Err(QmpError::generic(why));
    }
    for disk in disks {
        change(context, &disk, is_active).await?;
    }
    Ok(json!({}))
}

/// The disk to change for a node; `None` if the node is below another one and is in that state.
fn disk_to_change(
    context: &Context,
    name: &str,
    is_active: bool,
) -> Result<Option<String>, QmpError> {
    let (disk, is_top) = {
        let state = context.state.borrow();
        let above = state.user_of(name).unwrap_or(name);
        let filtered = state.filters.get(name).map(|filter| (filter.disk.clone(), 0));
        let found = filtered.or_else(|| context.find_node(name));
        let is_top = found.as_ref().is_some_and(|(_, depth)| *depth == 0);
        let none = || QmpError::generic(format!("Failed to find node with node-name='{name}'"));
        (found.or_else(|| context.find_node(above)).ok_or_else(none)?.0, is_top)
    };
    let found = context.running.disks().find(&disk);
    let is_so = found.is_some_and(|found| is_inactive(&found.disk) != is_active);
    match (is_top, is_active) {
        (true, _) => Ok(Some(disk)),
        _ if is_so => Ok(None),
        (false, false) => Err(QmpError::generic("Node has active parent node")),
        (false, true) => Err(QmpError::generic(format!(
            "Node '{name}' becomes active with the node above it here: use '{}'",
            context.state.borrow().top_of(&disk)
        ))),
    }
}

/// Whether a disk has writable exports that do not allow it to become inactive.
fn has_writers(context: &Context, disk: &str) -> bool {
    let state = context.state.borrow();
    context.running.exports().of_disk(disk).iter().any(|export| {
        let address = export.address.to_string();
        let mut named = state.exports.iter();
        let is_allowed = named.any(|one| one.allows_inactive && one.address == address);
        export.options.access == Access::ReadWrite && !is_allowed
    })
}

/// Makes a disk active or inactive.
pub(super) async fn change(context: &Context, disk: &str, is_active: bool) -> Result<(), QmpError> {
    context.answers.check("disk.set").map_err(QmpError::generic)?;
    context.running.set_active(disk, is_active).await.map_err(QmpError::failed)?;
    context.state.borrow_mut().note_activity(disk, is_active);
    Ok(())
}

/// Refuses an active node over an inactive one; `child` is the role of the lower node.
pub(super) fn check_child(
    (name, is_active): (&str, bool),
    (child, below, is_inactive): (&str, &str, bool),
) -> Result<(), QmpError> {
    if is_active && is_inactive {
        let why = format!("Inactive '{below}' can't be a {child} child of active '{name}'");
        return Err(QmpError::generic(why));
    }
    Ok(())
}
