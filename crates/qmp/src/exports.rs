//! Exports, and the address of QEMU's single NBD server.
//!
//! An export that is not writable is read-only, even if other exports may change its disk.

use std::path::PathBuf;
use std::rc::Rc;

use blockhouse_daemon::passed_sockets;
use blockhouse_disk::{Access, is_inactive};
use blockhouse_nbd::proto::MAX_STRING;
use blockhouse_nbd::uri::{Address, NbdUri, Security};
use serde_json::{Value, json};

use super::activity::change;
use super::arguments::{Arguments, is_well_formed};
use super::context::Context;
use super::errors::{QmpError, Returned};
use super::objects::{check_server_tls, check_thread};
use super::state::{NamedExport, NbdServer};

/// `query-block-exports`.
pub(super) async fn query(context: &Rc<Context>, given: Arguments) -> Returned {
    given.end()?;
    let exports = context.call("export.list", json!({})).await?;
    let state = context.state.borrow();
    let told = exports.as_array().into_iter().flatten().map(|export| {
        json!({
            "id": state.id_of(text_of(export, "export")),
            "node-name": state.node_of(text_of(export, "export"), text_of(export, "disk")),
            "type": export["kind"],
            "shutting-down": false,
        })
    });
    Ok(told.collect())
}

fn text_of<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

/// `block-export-add`.
pub(super) async fn add(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let kind = given.needed_word("type", &["nbd", "vhost-user-blk", "fuse", "vduse-blk"])?;
    let id = given.text("id")?;
    let node = given.text("node-name")?;
    let is_writable = given.flag("writable", false)?;
    given.only("writethrough", &[json!(false)], "the disk's cache mode says it")?;
    if let Some(thread) = given.some_text("iothread")? {
        check_thread(context, &thread)?;
    }
    given.flag("fixed-iothread", false)?;
    let allows_inactive = given.flag("allow-inactive", false)?;
    match kind {
        "nbd" => {
            let name = given.some_text("name")?.unwrap_or_else(|| node.clone());
            let description = given.some_text("description")?.unwrap_or_default();
            let has_depth = given.flag("allocation-depth", false)?;
            let bitmaps = given.some_list("bitmaps")?.unwrap_or_default();
            given.end()?;
            let node = (String::new(), node);
            let export = NbdExport { id, node, name, is_writable, allows_inactive };
            let offered = Offered { description, has_depth, ..Offered::default() };
            export.add(context, offered, bitmaps).await
        }
        "vhost-user-blk" => {
            let mut addr = given.object("addr")?;
            let path = socket_path(&mut addr, kind)?;
            given.some_unsigned("num-queues")?;
            let block = given.some_unsigned("logical-block-size")?;
            given.end()?;
            if allows_inactive {
                return Err(QmpError::generic("Export type does not support inactive exports"));
            }
            check_id(context, &id)?;
            let disk = context.served_disk("", &node)?;
            check_access(context, (&disk, &node), is_writable, allows_inactive).await?;
            check_block_size(context, &disk, block)?;
            let named = NamedExport { id, address: path, node, allows_inactive };
            serve(context, named, &disk, is_writable, Offered::default()).await
        }
        _ => Err(QmpError::generic(format!("Exports of the type '{kind}' are not possible here"))),
    }
}

/// `nbd-server-add`: the export's id is its name.
pub(super) async fn add_to_server(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let device = given.text("device")?;
    let name = given.some_text("name")?.unwrap_or_else(|| device.clone());
    let is_writable = given.flag("writable", false)?;
    let description = given.some_text("description")?.unwrap_or_default();
    let bitmap = given.some_text("bitmap")?;
    given.end()?;
    let node = (device.clone(), device);
    let export = NbdExport { id: name.clone(), node, name, is_writable, allows_inactive: false };
    let offered = Offered { description, ..Offered::default() };
    export.add(context, offered, bitmap.into_iter().map(Value::String).collect()).await
}

/// A requested NBD export.
struct NbdExport {
    id: String,
    /// The `device` for error texts, and the name of its node.
    node: (String, String),
    name: String,
    is_writable: bool,
    allows_inactive: bool,
}

impl NbdExport {
    async fn add(self, context: &Context, offered: Offered, bitmaps: Vec<Value>) -> Returned {
        let Self { id, node: (device, node), name, is_writable, allows_inactive } = self;
        let NbdServer { address, tls } = server(context)?;
        check_id(context, &id)?;
        let disk = context.served_disk(&device, &node)?;
        check_access(context, (&disk, &node), is_writable, allows_inactive).await?;
        let Offered { description, .. } = &offered;
        if description.len() > MAX_STRING {
            return Err(QmpError::generic(format!("description '{description}' too long")));
        }
        let bitmaps = taken_bitmaps(context, &disk, bitmaps)?;
        let security = if tls.is_some() { Security::Tls } else { Security::Plain };
        let uri = NbdUri { security, address, export: name };
        let taken = context.running.exports().list().into_iter();
        let text = uri.to_string();
        if taken.map(|export| export.address.to_string()).any(|address| address == text) {
            let why = format!("NBD server already has export named '{}'", uri.export);
            return Err(QmpError::generic(why));
        }
        let named = NamedExport { id: id.clone(), address: text, node, allows_inactive };
        let offered = Offered { bitmaps, ..offered };
        serve(context, named, &disk, is_writable, offered).await?;
        // `nbd-server-stop` may have ended the server meanwhile. Then the export has its own
        // socket.
        if let Err(stopped) = server(context) {
            let address = context.state.borrow().address_of(&id);
            // `nbd-server-stop` may have removed it, too.
            let _ = context.call("export.remove", json!({ "export": address })).await;
            return Err(stopped);
        }
        Ok(json!({}))
    }
}

/// The NBD server that was started.
fn server(context: &Context) -> Result<NbdServer, QmpError> {
    let server = context.state.borrow().nbd_server.clone();
    server.ok_or_else(|| QmpError::generic("NBD server not running"))
}

fn check_id(context: &Context, id: &str) -> Result<(), QmpError> {
    if !is_well_formed(id) {
        return Err(QmpError::generic("Invalid block export id"));
    }
    if context.state.borrow().exports.iter().any(|export| export.id == id) {
        Err(QmpError::generic(format!("Block export id '{id}' is already in use")))
    } else {
        Ok(())
    }
}

/// Refuses a writable export of a read-only disk or node. An inactive disk becomes active, unless
/// the export allows it to stay inactive.
async fn check_access(
    context: &Context,
    (disk, node): (&str, &str),
    is_writable: bool,
    allows_inactive: bool,
) -> Result<(), QmpError> {
    let filter = context.state.borrow().filters.get(node).cloned();
    let running = context.running.disks().get(disk).map_err(QmpError::failed)?;
    let was_inactive = is_inactive(&running.disk);
    let is_read_only = match was_inactive {
        true => running.setup.is_read_only(),
        false => running.disk.access() == Access::ReadOnly,
    };
    let is_read_only = is_read_only || filter.is_some_and(|filter| filter.is_read_only);
    if is_read_only && is_writable {
        return Err(QmpError::generic("Cannot export read-only node as writable"));
    }
    if was_inactive && !allows_inactive { change(context, disk, true).await } else { Ok(()) }
}

fn check_block_size(context: &Context, disk: &str, wanted: Option<u64>) -> Result<(), QmpError> {
    let disk =
        context.running.disks().get(disk).map_err(|why| QmpError::generic(why.to_string()))?;
    let has = disk.disk.logical_block_size();
    if wanted.is_none_or(|wanted| wanted == has) {
        Ok(())
    } else {
        Err(QmpError::generic(format!(
            "Parameter 'logical-block-size' is not possible here: that of '{}' is {has}",
            disk.name()
        )))
    }
}

const OF_TWO_NODES: &str = "An export has bitmaps of one node here, and these are of two";

/// Bitmaps that an export offers besides those that its disk was opened with. `of`: the disk that
/// has them, if it is neither the export's disk nor the source of the backup that is served.
#[derive(Default)]
struct Taken {
    names: Vec<String>,
    of: Option<String>,
}

/// Checks the bitmaps that clients of an export may query. An export of a backup has bitmaps of the
/// backup's target node, or of its source. Other disks offer their own, or, if they are read-only,
/// those of another read-only disk.
fn taken_bitmaps(context: &Context, disk: &str, bitmaps: Vec<Value>) -> Result<Taken, QmpError> {
    let name_of = |bitmap: &Value| bitmap.as_str().or(bitmap["name"].as_str()).map(str::to_owned);
    let names: Vec<_> = bitmaps.iter().filter_map(name_of).collect();
    let state = context.state.borrow();
    if let Some(pull) = state.pulls.values().find(|pull| pull.frozen == disk) {
        let target = context.running.disks().find(&pull.target);
        let has = |name: &String| {
            target.as_ref().is_some_and(|target| target.disk.bitmaps().is_transient(name))
        };
        return match names.iter().filter(|name| has(name)).count() {
            0 => Ok(Taken { names, of: None }),
            count if count == names.len() => Ok(Taken { names, of: Some(pull.target.clone()) }),
            _ => Err(QmpError::generic(OF_TWO_NODES)),
        };
    }
    let nodes = bitmaps.iter().filter_map(|bitmap| bitmap["node"].as_str());
    let owners = nodes.map(|node| context.disk(node)).collect::<Result<Vec<_>, _>>()?;
    if let Some(other) = owners.iter().find(|owner| *owner != disk) {
        return if owners.len() == names.len() && owners.iter().all(|owner| owner == other) {
            Ok(Taken { names, of: Some(other.clone()) })
        } else {
            Err(QmpError::generic(OF_TWO_NODES))
        };
    }
    let disk =
        context.running.disks().get(disk).map_err(|why| QmpError::generic(why.to_string()))?;
    // All exports of a disk offer the bitmaps that it was opened with.
    let are_offered = names.iter().all(|name| disk.offers_bitmap(name));
    Ok(if are_offered { Taken::default() } else { Taken { names, of: None } })
}

/// The description of an export, and its metadata contexts besides `base:allocation`.
#[derive(Default)]
struct Offered {
    description: String,
    /// Whether clients may query which image of the chain has the data.
    has_depth: bool,
    bitmaps: Taken,
}

async fn serve(
    context: &Context,
    named: NamedExport,
    disk: &str,
    is_writable: bool,
    Offered { description, has_depth, bitmaps }: Offered,
) -> Returned {
    let id = named.id.clone();
    let mut params = json!({
        "disk": disk,
        "export": named.address,
        "read-only": !is_writable,
        "allocation-depth": has_depth,
        "description": description,
    });
    if !bitmaps.names.is_empty() {
        params["bitmaps"] = bitmaps.names.into();
        params["bitmaps-of"] = bitmaps.of.into();
    }
    // Recorded before the call, so that no other client can use the id.
    context.state.borrow_mut().exports.push(named);
    let added = context.call("export.add", params).await;
    let mut state = context.state.borrow_mut();
    let added = added.inspect_err(|_| state.exports.retain(|export| export.id != id))?;
    let address = text_of(&added, "export").to_owned();
    let mut exports = state.exports.iter_mut();
    exports
        .find(|export| export.id == id)
        .into_iter()
        .for_each(|export| export.address = address.clone());
    Ok(json!({}))
}

/// `block-export-del`.
pub(super) async fn delete(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let id = given.text("id")?;
    remove(context, id, given).await
}

/// `nbd-server-remove`.
pub(super) async fn remove_from_server(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let name = given.text("name")?;
    remove(context, name, given).await
}

async fn remove(context: &Context, id: String, mut given: Arguments) -> Returned {
    let mode = given.word("mode", &["safe", "hard"])?;
    given.end()?;
    let address = context.state.borrow().address_of(&id);
    let exports = context.call("export.list", json!({})).await?;
    let mut exports = exports.as_array().into_iter().flatten();
    let Some(export) = exports.find(|export| export["export"] == *address) else {
        return Err(QmpError::generic(format!("Export '{id}' is not found")));
    };
    let has_clients = export["clients"].as_u64().is_some_and(|clients| clients > 0);
    if has_clients && mode != Some("hard") {
        return Err(QmpError::generic(format!("export '{id}' still in use")));
    }
    context.call("export.remove", json!({ "export": address })).await?;
    Ok(json!({}))
}

/// `nbd-server-start`.
pub(super) async fn start_server(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let addr = given.object("addr")?;
    let address = address(addr)?;
    let max_connections = given.some_unsigned("max-connections")?.filter(|max| *max > 0);
    let why = "'serve --limit' and 'serve --tls-allow' say that of all clients";
    given.only("handshake-max-seconds", &[], why)?;
    let tls = given.some_text("tls-creds")?;
    tls.iter().try_for_each(|id| check_server_tls(context, id))?;
    given.only("tls-authz", &[], why)?;
    given.end()?;
    if context.state.borrow().nbd_server.is_some() {
        return Err(QmpError::generic("NBD server already running"));
    }
    let security = if tls.is_some() { Security::Tls } else { Security::Plain };
    let uri = NbdUri { security, address, export: String::new() };
    let mut params = json!({ "address": uri.to_string() });
    max_connections.into_iter().for_each(|max| params["max-connections"] = max.into());
    // Recorded before the server listens, so that a command of another client does not start a
    // second server meanwhile.
    let mut server = NbdServer { address: uri.address, tls };
    context.state.borrow_mut().nbd_server = Some(server.clone());
    let added = context.call("socket.add", params).await;
    if let Ok(added) = &added
        && let Ok(uri) = text_of(added, "address").parse::<NbdUri>()
    {
        // The reply has the real port if port 0 was requested.
        server.address = uri.address;
    }
    context.state.borrow_mut().nbd_server = added.is_ok().then_some(server);
    added.map(|_| json!({}))
}

/// Parses a `SocketAddressLegacy`.
fn address(mut given: Arguments) -> Result<Address, QmpError> {
    let kind = given.needed_word("type", &["inet", "unix", "vsock", "fd"])?;
    let is_option = given.is_option();
    let mut data = given.parts_of_address()?;
    let address = match kind {
        "inet" => {
            let (host, port) = (data.text("host")?, data.text("port")?);
            data.end()?;
            let wrong = |_| QmpError::generic(format!("can't convert to a number: {port}"));
            Address::Tcp { host, port: port.parse().map_err(wrong)? }
        }
        "unix" => {
            let path = data.text("path")?;
            data.only("abstract", &[json!(false)], "sockets are files")?;
            data.flag("tight", true)?;
            data.end()?;
            Address::Unix(absolute(&path)?)
        }
        // QEMU's error: no command passes a descriptor to a storage daemon.
        "fd" if !is_option => {
            return Err(QmpError::generic("only QEMU supports file descriptor passing"));
        }
        "fd" => {
            let number = data.text("str")?;
            data.end()?;
            let wrong = |_| QmpError::generic(format!("Unable to parse FD number {number}"));
            Address::Unix(passed_sockets::path_of(number.parse().map_err(wrong)?))
        }
        _ => {
            let why = format!("Addresses of the type '{kind}' are not possible here");
            return Err(QmpError::generic(why));
        }
    };
    Ok(address)
}

/// The absolute path of a socket, by which the socket is identified.
fn absolute(path: &str) -> Result<PathBuf, QmpError> {
    let failed = |error| QmpError::generic(format!("Failed to bind socket to {path}: {error}"));
    std::path::absolute(path).map_err(failed)
}

/// Parses a `SocketAddress`, which must be a Unix socket, and returns its path.
fn socket_path(given: &mut Arguments, export: &str) -> Result<String, QmpError> {
    match given.needed_word("type", &["inet", "unix", "vsock", "fd"])? {
        "unix" => {
            let path = given.text("path")?;
            given.end()?;
            let path = absolute(&path)?;
            path.into_os_string().into_string().map_err(|_| QmpError::generic("it is not UTF-8"))
        }
        kind => Err(QmpError::generic(format!(
            "Addresses of the type '{kind}' are not possible for {export} here: use 'unix'"
        ))),
    }
}

/// `nbd-server-stop`: removes the server's exports and disconnects their clients.
pub(super) async fn stop_server(context: &Rc<Context>, given: Arguments) -> Returned {
    given.end()?;
    let server = server(context)?;
    // Removed first, so that a command that adds an export meanwhile fails.
    context.state.borrow_mut().nbd_server = None;
    let stopped = end_server(context, &server).await;
    if stopped.is_err() {
        context.state.borrow_mut().nbd_server = Some(server);
    }
    stopped
}

async fn end_server(context: &Context, NbdServer { address, tls }: &NbdServer) -> Returned {
    let is_there = |export: &str| export.parse::<NbdUri>().is_ok_and(|uri| uri.address == *address);
    let exports = context.call("export.list", json!({})).await?;
    for export in exports.as_array().into_iter().flatten() {
        let export = text_of(export, "export");
        if is_there(export) {
            let removed = context.call("export.remove", json!({ "export": export })).await;
            // The export may have ended meanwhile.
            let listed = context.running.exports().list();
            if removed.is_err() && listed.iter().any(|one| one.address.to_string() == export) {
                return removed;
            }
        }
    }
    let security = if tls.is_some() { Security::Tls } else { Security::Plain };
    let uri = NbdUri { security, address: address.clone(), export: String::new() };
    // The socket may have been removed at the control socket.
    let _ = context.call("socket.remove", json!({ "address": uri.to_string() })).await;
    Ok(json!({}))
}
