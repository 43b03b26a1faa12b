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

/// `block-set-write-threshold`: of the node below a qcow2 image, whose clusters it counts. QEMU
/// looks at each write, and this program twice a second.
pub(super) async fn set_write_threshold(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let node = given.text("node-name")?;
    let threshold = given.needed_unsigned("write-threshold")?;
    given.end()?;
    let disk = {
        let state = context.state.borrow();
        let user = state.user_of(&node).unwrap_or(node.as_str());
        match context.find_node(user) {
            Some((disk, 0)) if user != node => disk,
            _ if !context.has_node(&node) => {
                return Err(QmpError::generic(format!("Device '{node}' not found")));
            }
            _ => {
                return Err(QmpError::generic(format!(
                    "Node '{node}' has no write threshold here: the node of the file below the image of a disk has one"
                )));
            }
        }
    };
    context.call("disk.set", json!({ "disk": disk, "write-threshold": threshold })).await?;
    let mut state = context.state.borrow_mut();
    match threshold {
        0 => state.write_thresholds.remove(&disk),
        _ => state.write_thresholds.insert(disk, node),
    };
    Ok(json!({}))
}
