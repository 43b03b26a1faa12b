//! `blockdev-add` and `blockdev-del`.

use std::rc::Rc;

use serde_json::json;

use super::arguments::Arguments;
use super::context::Context;
use super::errors::{QmpError, Returned};
use super::filters;
use super::opening::{Asked, check_name, close, open_node};

/// `blockdev-add`.
pub(super) async fn add(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let asked = Asked::take(&mut given)?;
    let needed = || QmpError::generic("'node-name' must be specified for the root node");
    let name = asked.name.clone().ok_or_else(needed)?;
    check_name(context, &name)?;
    match asked.is_throttle() {
        true => filters::add_throttle(context, given, &name).await?,
        false => open_node(context, given, asked, &name).await?,
    }
    Ok(json!({}))
}

/// `blockdev-del`.
pub(super) async fn delete(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let name = given.text("node-name")?;
    given.end()?;
    let file = context.state.borrow().files.get(&name).cloned();
    if let Some(user) = file.and_then(|file| file.user) {
        return Err(QmpError::generic(format!(
            "Node '{name}' is busy: node is used as 'file' of '{user}'"
        )));
    }
    if context.disk(&name).is_err() {
        return Err(QmpError::generic(format!("Failed to find node with node-name='{name}'")));
    }
    let filter = context.state.borrow().filters.get(&name).cloned();
    if let Some(filter) = filter {
        check_unexported(context, &name)?;
        filters::delete(context, &name, &filter).await?;
        return Ok(json!({}));
    }
    if let Some(user) = context.state.borrow().filter_on(&name) {
        return Err(QmpError::generic(format!(
            "Node '{name}' is busy: node is used as 'file' of '{user}'"
        )));
    }
    close(context, &name).await?;
    Ok(json!({}))
}

/// Refuses to remove a filter with exports: they are those of its disk.
fn check_unexported(context: &Context, name: &str) -> Result<(), QmpError> {
    let state = context.state.borrow();
    match state.exports.iter().find(|export| export.node == name) {
        Some(export) => Err(QmpError::generic(format!(
            "Node '{name}' is busy: node is used by the export '{}'",
            export.id
        ))),
        None => Ok(()),
    }
}
