//! `blockdev-add` and `blockdev-del`. One command at a time adds or removes a node of a given name;
//! others wait for its claim.

use std::rc::Rc;

use blockhouse_config::text_fields::repeated;
use blockhouse_daemon::Name;
use serde_json::json;

use super::arguments::Arguments;
use super::context::Context;
use super::errors::{QmpError, Returned, busy_behind};
use super::filters;
use super::opening::{Asked, check_name, close, open_node};

/// `blockdev-add`.
pub(super) async fn add(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let names = given.nodes();
    if let Some(Name::Node(name)) = repeated(&names) {
        return Err(QmpError::generic(format!("Duplicate nodes with node-name='{name}'")));
    }
    let _claim = context.running.claims().claim(names).await;
    let asked = Asked::take(&mut given)?;
    let needed = || QmpError::generic("'node-name' must be specified for the root node");
    let name = asked.name.clone().ok_or_else(needed)?;
    check_name(context, &name)?;
    if filters::is_filter(context, &asked, &given) {
        filters::add(context, given, &asked, &name).await?
    } else {
        open_node(context, given, asked, &name).await?
    }
    Ok(json!({}))
}

/// `blockdev-del`.
pub(super) async fn delete(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let _claim = context.running.claims().claim(given.nodes()).await;
    let name = given.text("node-name")?;
    given.end()?;
    let file = context.state.borrow().files.get(&name).cloned();
    if file.is_some_and(|file| file.user.is_some()) {
        return Err(in_use(&name));
    }
    let filter = context.state.borrow().filters.get(&name).cloned();
    if let Some(filter) = filter {
        check_unexported(context, &name)?;
        check_no_upper(context, &name)?;
        filters::delete(context, &name, &filter).await?;
        return Ok(json!({}));
    }
    if context.state.borrow().left.contains(&name) {
        check_no_upper(context, &name)?;
        context.state.borrow_mut().forget_left(&name);
        return Ok(json!({}));
    }
    let Some((disk, depth)) = context.find_node(&name) else {
        return Err(QmpError::generic(format!("Failed to find node with node-name='{name}'")));
    };
    let nodes = context.state.borrow().nodes_of(&disk);
    // An overlay of `blockdev-snapshot-sync` cannot be removed while its chain has a node that the
    // client has added: it is removed together with that node. If a stream has removed all such
    // nodes, this command closes the overlay.
    let has_owner = nodes.iter().any(|node| node.is_owned);
    let is_served = !context.running.exports().of_disk(&disk).is_empty();
    if !nodes[depth].is_owned && has_owner && !is_served {
        return Err(QmpError::generic(format!("Node {name} is not owned by the monitor")));
    }
    if let Some(user) = nodes[..depth].iter().rev().find(|user| user.is_owned) {
        return Err(busy_behind(&name, &user.name));
    }
    if depth > 0 && is_served {
        return Err(busy_behind(&name, &nodes[depth - 1].name));
    }
    if is_served {
        return Err(QmpError::generic(format!("Node {name} is in use")));
    }
    check_unused(context, &name, &disk)?;
    if context.state.borrow().filter_on(&disk).is_some() {
        return Err(in_use(&name));
    }
    close(context, &disk, depth).await?;
    Ok(json!({}))
}

/// Refuses to remove a node that is the backing node of another disk.
fn check_no_upper(context: &Context, name: &str) -> Result<(), QmpError> {
    let state = context.state.borrow();
    let mut over = state.over.iter();
    over.find(|(_, lower)| *lower == name).map_or(Ok(()), |(user, _)| Err(busy_behind(name, user)))
}

/// As [`check_no_upper`], also for the target of a backup that is being read.
fn check_unused(context: &Context, name: &str, disk: &str) -> Result<(), QmpError> {
    check_no_upper(context, name)?;
    match context.state.borrow().pull_to(disk) {
        Some(_) => Err(QmpError::generic(format!(
            "Node '{name}' is busy: block device is in use by block job: backup"
        ))),
        None => Ok(()),
    }
}

/// The error for a node that other nodes use, in QEMU's words.
fn in_use(name: &str) -> QmpError {
    QmpError::generic(format!("Block device {name} is in use"))
}

/// Refuses to remove a filter that has exports.
fn check_unexported(context: &Context, name: &str) -> Result<(), QmpError> {
    let state = context.state.borrow();
    if state.exports.iter().any(|export| export.node == name) {
        return Err(QmpError::generic(format!("Node {name} is in use")));
    }
    Ok(())
}
