//! Dirty bitmaps in images and in memory. As in QEMU, a new bitmap is in memory unless the client
//! makes it persistent.

use std::collections::BTreeMap;
use std::rc::Rc;

use blockhouse_core::rare;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::arguments::Arguments;
use super::context::Context;
use super::errors::{QmpError, Returned};

/// `block-dirty-bitmap-add`.
pub(super) async fn add(context: &Rc<Context>, given: Arguments) -> Returned {
    change(context, given, "add").await
}

/// `block-dirty-bitmap-remove`.
pub(super) async fn remove(context: &Rc<Context>, given: Arguments) -> Returned {
    change(context, given, "remove").await
}

/// `block-dirty-bitmap-clear`.
pub(super) async fn clear(context: &Rc<Context>, given: Arguments) -> Returned {
    change(context, given, "clear").await
}

/// `block-dirty-bitmap-enable`.
pub(super) async fn enable(context: &Rc<Context>, given: Arguments) -> Returned {
    change(context, given, "enable").await
}

/// `block-dirty-bitmap-disable`.
pub(super) async fn disable(context: &Rc<Context>, given: Arguments) -> Returned {
    change(context, given, "disable").await
}

/// `block-dirty-bitmap-merge`: bitmaps of the same disk, or of any disk into one in memory.
pub(super) async fn merge(context: &Rc<Context>, given: Arguments) -> Returned {
    change(context, given, "merge").await
}

/// `x-debug-block-dirty-bitmap-sha256`: of the bits in QEMU's memory layout, 64 in a word.
pub(super) async fn digest(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let (node, name) = (given.text("node")?, given.text("name")?);
    given.end()?;
    let disk = context.disk(&node)?;
    Changes::default().check_exists(context, &disk, &name).await?;
    let running = context.running.disks().find(&disk);
    let running = running.ok_or_else(|| QmpError::no_node(&node, &node))?;
    let dirty = rare(running.disk.bitmaps().copy(&name, 1)).await;
    let dirty = dirty.map_err(|error| QmpError::generic(error.to_string()))?;
    let mut hash = Sha256::new();
    dirty.words().for_each(|word| hash.update(word.to_le_bytes()));
    let hex = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    Ok(json!({ "sha256": hex }))
}

async fn change(context: &Rc<Context>, given: Arguments, action: &'static str) -> Returned {
    let mut changes = Changes::default();
    changes.take(context, action, given).await?;
    changes.run(context).await
}

/// Changes of bitmaps that are made together.
#[derive(Default)]
pub(super) struct Changes {
    /// For each change, its method of the control socket's `bitmap`, and the parameters.
    calls: Vec<(&'static str, Value)>,
    /// Whether a bitmap, by disk and name, exists after the changes.
    known: BTreeMap<(String, String), bool>,
}

impl Changes {
    /// Adds a change, from the arguments of its command.
    pub(super) async fn take(
        &mut self,
        context: &Context,
        action: &'static str,
        mut given: Arguments,
    ) -> Result<(), QmpError> {
        match action {
            "add" => return self.take_add(context, given).await,
            "merge" => return self.take_merge(context, given).await,
            _ => {}
        }
        let (node, name) = (given.text("node")?, given.text("name")?);
        given.end()?;
        let disk = context.disk(&node)?;
        self.check_exists(context, &disk, &name).await?;
        if action == "remove" {
            self.known.insert((disk.clone(), name.clone()), false);
        }
        self.calls.push((action, json!({ "disk": disk, "name": name })));
        Ok(())
    }

    async fn take_add(&mut self, context: &Context, mut given: Arguments) -> Result<(), QmpError> {
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
        if self.exists(context, &disk, &name).await? {
            return Err(QmpError::generic(format!("Bitmap already exists: {name}")));
        }
        let mut params = json!({ "disk": disk, "name": name, "disabled": disabled });
        params["transient"] = (!is_persistent).into();
        if let Some(granularity) = granularity {
            params["granularity"] = granularity.into();
        }
        self.known.insert((disk, name), true);
        self.calls.push(("add", params));
        Ok(())
    }

    async fn take_merge(
        &mut self,
        context: &Context,
        mut given: Arguments,
    ) -> Result<(), QmpError> {
        let (node, target) = (given.text("node")?, given.text("target")?);
        let sources = given.list("bitmaps")?;
        given.end()?;
        let disk = context.disk(&node)?;
        self.check_exists(context, &disk, &target).await?;
        for (index, source) in sources.into_iter().enumerate() {
            let (of, source) = source_of(context, &disk, index, source)?;
            self.check_exists(context, &of, &source).await?;
            let mut params = json!({ "disk": disk, "name": target, "source": source });
            if of != disk {
                params["source-disk"] = of.into();
            }
            self.calls.push(("merge", params));
        }
        Ok(())
    }

    /// Whether the bitmap exists after the changes.
    pub(super) async fn exists(
        &self,
        context: &Context,
        disk: &str,
        name: &str,
    ) -> Result<bool, QmpError> {
        if let Some(exists) = self.known.get(&(disk.to_owned(), name.to_owned())) {
            return Ok(*exists);
        }
        // Formats without bitmaps refuse to list them.
        let bitmaps =
            context.call("bitmap.list", json!({ "disk": disk })).await.unwrap_or_default();
        Ok(bitmaps.as_array().into_iter().flatten().any(|bitmap| bitmap["name"] == name))
    }

    async fn check_exists(
        &self,
        context: &Context,
        disk: &str,
        name: &str,
    ) -> Result<(), QmpError> {
        if self.exists(context, disk, name).await? {
            Ok(())
        } else {
            Err(QmpError::generic(format!("Dirty bitmap '{name}' not found")))
        }
    }

    /// Whether the list is empty.
    pub(super) fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    /// Makes the changes, all at the same moment.
    pub(super) async fn run(self, context: &Context) -> Returned {
        match &self.calls[..] {
            [] => {}
            [(action, params)] => {
                context.call(&format!("bitmap.{action}"), params.clone()).await?;
            }
            _ => {
                let params = json!({ "bitmaps": self.into_params() });
                context.call("disk.transaction", params).await?;
            }
        }
        Ok(json!({}))
    }

    /// The changes in the form of `disk.transaction`.
    pub(super) fn into_params(self) -> Vec<Value> {
        self.calls.into_iter().map(|(action, params)| json!({ action: params })).collect()
    }
}

/// The disk and the name of a source bitmap. A name without a node means a bitmap of `disk`.
fn source_of(
    context: &Context,
    disk: &str,
    index: usize,
    source: Value,
) -> Result<(String, String), QmpError> {
    if let Value::String(name) = source {
        return Ok((disk.to_owned(), name));
    }
    let mut source = Arguments::element("bitmaps", index, source)?;
    let (node, name) = (source.text("node")?, source.text("name")?);
    source.end()?;
    Ok((context.disk(&node)?, name))
}
