//! `blockdev-reopen`: changes of a node in use: whether it is read-only, and the group of a
//! `throttle` node.

use std::rc::Rc;

use blockhouse_disk::{Access, is_inactive};
use serde_json::{Value, json};

use super::arguments::Arguments;
use super::context::Context;
use super::errors::{QmpError, Returned};
use super::filters::change_group;
use super::opening::Asked;

/// `blockdev-reopen`: checks the changes of all nodes, then makes them one after the other.
pub(super) async fn reopen(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let options = given.list("options")?;
    given.end()?;
    let mut changes = Vec::new();
    for (index, options) in options.into_iter().enumerate() {
        let mut options = Arguments::element("options", index, options)?;
        let mut asked = Asked::take(&mut options)?;
        let Some(name) = asked.name.clone() else {
            return Err(QmpError::generic("node-name not specified"));
        };
        if !context.has_node(&name) {
            return Err(QmpError::generic(format!("Failed to find node with node-name='{name}'")));
        }
        let filter = context.state.borrow().filters.get(&name).cloned();
        if filter.is_some_and(|filter| filter.group.is_none()) {
            let why = format!("Node '{name}' is another name of the node below: reopen that one");
            return Err(QmpError::generic(why));
        }
        if asked.is_throttle() {
            let group = options.text("throttle-group")?;
            changes.push((name, Err(group)));
            continue;
        }
        let disk = context.disk(&name)?;
        let opened = context.state.borrow().opened.get(&disk).cloned();
        let Some(opened) = opened else {
            let why = format!("Node '{name}' was not added by QMP, and is not reopened");
            return Err(QmpError::generic(why));
        };
        asked.take_part(&mut options)?;
        let is_read_only = asked.check_same(&name, &opened)?;
        if is_read_only {
            check_exports(context, &name, &disk)?;
        }
        check_below(context, &name, &mut options)?;
        changes.push((disk, Ok(is_read_only)));
    }
    for (name, change) in changes {
        match change {
            Ok(is_read_only) => {
                let params = json!({ "disk": name, "read-only": is_read_only });
                context.call("disk.set", params).await?;
                context.state.borrow_mut().note_access(&name, is_read_only);
            }
            Err(group) => change_group(context, &name, group).await?,
        }
    }
    Ok(json!({}))
}

/// Refuses to make an active disk read-only if clients may write to it. (`disk.set` refuses an
/// inactive disk.)
fn check_exports(context: &Context, name: &str, disk: &str) -> Result<(), QmpError> {
    let is_active =
        context.running.disks().find(disk).is_some_and(|running| !is_inactive(&running.disk));
    let exports = context.running.exports().of_disk(disk);
    let mut accesses = exports.iter().map(|export| export.options.access);
    if is_active && accesses.any(|access| access == Access::ReadWrite) {
        let why = format!("Read-only block node '{name}' cannot support read-write users");
        return Err(QmpError::generic(why));
    }
    Ok(())
}

/// Refuses to put another node below this one.
fn check_below(context: &Context, name: &str, given: &mut Arguments) -> Result<(), QmpError> {
    let rest = given.rest();
    let below = context.state.borrow().file_of(name);
    if rest.get("data-file").is_some_and(|data| !data.is_null()) {
        let why = format!("Node '{name}' stays on its data file: leave 'data-file' out");
        return Err(QmpError::generic(why));
    }
    match rest.get("file") {
        Some(Value::String(file)) if *file != below => {
            if context.has_node(file) {
                Err(QmpError::generic(format!(
                    "Node '{name}' stays on '{below}': another file is not possible here"
                )))
            } else {
                Err(QmpError::no_node("", file))
            }
        }
        _ => Ok(()),
    }
}
