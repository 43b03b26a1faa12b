//! `blockhouse info`: the properties of an image, and how this host would serve it.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::image_args::resolve_relative;
use anyhow::{Context, Result};
use blockhouse_core::{Alignment, Capabilities, ErrorKind, Offload, WriteCache};
use blockhouse_daemon::control::Listed;
use blockhouse_disk::{Backing, Bitmap, DataFile, Features, ImageDisk, warn_of_mark};
use blockhouse_engine::{EngineChoice, EngineReport, EventLoop};
use blockhouse_format::qcow2::Switch;
use blockhouse_format::{Encryption, LuksEncryption, VmdkFacts};
use blockhouse_images::{
    CacheMode, FilePart, ImageOptions, Locking, PendingChanges, Purpose, StateUse, open,
    pending_changes, plain_backing, warn_of_state_elsewhere,
};
use blockhouse_qmp::qcow2_words::qcow2_data;
use serde_json::{Value, json};

use crate::bitmap;
use crate::image_args::ImageArgs;
use crate::json_text;
use crate::luks_info;
use crate::open_args::look_locking;
use crate::{called_as, output, qemu_info, snapshot_list};
use blockhouse_config::size;

/// Arguments of `info`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    image: ImageArgs,
    /// Show the image and all backing files of its chain.
    #[arg(long, short)]
    backing_chain: bool,
    /// Also show the limits of requests, by QEMU's names.
    #[arg(long)]
    limits: bool,
    /// The cache mode of the limits.
    #[arg(
        short = 't',
        long = "cache",
        hide = true,
        value_name = "MODE",
        default_value = "writeback"
    )]
    #[arg(value_parser = clap::builder::ValueParser::new(str::parse::<CacheMode>))]
    limits_cache: CacheMode,
}

/// The facts to report.
struct Facts {
    image: PathBuf,
    /// The name that the report shows instead of the path.
    said_name: Option<String>,
    format: &'static str,
    cluster_size: Option<u64>,
    logical_block_size: u64,
    qcow2: Option<Features>,
    backing: Option<Backing>,
    data_file: Option<DataFile>,
    /// Names of the files with the disk's data, of a format that has several.
    extents: Vec<Vec<u8>>,
    vmdk: Option<VmdkFacts>,
    /// Whether the command may examine the files that the image names.
    follows: bool,
    /// The limits of requests, if the user requested them.
    limits: Option<Value>,
    /// QEMU's driver of the image, if it is named without a format above it.
    driver: Option<String>,
    /// The part of its file that the image occupies, if options named one.
    part: Option<FilePart>,
    virtual_size: u64,
    /// The allocated space in bytes; `None` if the image is on another server.
    actual_size: Option<u64>,
    /// Bytes that writes to the disk can still allocate, if known.
    room_left: Option<u64>,
    /// Bytes of the file or device itself; `None` if it is on another server.
    file_size: Option<u64>,
    encryption: Option<Encryption>,
    capabilities: Capabilities,
    engine: EngineReport,
    pending: Option<PendingChanges>,
    bitmaps: Vec<Bitmap>,
    snapshots: Vec<Listed>,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
    let (image, options) = arguments.image.read_only()?;
    let state = options.state.clone();
    // The image is opened with direct I/O, as a server opens it.
    let options = ImageOptions {
        cache: CacheMode::None,
        locking: look_locking(&image, options.locking == Locking::None),
        // Missing changes are reported as a fact, so the open does not warn of them.
        state: StateUse::Off,
        ..options
    };
    let mut event_loop = EventLoop::new(EngineChoice::Auto)?;
    let chain = if arguments.backing_chain {
        event_loop.block_on(chain_of(&image, options))?
    } else {
        vec![(image, options)]
    };
    let facts =
        chain.into_iter().map(|(image, options)| facts_of(&mut event_loop, image, options, &state));
    let mut facts = facts.collect::<Result<Vec<_>>>()?;
    if let (Some(name), Some(first)) = (arguments.image.json_name(), facts.first_mut())
        && called_as::is_qemu_img()
    {
        first.said_name = Some(name);
    }
    if let Some(first) = facts.first_mut()
        && called_as::is_qemu_img()
    {
        first.driver = arguments.image.driver()?;
    }
    if arguments.limits {
        for one in &mut facts {
            one.limits = Some(limits_of(one, arguments.limits_cache));
        }
    }
    output::print(&match (arguments.image.is_json(), &*facts) {
        (false, facts) => facts.iter().map(as_text).collect::<Vec<_>>().join("\n\n"),
        (true, [facts]) if !arguments.backing_chain => json_text::pretty(&as_json(facts)),
        (true, facts) => json_text::pretty(&Value::Array(facts.iter().map(as_json).collect())),
    })
}

/// The images of a chain, each with the format that the image above it names. First opens the whole
/// chain, to check that all its files may be opened.
async fn chain_of(image: &Path, options: ImageOptions) -> Result<Vec<(PathBuf, ImageOptions)>> {
    let all = ImageOptions { cache: CacheMode::Writeback, ..options.clone() };
    drop(open(image, all.for_purpose(Purpose::Chain)).await?);
    let mut chain = vec![(image.to_owned(), options.clone())];
    loop {
        let (image, options) = chain.last().expect("it begins with one");
        let disk = open_as_served(image, options.clone()).await?;
        let Some(backing) = disk.image().backing_file() else { return Ok(chain) };
        let (backing, part) = plain_backing(backing, disk.name())?;
        let Backing { name, format } = &*backing;
        let format = format.as_deref().map(str::parse).transpose().map_err(anyhow::Error::msg)?;
        let options = ImageOptions { format, ..options.clone() }.in_part(part);
        let behind = (resolve_relative(image, name), options);
        chain.push(behind);
    }
}

/// Opens an image with direct I/O if possible.
async fn open_as_served(image: &Path, options: ImageOptions) -> Result<ImageDisk> {
    let options = options.for_purpose(Purpose::Metadata);
    Ok(match open(image, options.clone()).await {
        // Clusters smaller than the host's blocks are served through the page cache only, and some
        // file systems have no direct I/O.
        Err(error) if matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::InvalidInput) => {
            open(image, ImageOptions { cache: CacheMode::Writeback, ..options }).await
        }
        opened => opened,
    }?)
}

fn facts_of(
    event_loop: &mut EventLoop,
    image: PathBuf,
    options: ImageOptions,
    state: &StateUse,
) -> Result<Facts> {
    let follows = !options.allowed_paths.are_only();
    let part = options.part;
    let disk = event_loop.block_on(open_as_served(&image, options))?;
    event_loop.block_on(warn_of_mark(&disk));
    warn_of_state_elsewhere(disk.image(), state);
    let is_file = disk.image().file().is_some() || part.is_some();
    let actual_size = if is_file {
        Some(blocks_of(&image)? * 512 + disk.image().query_extents_allocated()?)
    } else {
        disk.image().allocated_bytes()?
    };
    Ok(Facts {
        said_name: None,
        qcow2: disk.image().features(),
        format: disk.image().format_name(),
        cluster_size: disk.image().cluster_size(),
        logical_block_size: disk.logical_block_size(),
        backing: disk.image().backing_file().cloned(),
        data_file: disk.image().data_file().cloned(),
        extents: disk.image().extent_files().to_vec(),
        vmdk: disk.image().vmdk_facts(),
        follows,
        limits: None,
        driver: None,
        part,
        virtual_size: disk.size(),
        actual_size,
        room_left: event_loop.block_on(disk.room_left()).ok().flatten().map(|room| room.left),
        file_size: is_file.then(|| size_of(&image)).transpose()?,
        encryption: event_loop.block_on(disk.image().read_encryption())?,
        capabilities: event_loop.block_on(async { disk.capabilities() }),
        engine: event_loop.report().clone(),
        pending: state.directory().map_or(Ok(None), |dir| pending_changes(disk.image(), dir))?,
        bitmaps: told(event_loop.block_on(disk.bitmaps().list())),
        snapshots: told(event_loop.block_on(disk.snapshots().list()))
            .iter()
            .map(Listed::from)
            .collect(),
        image,
    })
}

/// The list, or an empty one after an error. Warns of the error, unless the format has no such
/// list.
fn told<T>(listed: blockhouse_core::Result<Vec<T>>) -> Vec<T> {
    listed.unwrap_or_else(|error| {
        if error.kind() != ErrorKind::Unsupported {
            tracing::warn!("{error}");
        }
        Vec::new()
    })
}

/// How many blocks of 512 bytes the host has allocated for a file.
fn blocks_of(image: &Path) -> Result<u64> {
    let metadata = std::fs::metadata(image);
    Ok(metadata.with_context(|| format!("{}: cannot examine", image.display()))?.blocks())
}

/// The bytes of a file or block device.
fn size_of(image: &Path) -> Result<u64> {
    let size = || {
        let mut file = std::fs::File::open(image)?;
        std::io::Seek::seek(&mut file, std::io::SeekFrom::End(0))
    };
    size().with_context(|| format!("{}: cannot find its size", image.display()))
}

/// The limits of requests, by the keys of `qemu-img info --limits` (QEMU 10.1 and later).
fn limits_of(facts: &Facts, cache: CacheMode) -> Value {
    const PAGE: u32 = 4096;
    const MAX_BUFFERS: u32 = 1024;
    let alignment = match cache {
        CacheMode::None | CacheMode::Directsync => facts.capabilities.alignment,
        CacheMode::Writeback | CacheMode::Writethrough | CacheMode::Unsafe => Alignment::BYTE,
    };
    let cluster = facts.qcow2.and(facts.cluster_size).unwrap_or(0);
    json!({
        "request-alignment": alignment.offset,
        "discard-alignment": cluster,
        "write-zeroes-alignment": cluster,
        "max-iov": MAX_BUFFERS,
        "min-mem-alignment": alignment.memory,
        "opt-mem-alignment": alignment.memory.max(PAGE),
    })
}

fn as_text(facts: &Facts) -> String {
    if called_as::is_qemu_img() {
        let snapshots = snapshot_list::as_qemu_table(&facts.snapshots);
        return qemu_info::text_of(&as_json(facts), &snapshots);
    }
    let Facts { image, format, virtual_size, actual_size, capabilities, engine, .. } = facts;
    let mut lines = vec![
        format!("image: {}", image.display()),
        format!("file format: {format}"),
        format!("virtual size: {} ({virtual_size} bytes)", size::show(*virtual_size)),
        format!("disk size: {}", actual_size.map_or("unavailable".into(), size::show)),
    ];
    if let Some(PendingChanges { changes, process, state_file }) = &facts.pending {
        lines.push(format!(
            "missing changes: {changes} that process {process} answered before it died; they are in \
             {state_file}, and come into the image when it is served or changed"
        ));
    }
    if let Some(truncation) = facts.qcow2.and_then(|qcow2| qcow2.truncation) {
        lines.push(format!("incomplete: {truncation}"));
    }
    if let Some(stated) = facts.qcow2.map(|qcow2| qcow2.stated_size).filter(|size| size % 512 != 0)
    {
        lines.push(format!("size in the header: {stated} bytes (rounded down to whole sectors)"));
    }
    if let Some(Encryption::Aes) = &facts.encryption {
        lines.push("encrypted: yes".into());
        lines.push("encryption: AES-128-CBC without LUKS: weak, and it knows no wrong key".into());
    }
    if let Some(encryption) = luks_of(facts) {
        let header = encryption.header();
        let (version, cipher, slots) = (header.version, header.cipher.as_str(), header.slots.len());
        let (bits, uuid) = (header.key_bytes * 8, &header.uuid);
        lines.push("encrypted: yes".into());
        lines.push(format!(
            "encryption: LUKS{version}, {cipher}, a key of {bits} bits in {slots} key slots, UUID {uuid}"
        ));
    }
    if let Some(size) = facts.cluster_size {
        lines.push(format!("cluster_size: {size}"));
    }
    if facts.logical_block_size != 512 {
        lines.push(format!("sector size: {} bytes", facts.logical_block_size));
    }
    if let Some(DataFile { name, raw }) = &facts.data_file {
        let what = if *raw == Switch::On { "the raw disk" } else { "clusters of the image" };
        lines.push(format!("data file: {} ({what})", String::from_utf8_lossy(name)));
    }
    if let Some(Backing { name, format }) = &facts.backing {
        let full = resolve_relative(image, name);
        let name = String::from_utf8_lossy(name);
        let full = if full == Path::new(&*name) {
            String::new()
        } else {
            format!(" (actual path: {})", full.display())
        };
        lines.push(format!("backing file: {name}{full}"));
        lines.extend(format.as_ref().map(|format| format!("backing file format: {format}")));
    }
    if let Some(vmdk) = &facts.vmdk {
        lines.push(format!("create type: {}", vmdk.create_type.escape_debug()));
        lines.push(format!("CID: {:08x} (parent: {:08x})", vmdk.cid, vmdk.parent_cid));
    }
    if let Some(qcow2) = &facts.qcow2 {
        lines.push(format!("not closed (dirty): {}", qcow2.is_dirty));
        for (key, value) in qcow2_data(qcow2) {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            lines.push(format!("{}: {value}", key.replace('-', " ")));
        }
    }
    for bitmap in &facts.bitmaps {
        let (name, granularity) = (bitmap.name.escape_debug(), size::show(bitmap.granularity));
        lines.push(format!("bitmap: {name} ({granularity}, {})", bitmap::state_of(bitmap)));
    }
    if !facts.snapshots.is_empty() {
        lines.push(snapshot_list::as_qemu_table(&facts.snapshots));
    }
    lines.extend([
        format!("engine: {engine}"),
        format!("durable writes: {}", capabilities.fua.as_str()),
        format!("write cache: {}", write_cache(capabilities)),
        format!("direct I/O alignment: {} bytes", capabilities.alignment.offset),
        format!("discard: {}", available(capabilities.discard)),
        format!("fast zeroes: {}", available(capabilities.write_zeroes)),
        format!("written zeroes ahead: {}", available(capabilities.prepare_zeroes)),
    ]);
    for (key, value) in facts.limits.iter().flat_map(|limits| limits.as_object()).flatten() {
        lines.push(format!("{}: {value}", key.replace('-', " ")));
    }
    lines.join("\n")
}

fn as_json(facts: &Facts) -> Value {
    let Facts { image, format, virtual_size, actual_size, capabilities, engine, .. } = facts;
    let mut value = json!({
        "filename": facts.said_name.clone().unwrap_or_else(|| image.display().to_string()),
        "format": format,
        "virtual-size": virtual_size,
        "dirty-flag": facts.qcow2.as_ref().is_some_and(|qcow2| qcow2.is_dirty),
        "blockhouse": {
            "engine": engine.engine.as_str(),
            "engines-refused": engine.refused.iter()
                .map(|(engine, why)| json!({"engine": engine.as_str(), "reason": why}))
                .collect::<Vec<_>>(),
            "fua": capabilities.fua.as_str(),
            "write-cache": write_cache(capabilities),
            "alignment": {
                "offset": capabilities.alignment.offset,
                "memory": capabilities.alignment.memory,
            },
            "discard": capabilities.discard == Offload::Available,
            "write-zeroes": capabilities.write_zeroes == Offload::Available,
            "prepare-zeroes": capabilities.prepare_zeroes == Offload::Available,
        },
    });
    if let Some(actual_size) = actual_size {
        value["actual-size"] = (*actual_size).into();
    }
    if let Some(left) = facts.room_left {
        value["blockhouse"]["room-left"] = left.into();
    }
    if let Some(limits) = &facts.limits {
        value["limits"] = limits.clone();
    }
    if let Some(size) = facts.file_size {
        value["children"] = children_of(facts, size).into();
    } else if let Some(export) = export_data(facts) {
        value["children"] = json!([{ "name": "file", "info": export }]);
    }
    if let Some(truncation) = facts.qcow2.and_then(|qcow2| qcow2.truncation) {
        value["blockhouse"]["cut-off"] =
            json!({ "offset": truncation.offset, "file-size": truncation.file_size });
    }
    if let Some(pending) = &facts.pending {
        value["blockhouse"]["missing-changes"] = missing_as_json(pending);
    }
    value["blockhouse"]["references"] = references(facts);
    if let Some(Encryption::Aes) = &facts.encryption {
        value["encrypted"] = true.into();
        value["blockhouse"]["encryption"] = json!({ "format": "aes" });
    }
    if let Some(encryption) = luks_of(facts) {
        let header = encryption.header();
        value["encrypted"] = true.into();
        value["blockhouse"]["encryption"] = json!({
            "format": "luks",
            "version": header.version,
            "cipher": header.cipher.as_str(),
            "key-bits": header.key_bytes * 8,
            "sector-size": header.sector_size,
            "uuid": header.uuid,
            "payload-offset": header.payload,
            "slots": header.slots.iter().map(|slot| slot.number).collect::<Vec<_>>(),
        });
    }
    if !facts.snapshots.is_empty() {
        value["snapshots"] = serde_json::to_value(&facts.snapshots).expect("plain values");
    }
    if let Some(size) = facts.cluster_size {
        value["cluster-size"] = size.into();
    }
    if facts.logical_block_size != 512 {
        value["logical-block-size"] = facts.logical_block_size.into();
    }
    if let Some(Backing { name, format }) = &facts.backing {
        let name = String::from_utf8_lossy(name);
        let full = resolve_relative(image, name.as_bytes());
        value["full-backing-filename"] = full.display().to_string().into();
        value["backing-filename"] = name.into();
        if let Some(format) = format {
            value["backing-filename-format"] = format.as_str().into();
        }
    }
    if let Some(qcow2) = &facts.qcow2 {
        let mut data = qcow2_data(qcow2);
        if let Some(DataFile { name, raw }) = &facts.data_file {
            data.insert("data-file".into(), String::from_utf8_lossy(name).into());
            data.insert("data-file-raw".into(), (*raw == Switch::On).into());
        }
        if !facts.bitmaps.is_empty() {
            let bitmaps = facts.bitmaps.iter().map(bitmap::value_of).collect();
            data.insert("bitmaps".into(), Value::Array(bitmaps));
        }
        if let Some(Encryption::Aes) = &facts.encryption {
            data.insert("encrypt".into(), json!({ "format": "aes" }));
        }
        if let Some(encryption) = luks_of(facts) {
            let mut encrypt = luks_info::as_json(encryption.header());
            encrypt["format"] = "luks".into();
            data.insert("encrypt".into(), encrypt);
        }
        value["format-specific"] = json!({ "type": format, "data": data });
    } else if let Some(vmdk) = &facts.vmdk {
        value["format-specific"] = json!({ "type": format, "data": vmdk_data(vmdk, image) });
    } else if let Some(encryption) = luks_of(facts) {
        let data = luks_info::as_json(encryption.header());
        value["format-specific"] = json!({ "type": format, "data": data });
    }
    if let Some(driver) = &facts.driver {
        // QEMU's node for the bytes themselves, which has none below it.
        value["format"] = driver.as_str().into();
        value["children"] = json!([]);
        if facts.file_size.is_some() {
            value["format-specific"] = json!({ "type": "file", "data": {} });
        }
    }
    value
}

fn luks_of(facts: &Facts) -> Option<&LuksEncryption> {
    facts.encryption.as_ref()?.luks()
}

/// The names of other files and servers in the image. None of these was opened to find the names.
fn references(facts: &Facts) -> Value {
    let backing = facts.backing.iter().map(|backing| ("backing-file", &backing.name));
    let data = facts.data_file.iter().map(|file| ("data-file", &file.name));
    let extents = facts.extents.iter().map(|name| ("extent", name));
    let all = backing.chain(data).chain(extents);
    all.map(|(role, name)| json!({ "role": role, "name": String::from_utf8_lossy(name) })).collect()
}

fn write_cache(capabilities: &Capabilities) -> &'static str {
    match capabilities.write_cache {
        WriteCache::Volatile => "volatile",
        WriteCache::None => "none",
    }
}

fn available(offload: Offload) -> &'static str {
    match offload {
        Offload::Available => "yes",
        Offload::Unavailable => "no",
    }
}

/// The NBD export that is a raw image; `None` for other formats, because the size of their export
/// is unknown here.
fn export_data(facts: &Facts) -> Option<Value> {
    let name = facts.image.to_str().filter(|name| name.starts_with("nbd"))?;
    (facts.format == "raw").then(|| {
        json!({
            "children": [],
            "filename": name,
            "format": "nbd",
            "virtual-size": facts.virtual_size,
            "dirty-flag": false,
        })
    })
}

/// The nodes below the image, by the keys of `qemu-img info` (QEMU 8.0 and later): the extents that
/// it names, if they can be examined, and its own file.
fn children_of(facts: &Facts, size: u64) -> Vec<Value> {
    let named = |(role, name): (String, &Vec<u8>)| {
        let path = resolve_relative(&facts.image, name);
        let (size, actual) = (size_of(&path).ok()?, blocks_of(&path).ok()? * 512);
        Some(json!({ "name": role, "info": file_data(&path, size, Some(actual)) }))
    };
    // The last one is the first, as in QEMU.
    let extents = facts.vmdk.iter().flat_map(|vmdk| vmdk.extents.iter().enumerate().rev());
    let extents = extents.filter_map(|(index, extent)| {
        extent.file.as_ref().map(|name| (format!("extents.{index}"), name))
    });
    let mut children: Vec<_> =
        if facts.follows { extents.filter_map(named).collect() } else { Vec::new() };
    let actual = blocks_of(&facts.image).ok().map(|blocks| blocks * 512);
    let info = file_data(&facts.image, size, actual);
    let info = match facts.part {
        Some(part) if facts.format != "raw" => part_data(&facts.image, part, info),
        _ => info,
    };
    children.push(json!({ "name": "file", "info": info }));
    children
}

/// A node of QEMU's raw driver for a part of a file.
fn part_data(path: &Path, part: FilePart, file: Value) -> Value {
    let size = part.size.unwrap_or_default();
    let name = json!({
        "driver": "raw", "size": size, "offset": part.offset,
        "file": { "driver": file["format"], "filename": path.display().to_string() },
    });
    json!({
        "filename": format!("json:{name}"),
        "format": "raw",
        "virtual-size": size,
        "actual-size": file["actual-size"],
        "dirty-flag": false,
        "children": [{ "name": "file", "info": file }],
    })
}

fn file_data(path: &Path, size: u64, actual_size: Option<u64>) -> Value {
    let format = if std::fs::metadata(path).is_ok_and(|file| file.is_file()) {
        "file"
    } else {
        "host_device"
    };
    json!({
        "children": [],
        "filename": path.display().to_string(),
        "format": format,
        // Rounded up to sectors, as QEMU does for every file.
        "virtual-size": size.next_multiple_of(512),
        "actual-size": actual_size,
        "dirty-flag": false,
        // QEMU has the type "file" for devices, too.
        "format-specific": { "type": "file", "data": {} },
    })
}

/// The `format-specific` data of a VMDK image, by the keys of `qemu-img info`.
fn vmdk_data(vmdk: &VmdkFacts, image: &Path) -> Value {
    let extents = vmdk.extents.iter().map(|extent| {
        let file = extent.file.as_ref();
        let path = file.map_or(image.to_owned(), |name| resolve_relative(image, name));
        let mut value = json!({
            "filename": path.display().to_string(),
            "format": extent.kind,
            "virtual-size": extent.size,
        });
        if let Some(size) = extent.grain_size {
            value["cluster-size"] = size.into();
        }
        if extent.is_compressed {
            value["compressed"] = true.into();
        }
        value
    });
    json!({
        "cid": vmdk.cid,
        "parent-cid": vmdk.parent_cid,
        "create-type": vmdk.create_type,
        "extents": extents.collect::<Vec<_>>(),
    })
}

/// Acknowledged changes that the image lacks.
pub fn missing_as_json(pending: &PendingChanges) -> Value {
    let PendingChanges { changes, process, state_file } = pending;
    json!({ "changes": changes, "process": process, "state-file": state_file })
}
