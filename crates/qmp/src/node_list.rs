//! `query-named-block-nodes`: the list of nodes.
//!
//! A disk is two nodes: its format's, with the disk's name, and its file's. Each backing file that
//! was a node before is two more nodes. Other backing files are not nodes: they are listed in the
//! image that refers to them.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::rc::Rc;

use blockhouse_daemon::RunningDisk;
use blockhouse_disk::{Features, LayerInfo, is_inactive};
use blockhouse_images::{CacheMode, is_address};
use blockhouse_storage::Location;
use serde_json::{Value, json};

use super::arguments::Arguments;
use super::context::Context;
use super::errors::{QmpError, Returned};
use super::qcow2_words::qcow2_data;
use super::state::Filter;

/// The keys of limits in QEMU, and in this server.
const LIMITS: &[(&str, &str)] = &[
    ("bps", "bps"),
    ("bps_rd", "bps-read"),
    ("bps_wr", "bps-write"),
    ("iops", "iops"),
    ("iops_rd", "iops-read"),
    ("iops_wr", "iops-write"),
];

/// `query-named-block-nodes`: the newest disk first, as QEMU lists them.
pub(super) async fn nodes(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let is_flat = given.flag("flat", false)?;
    given.end()?;
    let mut nodes = Vec::new();
    let disks = context.call("disk.list", json!({})).await?;
    for disk in disks.as_array().into_iter().flatten().rev() {
        // The disk may have been closed meanwhile.
        if let Some(running) =
            context.running.disks().find(disk["disk"].as_str().unwrap_or_default())
        {
            add_nodes(context, disk, &running, is_flat, &mut nodes).await?;
        }
    }
    Ok(nodes.into())
}

/// The nodes of a disk.
async fn add_nodes(
    context: &Context,
    disk: &Value,
    running: &RunningDisk,
    is_flat: bool,
    nodes: &mut Vec<Value>,
) -> Result<(), QmpError> {
    let names = context.state.borrow().nodes_of(running.name());
    let top = names.first().map_or(running.name(), |node| &node.name);
    let is_file = context.state.borrow().files.contains_key(top);
    if let Some((name, filter)) = context.state.borrow().filter_on(running.name()) {
        nodes.push(filter_node(disk, running, name, filter));
    }
    if !is_file {
        let mut node = format_node(context, disk, running, is_flat).await?;
        node["node-name"] = top.into();
        nodes.push(node);
    }
    let state = context.state.borrow();
    let below = state.file_of(top);
    let file = if is_file { top } else { &below };
    let mut node = protocol_node(disk, running, file);
    if state.write_thresholds.get(running.name()).is_some_and(|of| of == file) {
        node["write_threshold"] = running.write_threshold().unwrap_or_default().into();
    }
    nodes.push(node);
    for (depth, node) in names.iter().enumerate().skip(1) {
        if let Some(layer) = running.layer_at(depth) {
            let below = state.file_of(&node.name);
            nodes.extend(layer_nodes((disk, running), depth, &layer, [&node.name, &below]));
        }
    }
    Ok(())
}

/// The nodes of a backing file of a disk.
fn layer_nodes(
    (disk, running): (&Value, &RunningDisk),
    depth: usize,
    layer: &LayerInfo<'_>,
    names: [&str; 2],
) -> [Value; 2] {
    let path = absolute(layer.name);
    let found = Path::new(layer.name).metadata().ok();
    let drivers = [layer.format_name, "file"];
    let images = [
        backing_image(running, depth),
        image_of(
            Path::new(layer.name),
            "file",
            found.as_ref().map_or(0, |found| found.len().next_multiple_of(512)),
            None,
        ),
    ];
    let mut drivers = drivers.into_iter().zip(images).zip(names);
    std::array::from_fn(|_| {
        let ((driver, mut image), name) = drivers.next().expect("two of each");
        image["filename"] = path.clone();
        image["actual-size"] = found.as_ref().map_or(0, |found| found.blocks() * 512).into();
        let mut node = frame(disk, running, driver);
        node["node-name"] = name.into();
        node["file"] = path.clone();
        node["ro"] = true.into();
        node["image"] = image;
        node
    })
}

/// The members that all nodes have.
fn frame(disk: &Value, running: &RunningDisk, driver: &str) -> Value {
    let mode = running.setup.cache;
    let is_inactive = is_inactive(&running.disk);
    let mut node = json!({
        "drv": driver,
        "file": running.path().to_string_lossy(),
        "ro": if is_inactive { running.setup.is_read_only().into() } else { disk["read-only"].clone() },
        "active": !is_inactive,
        "encrypted": false,
        "detect_zeroes": "off",
        "backing_file_depth": 0,
        "write_threshold": 0,
        "cache": {
            "writeback": !matches!(mode, CacheMode::Writethrough | CacheMode::Directsync),
            "direct": matches!(mode, CacheMode::None | CacheMode::Directsync),
            "no-flush": mode == CacheMode::Unsafe,
        },
    });
    LIMITS.iter().for_each(|(key, _)| node[*key] = 0.into());
    node
}

async fn format_node(
    context: &Context,
    disk: &Value,
    running: &RunningDisk,
    is_flat: bool,
) -> Result<Value, QmpError> {
    let name = running.name();
    let mut node = frame(disk, running, running.disk.image().image_format_name());
    node["encrypted"] = running.disk.image().is_encrypted().into();
    node["detect_zeroes"] = json!(running.setup.detect_zeroes);
    // With a throttle on the disk, the limits are the throttle group's and not this node's.
    let is_throttled = |(_, filter): (&str, &Filter)| filter.group.is_some();
    if !context.state.borrow().filter_on(name).is_some_and(is_throttled) {
        let limits = context.call("limit.get", json!({ "disk": name })).await?;
        for (key, limit) in LIMITS {
            node[*key] = limits[0]["limits"][*limit].as_u64().unwrap_or_default().into();
        }
    }
    let mut image = image(disk, running);
    // Formats without snapshots or bitmaps return an error, which is ignored.
    let snapshots = context.call("snapshot.list", json!({ "disk": name })).await;
    if let Some(Value::Array(snapshots)) = snapshots.ok().filter(|list| *list != json!([])) {
        image["snapshots"] = snapshots.into();
    }
    let bitmaps = context.call("bitmap.list", json!({ "disk": name })).await;
    if let Some(Value::Array(bitmaps)) = bitmaps.ok().filter(|list| *list != json!([])) {
        node["dirty-bitmaps"] = bitmaps.iter().rev().map(bitmap).collect();
    }
    // QEMU counts backing files only if it lists them.
    let depth = (1..).take_while(|depth| running.layer_at(*depth).is_some()).count();
    node["backing_file_depth"] = if is_flat { 0 } else { depth }.into();
    if let Some(behind) = running.layer_at(1) {
        node["backing_file"] = absolute(behind.name);
        if !is_flat {
            image["backing-image"] = backing_image(running, 1);
        }
    }
    node["image"] = image;
    Ok(node)
}

/// A bitmap, only with QEMU's keys.
fn bitmap(listed: &Value) -> Value {
    let mut told = json!({ "count": 0 });
    for key in ["name", "granularity", "recording", "persistent", "busy", "count"] {
        if let Some(value) = listed.get(key) {
            told[key] = value.clone();
        }
    }
    if listed["inconsistent"] == true {
        told["inconsistent"] = true.into();
    }
    told
}

/// The image of a disk, without its backing files.
fn image(disk: &Value, running: &RunningDisk) -> Value {
    let format = running.disk.image().image_format_name();
    let features = running.disk.image().features();
    let mut image = image_of(&running.path(), format, running.disk.size(), features.as_ref());
    add_space(&mut image, running);
    if let Some(size) = running.disk.image().cluster_size().filter(|_| format != "raw") {
        image["cluster-size"] = size.into();
    }
    if running.disk.image().is_encrypted() {
        image["encrypted"] = true.into();
    }
    if let Some(backing) = running.disk.image().backing_file() {
        image["backing-filename"] = String::from_utf8_lossy(&backing.name).into();
        if let Some(format) = &backing.format {
            image["backing-filename-format"] = format.as_str().into();
        }
        if let Some(behind) = running.layer_at(1) {
            image["full-backing-filename"] = absolute(behind.name);
        }
    }
    debug_assert_eq!(disk["disk"], running.name());
    image
}

/// The absolute path of an image. The address of an image on another server is not changed.
fn absolute(name: &str) -> Value {
    match std::path::absolute(name) {
        Ok(path) if !is_address(name.as_bytes()) => path.to_string_lossy().into(),
        _ => name.into(),
    }
}

fn image_of(path: &Path, format: &str, size: u64, features: Option<&Features>) -> Value {
    let mut image = json!({
        "filename": path.to_string_lossy(),
        "format": format,
        "virtual-size": size,
        "dirty-flag": features.is_some_and(|features| features.is_dirty),
    });
    if let Some(features) = features {
        image["format-specific"] = json!({ "type": format, "data": qcow2_data(features) });
    }
    image
}

fn add_space(image: &mut Value, running: &RunningDisk) {
    if let Ok(Some(bytes)) = running.disk.image().allocated_bytes() {
        image["actual-size"] = bytes.into();
    }
}

/// The image at a depth of the chain, with its backing files.
fn backing_image(running: &RunningDisk, depth: usize) -> Value {
    let Some(layer) = running.layer_at(depth) else { return Value::Null };
    let (path, features) = (Path::new(layer.name), layer.features.as_ref());
    let mut image = image_of(path, layer.format_name, layer.size, features);
    image["filename"] = absolute(layer.name);
    if running.layer_at(depth + 1).is_some() {
        image["backing-image"] = backing_image(running, depth + 1);
    }
    image
}

/// A filter on a disk.
fn filter_node(disk: &Value, running: &RunningDisk, name: &str, filter: &Filter) -> Value {
    let driver = if filter.group.is_some() { "throttle" } else { "raw" };
    let mut node = frame(disk, running, driver);
    node["node-name"] = name.into();
    if filter.is_read_only {
        node["ro"] = true.into();
    }
    node["image"] = image_of(&running.path(), driver, running.disk.size(), None);
    node
}

/// The file of a disk.
fn protocol_node(disk: &Value, running: &RunningDisk, name: &str) -> Value {
    let found = running.path().metadata().ok();
    // A disk that is a part of a file has no file of its own.
    let is_local = running.disk.image().file().is_some() || running.setup.part.is_some();
    let driver = match (is_local, &found) {
        (false, _) => match Location::of(&running.path()) {
            Ok(Location::Null(null)) => null.driver(),
            _ => "nbd",
        },
        (true, Some(found)) if !found.is_file() => "host_device",
        (true, _) => "file",
    };
    let mut node = frame(disk, running, driver);
    node["node-name"] = name.into();
    // Rounded up to a whole sector, as QEMU does for all nodes.
    let length = found.filter(|_| driver == "file").map(|found| found.len().next_multiple_of(512));
    let size = length.unwrap_or(running.disk.size());
    let mut image = image_of(&running.path(), driver, size, None);
    if is_local {
        // QEMU has the type "file" for devices, too.
        image["format-specific"] = json!({ "type": "file", "data": {} });
    }
    add_space(&mut image, running);
    node["image"] = image;
    node
}
