//! Filter nodes: `throttle`, which limits a disk.
//!
//! A filter is another name of its disk. Its limits are the disk's limits, and so apply to exports
//! of the disk's own node too.

use std::rc::Rc;

use serde_json::{Value, json};

use super::arguments::Arguments;
use super::context::Context;
use super::errors::QmpError;
use super::objects::limits_of;
use super::opening::{Asked, check_name, close, open_node};
use super::state::Filter;

/// Adds a `throttle` node.
pub(super) async fn add_throttle(
    context: &Rc<Context>,
    mut given: Arguments,
    name: &str,
) -> Result<(), QmpError> {
    let group = given.text("throttle-group")?;
    let (disk, is_implicit) = match given.some_object_or_text("file")? {
        Some(mut file) => {
            given.end()?;
            // Checks the group before anything is opened.
            limits_of(context, &group)?;
            let mut asked = Asked::take(&mut file)?;
            if asked.is_throttle() {
                let why = "Driver 'throttle' is not possible below another one here";
                return Err(QmpError::generic(why));
            }
            asked.name.iter().try_for_each(|name| check_name(context, name))?;
            let below = asked.name.clone().unwrap_or_else(|| implicit_name(context));
            asked.name = Some(below.clone());
            open_node(context, file, asked, &below).await?;
            (context.disk(&below)?, true)
        }
        None => {
            let below = given.text("file")?;
            given.end()?;
            let disk = context.disk(&below)?;
            let is_filter = context.state.borrow().filters.contains_key(&below);
            if is_filter || context.state.borrow().filter_on(&disk).is_some() {
                return Err(QmpError::generic(format!(
                    "Node '{below}' has a filter on it, and is not possible below '{name}'"
                )));
            }
            (disk, false)
        }
    };
    let limits = limits_of(context, &group)?;
    if let Err(error) = set(context, &disk, limits).await {
        if is_implicit {
            close(context, &disk, 0).await?;
        }
        return Err(error);
    }
    let filter = Filter { disk, group, is_implicit };
    context.state.borrow_mut().filters.insert(name.to_owned(), filter);
    Ok(())
}

async fn set(context: &Context, disk: &str, limits: Value) -> Result<(), QmpError> {
    context.call("limit.set", json!({ "disk": disk, "limits": limits })).await?;
    Ok(())
}

/// Moves a filter to another group.
pub(super) async fn change_group(
    context: &Context,
    name: &str,
    group: String,
) -> Result<(), QmpError> {
    let limits = limits_of(context, &group)?;
    let disk = context.disk(name)?;
    set(context, &disk, limits).await?;
    let mut state = context.state.borrow_mut();
    state.filters.entry(name.to_owned()).and_modify(|filter| filter.group = group);
    Ok(())
}

/// A name that no client can choose, as QEMU generates for a node without a name. It is generated
/// once.
pub(super) fn implicit_name(context: &Context) -> String {
    let mut state = context.state.borrow_mut();
    state.implicit_nodes += 1;
    format!("#block{:03}", state.implicit_nodes - 1)
}

/// Removes a filter.
pub(super) async fn delete(context: &Context, name: &str, filter: &Filter) -> Result<(), QmpError> {
    let Filter { disk, is_implicit, .. } = filter;
    if *is_implicit {
        close(context, disk, 0).await?
    } else {
        set(context, disk, json!({})).await?
    }
    context.state.borrow_mut().filters.remove(name);
    Ok(())
}
