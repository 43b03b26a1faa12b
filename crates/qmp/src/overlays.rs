//! Overlays (`blockdev-snapshot`, `blockdev-snapshot-sync`): the image of a disk becomes the
//! backing file of its new image.
//!
//! All overlays of a transaction are one call (`disk.fork`): all disks get them at one moment, or
//! none does. The nodes of the backing files keep their names.

use std::path::PathBuf;
use std::rc::Rc;

use blockhouse_config::text_fields::repeated;
use blockhouse_disk::is_inactive;
use serde_json::{Value, json};

use super::arguments::{Arguments, is_well_formed};
use super::context::Context;
use super::errors::{QmpError, Returned};
use super::filters::implicit_name;
use super::opening::{close_disk, reopen};
use super::state::FormatNode;

/// A requested overlay.
pub(super) struct Overlay {
    /// The disk whose image the overlay becomes.
    disk: String,
    /// The disk's image before the change.
    before: PathBuf,
    /// The path of the overlay, which may not exist yet.
    path: PathBuf,
    node: FormatNode,
    /// The name of the overlay's own disk, for `blockdev-snapshot`. Empty for an existing file that
    /// is not open. `None` if the overlay is to be created.
    own_disk: Option<String>,
}

/// `blockdev-snapshot-sync`.
pub(super) async fn create(context: &Rc<Context>, given: Arguments) -> Returned {
    let _claim = context.running.claims().claim(given.nodes()).await;
    let overlay = to_create(context, given)?;
    put_on(context, vec![overlay]).await
}

/// `blockdev-snapshot`.
pub(super) async fn use_node(context: &Rc<Context>, given: Arguments) -> Returned {
    let overlay = of_node(context, given)?;
    put_on(context, vec![overlay]).await
}

/// The overlay of a `blockdev-snapshot-sync`.
pub(super) fn to_create(context: &Context, mut given: Arguments) -> Result<Overlay, QmpError> {
    let (device, node) = (given.some_text("device")?, given.some_text("node-name")?);
    let path = given.text("snapshot-file")?;
    let name = given.some_text("snapshot-node-name")?;
    let format = given.some_text("format")?;
    let mode = given.word("mode", &["absolute-paths", "existing"])?;
    given.end()?;
    let (device, node) = (device.unwrap_or_default(), node.unwrap_or_default());
    let named = if node.is_empty() { &device } else { &node };
    if !context.has_node(named) {
        return Err(QmpError::no_node(&device, &node));
    }
    let disk = context.disk(named)?;
    context.check_not_lower(named, &disk)?;
    if !node.is_empty() && name.is_none() {
        return Err(QmpError::generic("New overlay node-name missing"));
    }
    if name.as_ref().is_some_and(|name| context.has_node(name)) {
        return Err(QmpError::generic("New overlay node-name already in use"));
    }
    if let Some(name) = name.as_ref().filter(|name| !is_well_formed(name)) {
        return Err(QmpError::generic(format!("Invalid node-name: '{name}'")));
    }
    match format.as_deref() {
        None | Some("qcow2") => {}
        Some(format) => {
            let why = format!("Overlays of the format '{format}' are not possible here: use qcow2");
            return Err(QmpError::generic(why));
        }
    }
    let own_disk = (mode == Some("existing")).then(String::new);
    let failed = |error| QmpError::generic(format!("Could not find '{path}': {error}"));
    let path = std::path::absolute(&path).map_err(failed)?;
    let node = FormatNode { is_owned: false, ..FormatNode::owned(&name.unwrap_or_default()) };
    Ok(Overlay { before: image_of(context, &disk), disk, path, node, own_disk })
}

/// The overlay of a `blockdev-snapshot`.
pub(super) fn of_node(context: &Context, mut given: Arguments) -> Result<Overlay, QmpError> {
    let (node, overlay) = (given.text("node")?, given.text("overlay")?);
    given.end()?;
    let disk = context.disk(&node)?;
    let own = context.disk(&overlay)?;
    let own_disk =
        context.running.disks().find(&own).ok_or_else(|| QmpError::no_node(&overlay, &overlay))?;
    context.check_not_lower(&node, &disk)?;
    if own == disk {
        return Err(QmpError::generic(format!(
            "Making '{node}' a backing child of '{overlay}' would create a cycle"
        )));
    }
    let is_used = !context.running.exports().of_disk(&own).is_empty();
    if is_used || context.state.borrow().filter_on(&own).is_some() {
        return Err(QmpError::generic("The overlay is already in use"));
    }
    if is_inactive(&own_disk.disk) {
        return Err(QmpError::generic(format!(
            "Inactive '{overlay}' can't be the overlay of a snapshot: make it active first"
        )));
    }
    if own_disk.layer_at(1).is_some() || context.state.borrow().lower_of(&own).is_some() {
        return Err(QmpError::generic("The overlay already has a backing image"));
    }
    if own_disk.disk.image().image_format_name() != "qcow2" {
        return Err(QmpError::generic("The overlay does not support backing images"));
    }
    let path = own_disk.path();
    let node = FormatNode::owned(&overlay);
    Ok(Overlay { before: image_of(context, &disk), disk, path, node, own_disk: Some(own) })
}

fn image_of(context: &Context, disk: &str) -> PathBuf {
    context.running.disks().find(disk).map(|disk| disk.path()).unwrap_or_default()
}

/// Moves disks to their overlays, all at one moment.
pub(super) async fn put_on(context: &Rc<Context>, overlays: Vec<Overlay>) -> Returned {
    let names = overlays.iter().map(|overlay| &overlay.node.name);
    let names: Vec<_> = names.filter(|name| !name.is_empty()).collect();
    if repeated(&names).is_some() {
        return Err(QmpError::generic("New overlay node-name already in use"));
    }
    let mut closed = Vec::new();
    let outcome = fork(context, &overlays, &mut closed).await;
    // A fork may fail after the disks were moved, if their layers cannot be made durable. So a
    // disk's present image decides whether it was moved.
    let (done, undone): (Vec<_>, Vec<_>) =
        overlays.into_iter().partition(|one| image_of(context, &one.disk) != one.before);
    for Overlay { disk, mut node, .. } in done {
        if node.name.is_empty() {
            node.name = implicit_name(context);
        }
        context.state.borrow_mut().push_top(&disk, node);
    }
    for (node, params) in closed {
        if undone.iter().any(|overlay| overlay.node.name == node) {
            reopen(context, &node, params).await;
        }
    }
    outcome.map(|()| json!({}))
}

/// Forks the disks. `closed` receives the nodes whose own disks were closed, each with its
/// parameters of `disk.open`.
async fn fork(
    context: &Context,
    overlays: &[Overlay],
    closed: &mut Vec<(String, Value)>,
) -> Result<(), QmpError> {
    let mut disks = Vec::new();
    for Overlay { disk, path, node, own_disk, .. } in overlays {
        if let Some(own) = own_disk.as_ref().filter(|own| !own.is_empty()) {
            let params = close_disk(context, own).await?;
            closed.push((node.name.clone(), params.unwrap_or_default()));
        }
        disks.push(json!({ "disk": disk, "overlay": path, "made": own_disk.is_some() }));
    }
    context.call("disk.fork", json!({ "disks": disks })).await.map(drop)
}
