//! Changes of nodes.

use std::rc::Rc;

use serde_json::json;

use super::arguments::Arguments;
use super::context::Context;
use super::errors::{QmpError, Returned};

/// `block_resize`: also to fewer bytes, which QEMU does without asking. Exports are in the way of
/// that here.
pub(super) async fn resize(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let device = given.some_text("device")?.unwrap_or_default();
    let node = given.some_text("node-name")?.unwrap_or_default();
    let size = given.integer("size")?;
    given.end()?;
    let disk = context.disk_of(&device, &node)?;
    if size < 0 {
        return Err(QmpError::generic("Parameter 'size' expects a >0 size"));
    }
    if size % 512 != 0 {
        return Err(QmpError::generic("The new size must be a multiple of 512"));
    }
    context.call("disk.resize", json!({ "disk": disk, "size": size, "shrink": true })).await?;
    Ok(json!({}))
}
