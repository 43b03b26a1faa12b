//! Changes of nodes.

use std::rc::Rc;

use serde_json::json;

use super::arguments::Arguments;
use super::context::Context;
use super::errors::{QmpError, Returned};

/// `block_resize`: also shrinks a disk without confirmation, as QEMU does. Unlike in QEMU, a disk
/// with exports cannot be shrunk.
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

/// `change-backing-file`, only for the top image of a disk. The format of the backing file in the
/// header does not change.
pub(super) async fn change_backing_file(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let device = given.text("device")?;
    let node = given.text("image-node-name")?;
    let name = given.text("backing-file")?;
    given.end()?;
    let disk = context.disk(&device)?;
    if !context.has_node(&node) {
        return Err(QmpError::no_node("", &node));
    }
    let other = match context.find_node(&node) {
        Some((other, 0)) => other,
        Some(_) => {
            return Err(QmpError::generic(format!(
                "Node '{node}' is behind another one, and its image is not changed here"
            )));
        }
        None => context.disk(&node)?,
    };
    let backing = |disk: &str| {
        let running = context.running.disks().find(disk);
        running.is_some_and(|running| running.disk.image().backing_file().is_some())
    };
    if !backing(&other) {
        let why = "not allowing backing file change on an image without a backing file";
        return Err(QmpError::generic(why));
    }
    if other != disk {
        let why = format!("'{device}' and image file are not in the same chain");
        return Err(QmpError::generic(why));
    }
    context.call("disk.set", json!({ "disk": disk, "backing-file": name })).await?;
    Ok(json!({}))
}

/// `block-set-write-threshold`, only for the file node below the image of a disk: the threshold
/// applies to the end of the image's clusters in the file. QEMU checks it at each write, this
/// server twice a second.
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
