//! The first line that `qemu-img create` prints, for scripts that look for it: `Formatting
//! 'disk.qcow2', fmt=qcow2 ...`.

use std::path::Path;

use blockhouse_disk::ImageFormat;
use blockhouse_format::ForeignKind;

use crate::create_setting::{Setting, name_and_value};
use crate::{called_as, output};

/// Prints the line if the program is called qemu-img, except with `--quiet`.
///
/// # Errors
/// Standard output cannot be written.
pub fn print(
    image: &Path,
    format: ImageFormat,
    size: u64,
    settings: &[Setting],
) -> anyhow::Result<()> {
    if !called_as::is_qemu_img() {
        return Ok(());
    }
    output::print_unless_quiet(&line(image, format, size, settings))
}

/// The options of files, in QEMU's order; those of qcow2 are among the options of the format.
const OF_FILES: &[(&str, Option<&str>)] =
    &[("nocow", None), ("preallocation", None), ("extent_size_hint", None)];

/// The options of a format, in QEMU's order, with the values of those that always have one.
fn options_of(format: ImageFormat) -> &'static [(&'static str, Option<&'static str>)] {
    match format {
        ImageFormat::Qcow2 => &[
            ("encryption", None),
            ("encrypt.format", None),
            ("encrypt.key-secret", None),
            ("encrypt.iter-time", None),
            ("cluster_size", Some("65536")),
            ("extended_l2", Some("off")),
            ("preallocation", None),
            ("compression_type", Some("zlib")),
            ("size", None),
            ("compat", None),
            ("backing_file", None),
            ("backing_fmt", None),
            ("data_file", None),
            ("data_file_raw", None),
            ("lazy_refcounts", Some("off")),
            ("refcount_bits", Some("16")),
            ("nocow", None),
            ("extent_size_hint", None),
        ],
        ImageFormat::Luks => &[("size", None), ("key-secret", None), ("iter-time", None)],
        ImageFormat::Foreign(ForeignKind::Vmdk) => &[
            ("size", None),
            ("adapter_type", None),
            ("backing_file", None),
            ("backing_fmt", None),
            ("compat6", Some("off")),
            ("hwversion", Some("undefined")),
            ("subformat", None),
            ("toolsversion", None),
            ("zeroed_grain", None),
        ],
        ImageFormat::Foreign(ForeignKind::Vpc) => {
            &[("size", None), ("subformat", None), ("force_size", None)]
        }
        ImageFormat::Foreign(ForeignKind::Vdi) => &[("size", None), ("static", Some("off"))],
        ImageFormat::Foreign(ForeignKind::Vhdx) => &[
            ("size", None),
            ("log_size", Some("1048576")),
            ("block_size", Some("0")),
            ("subformat", None),
            ("block_state_zero", None),
        ],
        _ => &[("size", None)],
    }
}

fn line(image: &Path, format: ImageFormat, size: u64, settings: &[Setting]) -> String {
    let mut line = format!("Formatting '{}', fmt={}", image.display(), format.as_str());
    let of_file = if format == ImageFormat::Qcow2 { &[] } else { OF_FILES };
    for (name, usual) in options_of(format).iter().chain(of_file) {
        let said = settings.iter().rev().find_map(|setting| {
            let (key, value) = name_and_value(setting)?;
            let key = key.strip_prefix("encrypt.").unwrap_or(key);
            (key == name.strip_prefix("encrypt.").unwrap_or(name)).then_some(value)
        });
        let value = match *name {
            "size" => Some(size.to_string()),
            _ => said.or(usual.map(str::to_owned)),
        };
        if let Some(value) = value {
            line.push_str(&format!(" {name}={}", value.replace(',', ",,")));
        }
    }
    line
}

/// The preallocation mode as the user types it; the last one is used.
pub fn preallocation_of(settings: &[Setting]) -> Option<String> {
    let words = settings.iter().rev().filter_map(name_and_value);
    words.filter(|(name, _)| *name == "preallocation").map(|(_, value)| value).next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_that_of_qemu_img() {
        let usual = [Setting::BackingFile("a,b".into()), Setting::BackingFormat("raw".into())];
        let line = |format, settings: &[Setting]| line(Path::new("d"), format, 4096, settings);
        assert_eq!(
            line(ImageFormat::Qcow2, &usual),
            "Formatting 'd', fmt=qcow2 cluster_size=65536 extended_l2=off compression_type=zlib size=4096 \
             backing_file=a,,b backing_fmt=raw lazy_refcounts=off refcount_bits=16"
        );
        assert_eq!(line(ImageFormat::Raw, &[]), "Formatting 'd', fmt=raw size=4096");
    }
}
