//! Filter nodes: `throttle`, which limits a disk, and `raw` over the node of a format.
//!
//! A filter is another name of its disk. Its limits are the disk's limits, and so apply to exports
//! of the disk's own node too.

use std::rc::Rc;

use serde_json::{Value, json};

use super::arguments::Arguments;
use super::context::Context;
use super::errors::QmpError;
use super::objects::limits_of;
use super::opening::{Asked, FORMATS, check_name, close, open_node};
use super::state::Filter;

/// Whether the node to add is a filter: a `throttle`, or a `raw` node that is not over a file.
pub(super) fn is_filter(context: &Context, asked: &Asked, given: &Arguments) -> bool {
    let is_over_format = || match given.peek("file") {
        Some(Value::String(below)) => {
            context.disk(below).is_ok() && !context.state.borrow().files.contains_key(below)
        }
        Some(file) => file["driver"].as_str().is_some_and(|driver| FORMATS.contains(&driver)),
        None => false,
    };
    asked.is_throttle() || asked.is_raw() && is_over_format()
}

/// Adds a filter.
pub(super) async fn add(
    context: &Rc<Context>,
    mut given: Arguments,
    asked: &Asked,
    name: &str,
) -> Result<(), QmpError> {
    let group = if asked.is_throttle() { Some(given.text("throttle-group")?) } else { None };
    if asked.is_raw() {
        let why = "over the node of a format: a part is of a file";
        given.only("offset", &[json!(0), json!("0")], why)?;
        given.only("size", &[], why)?;
    }
    let limits = || group.as_ref().map(|group| limits_of(context, group)).transpose();
    let (disk, is_implicit) = match given.some_object_or_text("file")? {
        Some(mut file) => {
            given.end()?;
            // Checks the group before anything is opened.
            limits()?;
            let is_read_only = asked.is_read_only;
            let mut asked = Asked::take(&mut file)?;
            asked.is_read_only |= is_read_only;
            if is_filter(context, &asked, &file) {
                let why = "A filter is not possible below another one here";
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
    if let Some(limits) = limits()?
        && let Err(error) = set(context, &disk, limits).await
    {
        if is_implicit {
            close(context, &disk, 0).await?;
        }
        return Err(error);
    }
    let filter = Filter { disk, group, is_read_only: asked.is_read_only, is_implicit };
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
    state.filters.entry(name.to_owned()).and_modify(|filter| filter.group = Some(group));
    Ok(())
}

/// A name that no client can choose, as QEMU generates for a node without a name. Each call returns
/// another name.
pub(super) fn implicit_name(context: &Context) -> String {
    let mut state = context.state.borrow_mut();
    state.implicit_nodes += 1;
    format!("#block{:03}", state.implicit_nodes - 1)
}

/// Removes a filter.
pub(super) async fn delete(context: &Context, name: &str, filter: &Filter) -> Result<(), QmpError> {
    let Filter { disk, group, is_implicit, .. } = filter;
    if *is_implicit {
        close(context, disk, 0).await?
    } else if group.is_some() {
        set(context, disk, json!({})).await?
    }
    context.state.borrow_mut().filters.remove(name);
    Ok(())
}
