//! `blockdev-create`: a job in QEMU that creates an image. It ends soon, and is listed until it is
//! dismissed.

use std::rc::Rc;

use blockhouse_engine::spawn_detached;
use serde_json::{Map, Value, json};

use super::arguments::{Arguments, is_well_formed};
use super::context::Context;
use super::errors::{QmpError, Returned};
use super::job_list::find;
use super::opening::{check_file_name, close_disk, reopen};
use super::starting::check_unused;
use super::state::FileNode;

/// The drivers with which QEMU creates images. Only `file` and `qcow2` are supported here.
const DRIVERS: [&str; 11] =
    ["file", "qcow2", "luks", "parallels", "qcow", "qed", "rbd", "ssh", "vdi", "vhdx", "vmdk"];
/// QEMU's drivers that cannot create images.
const OTHERS: [&str; 5] = ["nbd", "raw", "null-co", "throttle", "host_device"];

/// An image to create.
struct New {
    /// The parameters of `image.create`.
    params: Value,
    /// The `file` node whose file becomes the image.
    node: Option<String>,
    /// The node of the file that has the guest's data.
    data_node: Option<String>,
}

/// `blockdev-create`.
pub(super) async fn create(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let job = given.text("job-id")?;
    let mut options = given.object("options")?;
    given.end()?;
    let all: Vec<_> = DRIVERS.into_iter().chain(OTHERS).collect();
    let driver = options.needed_word("driver", &all)?;
    if OTHERS.contains(&driver) {
        return Err(QmpError::generic("Driver does not support blockdev-create"));
    }
    let new = match driver {
        "file" => new_file(options)?,
        "qcow2" => new_qcow2(options)?,
        _ => {
            return Err(QmpError::generic(format!("Driver '{driver}' makes no images here")));
        }
    };
    if !is_well_formed(&job) {
        return Err(QmpError::generic(format!("Invalid job ID '{job}'")));
    }
    if find(context, &job).await?.is_some() {
        return Err(QmpError::generic(format!("Job ID '{job}' already in use")));
    }
    check_unused(context, &job)?;
    context.state.borrow_mut().creations.insert(job.clone(), None);
    context.events.tell_begin(&job);
    let context = Rc::clone(context);
    spawn_detached(async move {
        let Some(_inside) = context.gate.enter().await else { return };
        let made = make(&context, new).await;
        end(&context, &job, made.err());
    });
    Ok(json!({}))
}

fn end(context: &Context, job: &str, error: Option<QmpError>) {
    let statuses: &[_] = if error.is_some() { &["aborting"] } else { &["waiting", "pending"] };
    let end = error.map(|error| error.desc().to_owned());
    context.state.borrow_mut().creations.insert(job.to_owned(), Some(end));
    statuses.iter().for_each(|status| context.events.tell_status(job, status));
    context.events.tell_status(job, "concluded");
    context.events.forget_job(job);
}

async fn make(context: &Context, New { mut params, node, data_node }: New) -> Result<(), QmpError> {
    let node = node.map(|node| free_file(context, node)).transpose()?;
    let data = data_node.map(|node| free_file(context, node)).transpose()?;
    if let Some((_, file)) = &node {
        params["path"] = file.path.as_str().into();
        params["overwrite"] = true.into();
    }
    if let Some((_, file)) = &data {
        params["data-file"] = file.path.as_str().into();
    }
    let used: Vec<_> = node.into_iter().chain(data).collect();
    let mut closed = Vec::new();
    let made = async {
        for (name, file) in used {
            close_disk(context, &context.disk(&name)?).await?;
            closed.push((name, file));
        }
        context.call("image.create", params).await.map(drop)
    };
    let made = made.await;
    for (name, file) in closed {
        reopen(context, &name, file.params).await;
    }
    made
}

/// The file of a node that no other node uses.
fn free_file(context: &Context, node: String) -> Result<(String, FileNode), QmpError> {
    context.disk(&node)?;
    let file = context.state.borrow().files.get(&node).cloned();
    let file = file.filter(|file| file.user.is_none());
    let used = || QmpError::generic(format!("Node '{node}' is no file without another node on it"));
    let file = file.ok_or_else(used)?;
    Ok((node, file))
}

/// A `file`. It replaces an existing file, as in QEMU.
fn new_file(mut given: Arguments) -> Result<New, QmpError> {
    let filename = given.text("filename")?;
    let size = given.needed_unsigned("size")?;
    given.only("preallocation", &[json!("off")], "a new file has no blocks")?;
    given.flag("nocow", false)?;
    given.only("extent-size-hint", &[], "the file system chooses it")?;
    given.end()?;
    let path = check_file_name(&filename)?;
    let size = size.next_multiple_of(512);
    let params = json!({ "path": path, "format": "raw", "size": size, "overwrite": true });
    Ok(New { params, node: None, data_node: None })
}

fn new_qcow2(mut given: Arguments) -> Result<New, QmpError> {
    let mut params = Map::new();
    params.insert("format".into(), "qcow2".into());
    let mut node = None;
    match given.some_object_or_text("file")? {
        Some(mut file) => {
            file.needed_word("driver", &["file"])?;
            params.insert("path".into(), check_file_name(&file.text("filename")?)?.into());
            params.insert("overwrite".into(), true.into());
            file.end()?;
        }
        None => node = Some(given.text("file")?),
    }
    params.insert("size".into(), given.needed_unsigned("size")?.into());
    given.only("version", &[json!("v3")], "images are of version 3")?;
    let data_node = given.some_text("data-file")?;
    let is_raw = given.flag("data-file-raw", false)?;
    if is_raw && data_node.is_none() {
        return Err(QmpError::generic("data-file-raw requires data-file"));
    }
    if data_node.is_some() && data_node == node {
        return Err(QmpError::generic("An image and its data file are two files"));
    }
    params.insert("data-file-raw".into(), is_raw.into());
    given.only("encrypt", &[], "use 'blockhouse create'")?;
    let space = [json!("off"), json!("metadata")];
    given.only("preallocation", &space[..1 + usize::from(is_raw)], "a new image has no data")?;
    let backing = given.some_text("backing-file")?;
    let format =
        given.word("backing-fmt", &["qcow2", "raw", "luks", "vdi", "vhdx", "vmdk", "vpc"])?;
    match (backing, format) {
        (Some(backing), Some(format)) => {
            params.insert("backing".into(), backing.into());
            params.insert("backing-format".into(), format.into());
        }
        (Some(_), None) => {
            return Err(QmpError::generic(
                "Parameter 'backing-fmt' is missing: it is never guessed",
            ));
        }
        (None, Some(_)) => {
            return Err(QmpError::generic("Backing format cannot be used without backing file"));
        }
        (None, None) => {}
    }
    for name in ["cluster-size", "refcount-bits"] {
        if let Some(number) = given.some_unsigned(name)? {
            params.insert(name.into(), number.into());
        }
    }
    for name in ["extended-l2", "lazy-refcounts"] {
        params.insert(name.into(), given.flag(name, false)?.into());
    }
    if let Some(kind) = given.word("compression-type", &["zlib", "zstd"])? {
        params.insert("compression".into(), kind.into());
    }
    given.end()?;
    Ok(New { params: params.into(), node, data_node })
}
