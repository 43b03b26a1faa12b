//! `blockhouse info`: what an image is, and how this host would serve it.

use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use blockhouse_core::{Capabilities, ErrorKind, Offload, WriteCache};
use blockhouse_disk::{
    Access, Backing, CacheMode, DetectZeroes, Discard, ImageFormat, ImageOptions, Locking,
    open_alone,
};
use blockhouse_engine::{EngineChoice, EngineReport, EventLoop};
use serde_json::json;

use crate::qcow2_facts::Qcow2Facts;
use crate::size;

/// Arguments of `info`.
#[derive(clap::Args)]
pub struct Arguments {
    /// The image's format; left out, the file's name decides (.qcow2, otherwise raw).
    #[arg(long, short, value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    /// Print JSON with the keys of `qemu-img info --output=json`.
    #[arg(long)]
    json: bool,
    /// The image. It is only read, and not locked: it may be in use.
    image: PathBuf,
}

/// What there is to say.
struct Facts {
    image: PathBuf,
    format: &'static str,
    cluster_size: Option<u64>,
    qcow2: Option<Qcow2Facts>,
    backing: Option<Backing>,
    virtual_size: u64,
    actual_size: u64,
    capabilities: Capabilities,
    engine: EngineReport,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> Result<()> {
    let Arguments { format, json, image } = arguments;
    let options = ImageOptions {
        format,
        access: Access::ReadOnly,
        cache: CacheMode::None,
        discard: Discard::Unmap,
        detect_zeroes: DetectZeroes::Off,
        locking: Locking::None,
    };
    let mut event_loop = EventLoop::new(EngineChoice::Auto)?;
    let disk = event_loop.block_on(async {
        match open_alone(&image, options).await {
            // Clusters smaller than the host's blocks are served through the page cache only.
            Err(error) if error.kind() == ErrorKind::Unsupported => {
                open_alone(&image, ImageOptions { cache: CacheMode::Writeback, ..options }).await
            }
            opened => opened,
        }
    })?;
    let metadata = std::fs::metadata(&image)
        .with_context(|| format!("{}: cannot examine", image.display()))?;
    let qcow2 = match disk.format_name() {
        "qcow2" => Some(Qcow2Facts::read(&image)?),
        _ => None,
    };
    let facts = Facts {
        qcow2,
        format: disk.format_name(),
        cluster_size: disk.cluster_size(),
        backing: disk.backing_file().cloned(),
        virtual_size: disk.size(),
        actual_size: metadata.blocks() * 512,
        capabilities: disk.capabilities(),
        engine: event_loop.report().clone(),
        image,
    };
    let text = if json { as_json(&facts) } else { as_text(&facts) };
    // Nobody reading is no failure of ours.
    let _ = writeln!(std::io::stdout(), "{text}");
    Ok(())
}

fn as_text(facts: &Facts) -> String {
    let Facts { image, format, virtual_size, actual_size, capabilities, engine, .. } = facts;
    let mut lines = vec![
        format!("image: {}", image.display()),
        format!("file format: {format}"),
        format!("virtual size: {} ({virtual_size} bytes)", size::show(*virtual_size)),
        format!("disk size: {}", size::show(*actual_size)),
    ];
    if let Some(size) = facts.cluster_size {
        lines.push(format!("cluster size: {size} bytes"));
    }
    if let Some(Backing { name, format }) = &facts.backing {
        let format = format.as_deref().unwrap_or("not stored in the image");
        let name = String::from_utf8_lossy(name);
        lines.push(format!("backing file: {name} (format: {format})"));
    }
    if let Some(qcow2) = &facts.qcow2 {
        lines.push(format!("not closed (dirty): {}", qcow2.is_dirty()));
        for (key, value) in qcow2.data() {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            lines.push(format!("{}: {value}", key.replace('-', " ")));
        }
    }
    lines.extend([
        format!("engine: {engine}"),
        format!("durable writes: {}", capabilities.fua.as_str()),
        format!("write cache: {}", write_cache(capabilities)),
        format!("direct I/O alignment: {} bytes", capabilities.alignment.offset),
        format!("discard: {}", available(capabilities.discard)),
        format!("fast zeroes: {}", available(capabilities.write_zeroes)),
    ]);
    lines.join("\n")
}

fn as_json(facts: &Facts) -> String {
    let Facts { image, format, virtual_size, actual_size, capabilities, engine, .. } = facts;
    let mut value = json!({
        "filename": image.display().to_string(),
        "format": format,
        "virtual-size": virtual_size,
        "actual-size": actual_size,
        "dirty-flag": facts.qcow2.as_ref().is_some_and(Qcow2Facts::is_dirty),
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
        },
    });
    if let Some(size) = facts.cluster_size {
        value["cluster-size"] = size.into();
    }
    if let Some(Backing { name, format }) = &facts.backing {
        let name = String::from_utf8_lossy(name);
        let full = image.parent().unwrap_or(Path::new("")).join(&*name);
        value["full-backing-filename"] = full.display().to_string().into();
        value["backing-filename"] = name.into();
        if let Some(format) = format {
            value["backing-filename-format"] = format.as_str().into();
        }
    }
    if let Some(qcow2) = &facts.qcow2 {
        value["format-specific"] = json!({ "type": format, "data": qcow2.data() });
    }
    format!("{value:#}")
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
