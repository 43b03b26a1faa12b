//! Dirty bitmaps. All are persistent here, so one that is to end with the process is refused.

use std::rc::Rc;

use serde_json::{Value, json};

use super::arguments::Arguments;
use super::context::Context;
use super::errors::{QmpError, Returned};

/// `block-dirty-bitmap-add`.
pub(super) async fn add(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let (node, name) = (given.text("node")?, given.text("name")?);
    let granularity = given.some_integer("granularity")?;
    let is_persistent = given.flag("persistent", false)?;
    let disabled = given.flag("disabled", false)?;
    given.end()?;
    let disk = context.disk(&node)?;
    if name.is_empty() {
        return Err(QmpError::generic("Bitmap name cannot be empty"));
    }
    if granularity.is_some_and(|bytes| bytes < 512 || bytes.count_ones() != 1) {
        return Err(QmpError::generic("Granularity must be power of 2 and at least 512"));
    }
    if find(context, &disk, &name).await?.is_some() {
        return Err(QmpError::generic(format!("Bitmap already exists: {name}")));
    }
    if !is_persistent {
        return Err(QmpError::generic("bitmaps are persistent here: set 'persistent' to true"));
    }
    let mut params = json!({ "disk": disk, "name": name, "disabled": disabled });
    if let Some(granularity) = granularity {
        params["granularity"] = granularity.into();
    }
    context.call("bitmap.add", params).await?;
    Ok(json!({}))
}

/// `block-dirty-bitmap-remove`.
pub(super) async fn remove(context: &Rc<Context>, given: Arguments) -> Returned {
    change(context, given, "bitmap.remove").await
}

/// `block-dirty-bitmap-clear`.
pub(super) async fn clear(context: &Rc<Context>, given: Arguments) -> Returned {
    change(context, given, "bitmap.clear").await
}

/// `block-dirty-bitmap-enable`.
pub(super) async fn enable(context: &Rc<Context>, given: Arguments) -> Returned {
    change(context, given, "bitmap.enable").await
}

/// `block-dirty-bitmap-disable`.
pub(super) async fn disable(context: &Rc<Context>, given: Arguments) -> Returned {
    change(context, given, "bitmap.disable").await
}

async fn change(context: &Rc<Context>, mut given: Arguments, method: &str) -> Returned {
    let (node, name) = (given.text("node")?, given.text("name")?);
    given.end()?;
    let disk = context.disk(&node)?;
    check_exists(context, &disk, &name).await?;
    context.call(method, json!({ "disk": disk, "name": name })).await?;
    Ok(json!({}))
}

/// `block-dirty-bitmap-merge`: of bitmaps of the same disk. Several are merged one after the other; where one fails, those
/// before it have been.
pub(super) async fn merge(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let (node, target) = (given.text("node")?, given.text("target")?);
    let sources = given.list("bitmaps")?;
    given.end()?;
    let disk = context.disk(&node)?;
    check_exists(context, &disk, &target).await?;
    let mut names = Vec::new();
    for (index, source) in sources.into_iter().enumerate() {
        let name = source_name(context, &disk, index, source)?;
        check_exists(context, &disk, &name).await?;
        names.push(name);
    }
    for source in names {
        let params = json!({ "disk": disk, "name": target, "source": source });
        context.call("bitmap.merge", params).await?;
    }
    Ok(json!({}))
}

/// A bitmap by its name alone, or with its node.
fn source_name(
    context: &Context,
    disk: &str,
    index: usize,
    source: Value,
) -> Result<String, QmpError> {
    if let Value::String(name) = source {
        return Ok(name);
    }
    let mut source = Arguments::element("bitmaps", index, source)?;
    let (node, name) = (source.text("node")?, source.text("name")?);
    source.end()?;
    match context.disk(&node)? == disk {
        true => Ok(name),
        false => Err(QmpError::generic(format!(
            "Bitmap '{name}' is of '{node}', and only bitmaps of '{disk}' can be merged into one of '{disk}' here"
        ))),
    }
}

async fn check_exists(context: &Context, disk: &str, name: &str) -> Result<(), QmpError> {
    match find(context, disk, name).await? {
        Some(_) => Ok(()),
        None => Err(QmpError::generic(format!("Dirty bitmap '{name}' not found"))),
    }
}

async fn find(context: &Context, disk: &str, name: &str) -> Result<Option<Value>, QmpError> {
    let bitmaps = context.call("bitmap.list", json!({ "disk": disk })).await?;
    let mut bitmaps = bitmaps.as_array().into_iter().flatten();
    Ok(bitmaps.find(|bitmap| bitmap["name"] == name).cloned())
}
