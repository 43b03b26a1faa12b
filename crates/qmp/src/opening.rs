//! Adds and removes nodes of files and formats. Each such change opens or closes a disk.
//!
//! A file node (`file`, `host_device`) is a raw disk of the same name until a format node is added
//! over it. The format node's disk then replaces the raw disk, and the file node is listed as the
//! node below. The removal of the format node opens the raw disk again.

use std::os::unix::ffi::OsStrExt;
use std::rc::Rc;

use blockhouse_daemon::RunningDisk;
use blockhouse_disk::is_inactive;
use blockhouse_images::{FLAGS_WITHOUT_EFFECT, NUMBERS_WITHOUT_EFFECT, QemuName};
use blockhouse_storage::Location;
use serde_json::{Value, json};

use super::activity::check_child;
use super::arguments::{Arguments, is_well_formed};
use super::context::Context;
use super::errors::QmpError;
use super::objects::{key_file, with_tls};
use super::state::{FileNode, FormatNode};

/// QEMU's drivers of files, of other servers' exports, and of null devices.
const FILES: [&str; 5] = ["file", "host_device", NBD, "null-aio", "null-co"];
const NBD: &str = "nbd";
const QCOW2: &str = "qcow2";
const RAW: &str = "raw";
/// QEMU's drivers of formats that Blockhouse opens.
pub(super) const FORMATS: [&str; 7] = [RAW, QCOW2, "luks", "vdi", "vhdx", "vmdk", "vpc"];
/// QEMU's driver of a node that limits a disk.
const THROTTLE: &str = "throttle";
/// QEMU's other drivers, which are refused.
const OTHERS: [&str; 26] = [
    "blkdebug",
    "blklogwrites",
    "blkreplay",
    "blkverify",
    "bochs",
    "cloop",
    "compress",
    "copy-before-write",
    "copy-on-read",
    "dmg",
    "ftp",
    "ftps",
    "gluster",
    "host_cdrom",
    "http",
    "https",
    "iscsi",
    "nfs",
    "nvme",
    "parallels",
    "preallocate",
    "qcow",
    "qed",
    "quorum",
    "rbd",
    "ssh",
];

/// The maximum length of a node's name.
const MAX_NAME: usize = 31;

/// The options of a requested node.
pub(super) struct Asked {
    driver: &'static str,
    pub(super) name: Option<String>,
    pub(super) is_read_only: bool,
    is_active: bool,
    /// The mode of the host's page cache, if the client names one.
    cache: Option<&'static str>,
    discard: Option<&'static str>,
    detect_zeroes: &'static str,
    /// Whether the image is opened without its backing file (`"backing": null`).
    is_without_backing: bool,
    /// The data file, if the client gives the image one.
    data_file: Option<String>,
    /// The part of the file that a `raw` node consists of; otherwise null.
    part: Value,
}

impl Asked {
    /// Parses the options that all nodes have in common.
    pub(super) fn take(given: &mut Arguments) -> Result<Self, QmpError> {
        let all = FILES.iter().chain(&FORMATS).chain(&[THROTTLE]).chain(&OTHERS);
        let all: Vec<_> = all.copied().collect();
        let driver = given.needed_word("driver", &all)?;
        if OTHERS.contains(&driver) {
            return Err(QmpError::generic(format!("Driver '{driver}' is not possible here")));
        }
        let name = given.some_text("node-name")?;
        let is_read_only = given.flag("read-only", false)?;
        // No effect: `read-only` alone decides how a file is opened.
        given.flag("auto-read-only", false)?;
        let is_active = given.flag("active", true)?;
        given.only("force-share", &[json!(false)], "images are locked")?;
        let cache = match given.some_object("cache")? {
            Some(mut cache) => {
                let direct = cache.flag("direct", false)?;
                let no_flush = cache.flag("no-flush", false)?;
                cache.end()?;
                Some(match (direct, no_flush) {
                    (_, true) => "unsafe",
                    (true, false) => "none",
                    (false, false) => "writeback",
                })
            }
            None => None,
        };
        let discard = given.word("discard", &["ignore", "unmap"])?;
        let detect_zeroes = given.word("detect-zeroes", &["off", "on", "unmap"])?;
        let detect_zeroes = detect_zeroes.unwrap_or("off");
        let is_without_backing = driver == QCOW2 && given.is_null("backing");
        let asked = Self {
            driver,
            name,
            is_read_only,
            is_active,
            cache,
            discard,
            detect_zeroes,
            is_without_backing,
            data_file: None,
            part: Value::Null,
        };
        Ok(asked)
    }

    /// Whether the node is a `throttle` filter.
    pub(super) fn is_throttle(&self) -> bool {
        self.driver == THROTTLE
    }

    /// Whether the node is of the driver `raw`.
    pub(super) fn is_raw(&self) -> bool {
        self.driver == RAW
    }

    /// Parses the options of a file node, and refuses others. Returns the file's name, or the URI
    /// of an export or a null device.
    fn end_file(&self, context: &Context, mut given: Arguments) -> Result<String, QmpError> {
        if self.driver.starts_with("null-") {
            let size = given.some_unsigned("size")?.unwrap_or(1 << 30);
            let latency = given.some_unsigned("latency-ns")?.unwrap_or(0);
            let zeroes = if given.flag("read-zeroes", false)? { "on" } else { "off" };
            given.end()?;
            let options = format!("size={size}&latency-ns={latency}&read-zeroes={zeroes}");
            return Ok(format!("{}://?{options}", self.driver));
        }
        if self.driver == NBD {
            let mut options = given.rest();
            options.insert("driver".into(), NBD.into());
            let named = QemuName::of(&format!("json:{}", Value::from(options)));
            let wrong = |why| QmpError::generic(format!("Could not open the export: {why}"));
            let named = named.unwrap_or_else(|| Err("it has no name".into())).map_err(wrong)?;
            let uri = named.path.to_string_lossy().into_owned();
            return named.tls.map_or(Ok(uri.clone()), |tls| with_tls(context, &uri, &tls));
        }
        let filename = given.text("filename")?;
        // No effect: --engine selects the kind of I/O.
        given.word("aio", &["threads", "native", "io_uring"])?;
        given.only("locking", &[json!("auto"), json!("on")], "images are locked")?;
        given.flag("drop-cache", true)?;
        given.end()?;
        check_file(&filename)?;
        Ok(check_file_name(&filename).unwrap_or(filename))
    }

    /// Refuses options that differ from those of the open disk, except `read-only`. Returns whether
    /// the disk becomes read-only.
    pub(super) fn check_same(&self, name: &str, opened: &Value) -> Result<bool, QmpError> {
        let asked = self.params(name, "", Some(self));
        let keys = ["discard", "detect-zeroes", "without-backing", "inactive", "part"];
        let is_file = FILES.contains(&self.driver);
        let has_other_cache = self.cache.is_some() && asked["cache"] != opened["cache"];
        let has_other_format = !is_file && asked["format"] != opened["format"];
        let other = keys.into_iter().find(|key| asked[*key] != opened[*key]);
        let other = other.or(has_other_cache.then_some("cache"));
        match other.or(has_other_format.then_some("driver")) {
            None => Ok(self.is_read_only),
            Some("inactive") => Err(QmpError::generic(format!(
                "Cannot change the option 'active' of '{name}' here: blockdev-set-active does that"
            ))),
            Some(key) => Err(QmpError::generic(format!(
                "Cannot change the option '{key}' of '{name}' here: only 'read-only' is changed"
            ))),
        }
    }

    /// Takes the part of the file that a `raw` node consists of.
    pub(super) fn take_part(&mut self, given: &mut Arguments) -> Result<(), QmpError> {
        if self.is_raw() {
            let (offset, size) = (given.some_unsigned("offset")?, given.some_unsigned("size")?);
            if offset.is_some() || size.is_some() {
                self.part = json!({ "offset": offset.unwrap_or(0), "size": size });
            }
        }
        Ok(())
    }

    /// The parameters of [`Context::open`]. A node without a cache mode of its own gets the cache
    /// mode of the node below.
    fn params(&self, name: &str, path: &str, below: Option<&Self>) -> Value {
        let format = if below.is_none() { "raw" } else { self.driver };
        let cache = self.cache.or(below.and_then(|below| below.cache));
        json!({
            "name": name,
            "path": path,
            "format": format,
            "read-only": self.is_read_only,
            "cache": cache.unwrap_or("writeback"),
            "discard": self.discard.unwrap_or("ignore"),
            "detect-zeroes": self.detect_zeroes,
            "without-backing": self.is_without_backing,
            "data-file": self.data_file,
            "part": self.part,
            "inactive": !self.is_active,
        })
    }
}

/// Adds a file node or a format node, with the nodes below it.
pub(super) async fn open_node(
    context: &Rc<Context>,
    given: Arguments,
    asked: Asked,
    name: &str,
) -> Result<(), QmpError> {
    match asked.driver {
        driver if FILES.contains(&driver) => {
            let path = asked.end_file(context, given)?;
            let params = open_params(context, asked.params(name, &path, None));
            open_disk(context, name, params.clone()).await?;
            let node = FileNode { path, params, user: None, is_implicit: false };
            context.state.borrow_mut().files.insert(name.to_owned(), node);
            Ok(())
        }
        _ => add_format(context, given, asked, name).await,
    }
}

/// Opens the disk of a node, under the node's name unless another disk has it.
async fn open_disk(context: &Context, node: &str, mut params: Value) -> Result<(), QmpError> {
    let disk = context.disk_name(node);
    params["name"] = disk.as_str().into();
    context.open(params.clone()).await?;
    let mut state = context.state.borrow_mut();
    if disk != node {
        state.chains.insert(disk.clone(), vec![FormatNode::owned(node)]);
    }
    state.opened.insert(disk, params);
    Ok(())
}

/// Allows the image to refer to any file and server, if `follows_names` is set.
fn open_params(context: &Context, mut params: Value) -> Value {
    if context.follows_names {
        params["allow-paths"] = json!(["/"]);
        params["allow-remote"] = true.into();
    }
    params
}

/// Takes the options of a qcow2 node without effect on the bytes read and written.
fn take_without_effect(given: &mut Arguments) -> Result<(), QmpError> {
    for name in NUMBERS_WITHOUT_EFFECT {
        given.some_unsigned(name)?;
    }
    for name in FLAGS_WITHOUT_EFFECT {
        given.flag(name, false)?;
    }
    Ok(())
}

/// Takes the secret of an encrypted image, and returns the list of its key files.
fn take_keys(context: &Context, given: &mut Arguments, driver: &str) -> Result<Value, QmpError> {
    let secret = match driver {
        "luks" => given.some_text("key-secret")?,
        QCOW2 => match given.some_object("encrypt")? {
            Some(mut encrypt) => {
                encrypt.needed_word("format", &["luks"])?;
                let secret = encrypt.text("key-secret")?;
                encrypt.end()?;
                Some(secret)
            }
            None => None,
        },
        _ => None,
    };
    let files = secret.map(|id| key_file(context, &id)).transpose()?;
    Ok(files.into_iter().map(|path| json!(path)).collect())
}

/// Takes the data file of a qcow2 image: an object that describes a file, or the name of a raw
/// disk's node. That disk stays open beside the image, so both are read-only.
fn take_data_file(
    context: &Context,
    given: &mut Arguments,
    asked: &Asked,
) -> Result<Option<String>, QmpError> {
    if asked.driver != QCOW2 {
        return Ok(None);
    }
    if let Some(mut file) = given.some_object_or_text("data-file")? {
        let below = Asked::take(&mut file)?;
        if !FILES.contains(&below.driver) || below.name.is_some() || !below.is_active {
            let why = "A data file is an object with a file's driver and without 'node-name' here";
            return Err(QmpError::generic(why));
        }
        if below.is_read_only && !asked.is_read_only {
            let why = "The data file of an image that may be changed cannot be read-only";
            return Err(QmpError::generic(why));
        }
        return below.end_file(context, file).map(Some);
    }
    let Some(node) = given.some_text("data-file")? else { return Ok(None) };
    let disk = context.running.disks().get(&context.disk(&node)?).map_err(QmpError::failed)?;
    let is_whole = disk.setup.part.is_none() && disk.setup.snapshot.is_none();
    if disk.disk.image().image_format_name() != "raw" || !is_whole {
        let why = format!(
            "Node '{node}' is no raw disk of a whole file: it cannot be the data file of an image"
        );
        return Err(QmpError::generic(why));
    }
    if !asked.is_read_only || !disk.setup.is_read_only() {
        return Err(QmpError::generic(format!(
            "Node '{node}' can be the data file of a read-only image, if it is read-only: describe the file in 'data-file' itself"
        )));
    }
    Ok(disk.path().to_str().map(str::to_owned))
}

/// Adds a format node. If the client names a backing node, that node becomes the image's backing
/// file.
async fn add_format(
    context: &Context,
    mut given: Arguments,
    asked: Asked,
    name: &str,
) -> Result<(), QmpError> {
    let backing = match asked.driver {
        QCOW2 => given.some_text("backing")?,
        _ => None,
    };
    let Some(backing) = backing else {
        return open_format(context, given, asked, name).await;
    };
    let lower = context.disk(&backing)?;
    open_format(context, given, Asked { is_without_backing: true, ..asked }, name).await?;
    let disk = context.disk(name)?;
    let put = stand_on(context, (&disk, name), (&lower, &backing)).await;
    if put.is_err() {
        if context.running.disks().find(&disk).is_some() {
            close(context, &disk, 0).await?;
        } else {
            release_file(context, name).await;
        }
    }
    put
}

fn is_null(path: &std::path::Path) -> bool {
    matches!(Location::of(path), Ok(Location::Null(_)))
}

/// Makes another node the backing file of a disk that was opened without one. To do so, the disk is
/// opened again; if that fails, it is closed, and the other node is a disk of its own again. But if
/// the disk's image names no backing file, or the other node is in use, only QMP's state records
/// the relation.
async fn stand_on(
    context: &Context,
    (disk, name): (&str, &str),
    (lower, backing): (&str, &str),
) -> Result<(), QmpError> {
    let [upper, below] = [disk, lower].map(|disk| context.running.disks().find(disk));
    let (Some(upper), Some(below)) = (upper, below) else {
        return Err(QmpError::no_node(backing, backing));
    };
    let is_lower_inactive = is_inactive(&below.disk);
    check_child((name, !is_inactive(&upper.disk)), ("backing", backing, is_lower_inactive))?;
    let named = upper.disk.image().backing_file().map(|named| named.name.clone());
    let path = named.as_ref().map(|named| {
        let named = std::path::Path::new(std::ffi::OsStr::from_bytes(named));
        if Location::is_remote(named.as_os_str().as_bytes()) {
            return named.to_owned();
        }
        let folder = upper.path().parent().map(std::path::Path::to_owned).unwrap_or_default();
        folder.join(named).canonicalize().unwrap_or_default()
    });
    let is_named = match path {
        None => false,
        Some(path) if path == below.path() => {
            check_as_named(&upper, &below, backing)?;
            true
        }
        // Both are null devices. The options of the node are used, not the options in the image's
        // header.
        Some(path) if is_null(&path) && is_null(&below.path()) => false,
        Some(path) => {
            return Err(QmpError::generic(format!(
                "Node '{name}' names '{}' as its backing file, and '{backing}' is another one",
                path.display()
            )));
        }
    };
    drop((upper, below));
    let is_used = !context.running.exports().of_disk(lower).is_empty()
        || context.running.check_unused(lower).is_err()
        || context.state.borrow().filter_on(lower).is_some();
    if !is_named || is_used {
        context.state.borrow_mut().over.insert(name.to_owned(), backing.to_owned());
        return Ok(());
    }
    let nodes = context.state.borrow().nodes_of(lower);
    let own = context.state.borrow().nodes_of(disk);
    let Some(mut params) = close_disk(context, disk).await? else { return Ok(()) };
    let former = close_disk(context, lower).await?;
    params["without-backing"] = false.into();
    let opened = open_disk(context, name, params).await;
    if let Err(error) = opened {
        match former {
            Some(former) if reopen(context, backing, former.clone()).await => {
                let lower = context.disk(backing)?;
                context.state.borrow_mut().chains.insert(lower, nodes);
            }
            _ => release_file(context, backing).await,
        }
        return Err(error);
    }
    let mut nodes = nodes;
    nodes.first_mut().into_iter().for_each(|node| node.params = former.clone());
    let disk = context.disk(name)?;
    context.state.borrow_mut().chains.insert(disk, own.into_iter().chain(nodes).collect());
    Ok(())
}

/// Refuses a node as a backing node if the file that the upper image names would have other data
/// than the node: it has another format, or was opened without its own backing file.
fn check_as_named(upper: &RunningDisk, below: &RunningDisk, backing: &str) -> Result<(), QmpError> {
    let image = below.disk.image();
    let named = upper.disk.image().backing_file().and_then(|named| named.format.clone());
    let is_format = named.is_none_or(|format| format == image.image_format_name());
    let is_cut = below.setup.without_backing && image.backing_file().is_some();
    // In the upper image's chain the lower image has the data file that it names.
    let has_other_data = below.setup.data_file.is_some();
    if is_format && !is_cut && !has_other_data {
        return Ok(());
    }
    Err(QmpError::generic(format!(
        "Node '{backing}' has other data than the file that '{}' names: give it the same format, and its backing node",
        upper.name()
    )))
}

async fn open_format(
    context: &Context,
    mut given: Arguments,
    asked: Asked,
    name: &str,
) -> Result<(), QmpError> {
    if asked.driver == QCOW2 {
        take_without_effect(&mut given)?;
    }
    let mut asked = Asked { data_file: take_data_file(context, &mut given, &asked)?, ..asked };
    asked.take_part(&mut given)?;
    let keys = take_keys(context, &mut given, asked.driver)?;
    if let Some(mut file) = given.some_object_or_text("file")? {
        let below = Asked::take(&mut file)?;
        given.end()?;
        below.name.iter().try_for_each(|name| check_name(context, name))?;
        if !FILES.contains(&below.driver) {
            let why = format!("Driver '{}' is not possible below another one here", below.driver);
            return Err(QmpError::generic(why));
        }
        let below_name = below.name.as_deref().unwrap_or(below.driver);
        check_child((name, asked.is_active), ("file", below_name, !below.is_active))?;
        let path = below.end_file(context, file)?;
        let mut params = open_params(context, asked.params(name, &path, Some(&below)));
        params["key-files"] = keys;
        open_disk(context, name, params).await?;
        if let Some(below_name) = below.name.clone() {
            let params = open_params(context, below.params(&below_name, &path, None));
            let user = Some(name.to_owned());
            let node = FileNode { path, params, user, is_implicit: true };
            context.state.borrow_mut().files.insert(below_name, node);
        }
        return Ok(());
    }
    let below = given.text("file")?;
    given.end()?;
    let found = context.state.borrow().files.get(&below).cloned();
    let Some(node) = found.filter(|node| node.user.is_none()) else {
        context.disk(&below)?;
        return Err(QmpError::generic(format!(
            "Node '{below}' is no file's node, or another node uses it: it is not possible below '{name}'"
        )));
    };
    put_on(context, (asked, keys), name, &below, node).await
}

/// Replaces the raw disk of a file node by the disk of a format node over it.
async fn put_on(
    context: &Context,
    (asked, keys): (Asked, Value),
    name: &str,
    below: &str,
    node: FileNode,
) -> Result<(), QmpError> {
    let lower = context.disk(below)?;
    let is_lower_inactive =
        context.running.disks().find(&lower).is_some_and(|lower| is_inactive(&lower.disk));
    check_child((name, asked.is_active), ("file", below, is_lower_inactive))?;
    close_disk(context, &lower).await?;
    let mut params = open_params(context, asked.params(name, &node.path, Some(&asked)));
    params["key-files"] = keys;
    if asked.cache.is_none() {
        params["cache"] = node.params["cache"].clone();
    }
    if let Err(error) = open_disk(context, name, params).await {
        reopen_file(context, below, &node).await;
        return Err(error);
    }
    let mut state = context.state.borrow_mut();
    state.files.entry(below.to_owned()).and_modify(|file| file.user = Some(name.to_owned()));
    Ok(())
}

/// Closes a disk. Returns its parameters of [`Context::open`], if a client has added it.
pub(super) async fn close_disk(context: &Context, disk: &str) -> Result<Option<Value>, QmpError> {
    // Removed first: the event of the end of a disk in `opened` means that another client has
    // closed the disk.
    let params = context.state.borrow_mut().opened.remove(disk);
    let closed = context.call("disk.close", json!({ "disk": disk })).await;
    let mut state = context.state.borrow_mut();
    if let Err(error) = closed {
        params.into_iter().for_each(|params| _ = state.opened.insert(disk.to_owned(), params));
        return Err(error);
    }
    state.chains.remove(disk);
    Ok(params)
}

/// Frees the file node below a node that is closed: one that a client added becomes a raw disk
/// again.
async fn release_file(context: &Context, node: &str) {
    let below = {
        let mut state = context.state.borrow_mut();
        state.files.remove(node);
        state.take_back_file(node)
    };
    if let Some((below, file)) = below {
        reopen_file(context, &below, &file).await;
    }
}

/// Opens the raw disk of a file node again; removes the node if that fails.
async fn reopen_file(context: &Context, name: &str, node: &FileNode) {
    if !reopen(context, name, node.params.clone()).await {
        context.state.borrow_mut().files.remove(name);
    }
}

/// Opens the disk of a node again. Returns whether that succeeded.
pub(super) async fn reopen(context: &Context, node: &str, params: Value) -> bool {
    let opened = open_disk(context, node, params).await;
    if let Err(error) = &opened {
        tracing::warn!("the node {node} cannot be opened again: {error:?}");
    }
    opened.is_ok()
}

pub(super) fn check_name(context: &Context, name: &str) -> Result<(), QmpError> {
    if !is_well_formed(name) {
        return Err(QmpError::generic(format!("Invalid node-name: '{name}'")));
    }
    if name.len() > MAX_NAME {
        return Err(QmpError::generic("Node name too long"));
    }
    if context.has_node(name) {
        Err(QmpError::generic(format!("Duplicate nodes with node-name='{name}'")))
    } else {
        Ok(())
    }
}

/// The absolute path of a file, by which disks are compared.
pub(super) fn check_file_name(name: &str) -> Result<String, QmpError> {
    let path = std::path::absolute(name).ok().and_then(|path| path.to_str().map(str::to_owned));
    path.ok_or_else(|| QmpError::generic(format!("Could not open '{name}': it has no path")))
}

fn check_file(path: &str) -> Result<(), QmpError> {
    let error = match std::fs::metadata(path) {
        Ok(_) => return Ok(()),
        Err(error) => rustix::io::Errno::from_io_error(&error),
    };
    let why = match error {
        Some(rustix::io::Errno::NOENT) => "No such file or directory".to_owned(),
        Some(errno) => errno.to_string(),
        None => "its metadata cannot be read".to_owned(),
    };
    Err(QmpError::generic(format!("Could not open '{path}': {why}")))
}

/// Closes a disk and removes its nodes down to this depth. File nodes that a client added become
/// raw disks again, and the next image that a client added becomes a disk of its own again.
pub(super) async fn close(context: &Context, disk: &str, depth: usize) -> Result<(), QmpError> {
    let nodes = context.state.borrow().nodes_of(disk);
    let path_of = |depth: usize| {
        let disk = context.running.disks().find(disk)?;
        disk.layer_at(depth).map(|layer| (layer.name.to_owned(), layer.format_name))
    };
    let lower = (depth + 1..nodes.len()).find(|&depth| nodes[depth].is_owned);
    let lower = lower.and_then(|depth| Some((depth, path_of(depth)?)));
    let params = close_disk(context, disk).await?;
    for node in &nodes[..=depth] {
        context.state.borrow_mut().over.remove(&node.name);
        release_file(context, &node.name).await;
    }
    if let (Some((depth, (path, format))), Some(params)) = (lower, params) {
        // A node without parameters is a layer that a fork has left. It may be the backing file of
        // other disks, so it is opened read-only.
        let params = nodes[depth].params.clone().unwrap_or_else(|| {
            let mut params = params;
            params["path"] = path.into();
            params["format"] = format.into();
            params["read-only"] = true.into();
            params
        });
        let node = &nodes[depth].name;
        if reopen(context, node, params).await {
            let disk = context.disk(node)?;
            context.state.borrow_mut().chains.insert(disk, nodes[depth..].to_vec());
        }
    }
    Ok(())
}
