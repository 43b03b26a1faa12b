//! The options of new images of other programs' formats (`create -f vmdk -o NAME=VALUE,...`), with
//! the names of `qemu-img`.
//!
//! Guarantees: an option is either obeyed or refused. Two options are accepted without effect,
//! because what they request is always true: a VHD has exactly the requested size (`force_size`),
//! and unwritten blocks read as zeros (`block_state_zero`). Under the name qemu-img `preallocation`
//! has no effect either, as there.

use blockhouse_config::{size, switch};
use blockhouse_disk::Backing;
use blockhouse_format::qcow2::Preallocation;
use blockhouse_format::{ForeignKind, NewForeignOptions, Subformat};

use crate::called_as;
use crate::create_setting::{Setting, backing_file, name_and_value};
use crate::qemu_refusals;

/// Option names, each with the formats that have the option.
const OPTIONS: &[(&str, &[ForeignKind])] = &[
    ("adapter_type", &[ForeignKind::Vmdk]),
    ("block_size", &[ForeignKind::Vhdx]),
    ("block_state_zero", &[ForeignKind::Vhdx]),
    ("compat6", &[ForeignKind::Vmdk]),
    ("force_size", &[ForeignKind::Vpc]),
    ("hwversion", &[ForeignKind::Vmdk]),
    ("log_size", &[ForeignKind::Vhdx]),
    ("static", &[ForeignKind::Vdi]),
    ("subformat", &[ForeignKind::Vmdk, ForeignKind::Vpc, ForeignKind::Vhdx]),
    ("toolsversion", &[ForeignKind::Vmdk]),
    ("zeroed_grain", &[ForeignKind::Vmdk]),
];

/// The `hwversion` that means VMDK's default, and the one that `compat6` means.
const UNDEFINED: &str = "undefined";
const COMPAT6: &str = "6";

/// Bytes of the largest block of a VHDX image.
const MAX_BLOCK: u64 = 256 << 20;

/// Whether one of these formats has an option of this name.
pub fn is_name(name: &str) -> bool {
    OPTIONS.iter().any(|(known, _)| *known == name)
}

/// The option of this [name](is_name) with this value.
///
/// # Errors
/// The mistake in the value.
pub fn parse(name: &str, value: &str) -> Result<Setting, String> {
    let found = OPTIONS.iter().find(|(known, _)| *known == name);
    let (name, _) = found.ok_or_else(|| format!("there is no option '{name}'"))?;
    let wrong = |known: &str| Err(format!("{name} cannot be '{value}'; use {known}"));
    let value = match *name {
        "block_size" | "log_size" => match size::parse(value) {
            Ok(size) => size.to_string(),
            Err(_) => return wrong("a size, like 1M"),
        },
        name if qemu_refusals::is_switch(name) => match switch::parse(value) {
            Some(is_on) => if is_on { "on" } else { "off" }.to_owned(),
            None => return wrong("on or off"),
        },
        "adapter_type" if !["ide", "lsilogic", "buslogic", "legacyESX"].contains(&value) => {
            return wrong("ide, lsilogic, buslogic or legacyESX");
        }
        "hwversion" if value != UNDEFINED && value.parse::<u16>().is_err() => {
            return wrong("a number");
        }
        "toolsversion" => match value.parse::<u32>() {
            Ok(version) => version.to_string(),
            Err(_) => return wrong("a number"),
        },
        _ => value.to_owned(),
    };
    Ok(Setting::Foreign(name, value))
}

/// The options for an image of `size` bytes, from `settings`. If an option is given more than once,
/// the last one is used.
///
/// # Errors
/// An option that the format does not have, or a value that is not possible.
pub fn of(kind: ForeignKind, size: u64, settings: &[Setting]) -> Result<NewForeignOptions, String> {
    let mut options = NewForeignOptions::new(size);
    let value_of = |wanted: &str| {
        settings.iter().rev().find_map(|setting| match setting {
            Setting::Foreign(name, value) if *name == wanted => Some(value.as_str()),
            _ => None,
        })
    };
    if value_of("compat6") == Some("on") && value_of("hwversion").is_some_and(|it| it != UNDEFINED)
    {
        return Err("compat6 cannot be enabled with hwversion set".to_owned());
    }
    for setting in settings {
        match setting {
            Setting::Foreign(name, value) if has(kind, name) => {
                apply(kind, &mut options, name, value)?;
            }
            Setting::NoCopyOnWrite(_) | Setting::ExtentSize(_) | Setting::Size(_) => {}
            // The caller finds the parent.
            Setting::BackingFile(_) if kind == ForeignKind::Vmdk => {}
            Setting::BackingFormat(format) if kind == ForeignKind::Vmdk => {
                if format != "vmdk" {
                    return Err(wrong_parent(format));
                }
            }
            Setting::Preallocation(Preallocation::Off) => {}
            // To qemu-img these are options of the file, which is empty at that time: it ignores
            // two of them.
            Setting::Preallocation(Preallocation::Metadata) if called_as::is_qemu_img() => {
                return Err("Unsupported preallocation mode: metadata".to_owned());
            }
            Setting::Preallocation(_) if called_as::is_qemu_img() => {}
            Setting::Refused(refusal) => return Err(refusal.words.clone()),
            other => return Err(not_of(kind, other)),
        }
    }
    Ok(options)
}

fn has(kind: ForeignKind, name: &str) -> bool {
    OPTIONS.iter().any(|(known, kinds)| *known == name && kinds.contains(&kind))
}

fn apply(
    kind: ForeignKind,
    options: &mut NewForeignOptions,
    name: &str,
    value: &str,
) -> Result<(), String> {
    match (name, value) {
        ("subformat", _) => {
            options.is_split = value.starts_with("twoGb");
            options.subformat = subformat(kind, value)?;
        }
        ("static", "on") => options.subformat = Subformat::Fixed,
        ("static", _) => options.subformat = Subformat::Sparse,
        ("block_size", _) => {
            let size = value.parse().ok().filter(|&size| size > 0);
            options.block_size = size.map(|size| in_mib(size, MAX_BLOCK));
        }
        ("log_size", _) => options.log_size = in_mib(value.parse().unwrap_or_default(), u64::MAX),
        ("adapter_type", _) => options.adapter = value.to_owned(),
        ("hwversion", UNDEFINED) => {}
        ("hwversion", _) => options.hardware_version = value.to_owned(),
        ("toolsversion", _) => options.tools_version = value.to_owned(),
        ("zeroed_grain", _) => options.has_zero_grains = value == "on",
        ("compat6", "on") => options.hardware_version = COMPAT6.to_owned(),
        _ => {}
    }
    Ok(())
}

/// The error for a parent of another format than VMDK.
fn wrong_parent(format: &str) -> String {
    match called_as::is_qemu_img() {
        true => "backing_file must be a vmdk image".to_owned(),
        false => format!("backing_fmt cannot be '{format}': the parent is a VMDK image, too"),
    }
}

/// The size that qemu-img makes of this size of a block or log: whole MiB, and `max` at most. Under
/// our own name other sizes are refused when the image is made.
fn in_mib(size: u64, max: u64) -> u64 {
    const MIB: u64 = 1 << 20;
    if called_as::is_qemu_img() { size.div_ceil(MIB).saturating_mul(MIB).min(max) } else { size }
}

fn subformat(kind: ForeignKind, value: &str) -> Result<Subformat, String> {
    match (kind, value) {
        (ForeignKind::Vmdk, "monolithicSparse" | "twoGbMaxExtentSparse") => Ok(Subformat::Sparse),
        (ForeignKind::Vmdk, "monolithicFlat" | "twoGbMaxExtentFlat") => Ok(Subformat::Fixed),
        (ForeignKind::Vmdk, "streamOptimized") => Ok(Subformat::Stream),
        (ForeignKind::Vmdk, _) if called_as::is_qemu_img() => {
            Err(format!("invalid parameter value: {value}"))
        }
        (ForeignKind::Vmdk, _) => Err(format!(
            "subformat cannot be '{value}'; use monolithicSparse, monolithicFlat, twoGbMaxExtentSparse, \
             twoGbMaxExtentFlat or streamOptimized"
        )),
        (_, "dynamic") => Ok(Subformat::Sparse),
        (_, "fixed") => Ok(Subformat::Fixed),
        _ if called_as::is_qemu_img() => {
            Err(format!("Parameter 'subformat' does not accept value '{value}'"))
        }
        _ => Err(format!("subformat cannot be '{value}'; use dynamic or fixed")),
    }
}

/// The parent (backing file) of the new image, with its format.
pub fn parent_of(settings: &[Setting]) -> Option<Backing> {
    let name = backing_file(settings)?.as_bytes().to_vec();
    let format = settings.iter().rev().find_map(|setting| match setting {
        Setting::BackingFormat(format) => Some(format.clone()),
        _ => None,
    });
    Some(Backing { name, format: format.or_else(|| Some("vmdk".to_owned())) })
}

fn not_of(kind: ForeignKind, setting: &Setting) -> String {
    let format = kind.as_str();
    match (setting, name_and_value(setting)) {
        (Setting::BackingFile(_) | Setting::BackingFormat(_), _) => {
            format!("Backing file not supported for file format '{format}'")
        }
        (_, word) => {
            let name = word.map_or("encrypt.format", |(name, _)| name);
            if called_as::is_qemu_img() {
                format!("Invalid parameter '{name}'")
            } else {
                format!("{format} images have no option '{name}'")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(kind: ForeignKind, text: &str) -> Result<NewForeignOptions, String> {
        let settings: Result<Vec<_>, _> =
            text.split(',').map(crate::create_options::parse_one).collect();
        of(kind, 1 << 20, &settings?)
    }

    #[test]
    fn each_format_has_its_own() {
        let vhdx = options(ForeignKind::Vhdx, "subformat=fixed,block_size=1M,log_size=2M").unwrap();
        assert_eq!(vhdx.subformat, Subformat::Fixed);
        assert_eq!((vhdx.block_size, vhdx.log_size), (Some(1 << 20), 2 << 20));
        let vmdk = options(ForeignKind::Vmdk, "adapter_type=lsilogic,subformat=streamOptimized");
        let vmdk = vmdk.unwrap();
        assert_eq!((vmdk.subformat, &*vmdk.adapter), (Subformat::Stream, "lsilogic"));
        assert_eq!(options(ForeignKind::Vdi, "static=on").unwrap().subformat, Subformat::Fixed);
        let split = options(ForeignKind::Vmdk, "subformat=twoGbMaxExtentFlat").unwrap();
        assert_eq!((split.subformat, split.is_split), (Subformat::Fixed, true));
        assert!(options(ForeignKind::Vmdk, "compat6=on,hwversion=undefined").is_ok());
        assert_eq!(options(ForeignKind::Vdi, "static").unwrap().subformat, Subformat::Fixed);
        assert_eq!(options(ForeignKind::Vhdx, "block_size=0").unwrap().block_size, None);
        for (kind, text, words) in [
            (ForeignKind::Vdi, "subformat=fixed", "no option 'subformat'"),
            (ForeignKind::Vpc, "cluster_size=4K", "no option 'cluster_size'"),
            (ForeignKind::Vpc, "subformat=flat", "dynamic or fixed"),
            (ForeignKind::Vmdk, "subformat=flat", "twoGbMaxExtentFlat or"),
            (ForeignKind::Vdi, "backing_file=a.vdi", "Backing file not supported"),
            (ForeignKind::Vdi, "static=maybe", "on or off"),
            (ForeignKind::Vhdx, "subformat", "no NAME=VALUE"),
            (ForeignKind::Vmdk, "adapter_type=usb", "lsilogic"),
            (ForeignKind::Vmdk, "compat6=on,hwversion=7", "cannot be enabled"),
            (ForeignKind::Vmdk, "backing_fmt=raw", "a VMDK image, too"),
            (ForeignKind::Vmdk, "preallocation=full", "no option 'preallocation'"),
        ] {
            let error = options(kind, text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
