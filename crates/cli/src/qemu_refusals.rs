//! What qemu-img says of an image that it does not make, under its name: each refusal is its own line, with its own words.

use std::path::Path;

use blockhouse_daemon::size;
use blockhouse_disk::{QemuName, is_address};

use crate::called_as;
use crate::create_options::Setting;
use crate::image_args::resolve_relative;

/// A value of an option that is refused when the image is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The option.
    pub name: &'static str,
    /// Its value, as the line "Formatting" shows it.
    pub value: String,
    /// What is said.
    pub words: String,
}

/// The refusal of `NAME=VALUE`, where that is no option that is known. Only under the name qemu-img.
pub fn refusal(text: &str) -> Option<Refusal> {
    if called_as::is_qemu_img() { of(text) } else { None }
}

fn of(text: &str) -> Option<Refusal> {
    let (name, value) = text.split_once('=')?;
    let unknown = |name: &str| format!("Parameter '{name}' does not accept value '{value}'");
    let (name, value, words) = match name {
        "cluster_size" => (
            "cluster_size",
            size::parse(value).ok()?.to_string(),
            "Cluster size must be a power of two between 512 and 2048k".to_owned(),
        ),
        "refcount_bits" => (
            "refcount_bits",
            value.parse::<i64>().ok()?.to_string(),
            "Refcount width must be a power of two and may not exceed 64 bits".to_owned(),
        ),
        "compat" => ("compat", value.to_owned(), unknown("version")),
        "preallocation" => ("preallocation", value.to_owned(), unknown("preallocation")),
        "compression_type" => ("compression_type", value.to_owned(), unknown("compression-type")),
        _ => return None,
    };
    Some(Refusal { name, value, words })
}

/// What is said of a new overlay whose backing file is not there. Only under the name qemu-img.
pub fn missing_backing(image: &Path, settings: &[Setting]) -> Option<String> {
    let name = settings.iter().rev().find_map(|setting| match setting {
        Setting::BackingFile(name) => Some(name),
        _ => None,
    })?;
    if !called_as::is_qemu_img() || is_address(name.as_bytes()) || QemuName::of(name).is_some() {
        return None;
    }
    let path = resolve_relative(image, name.as_bytes());
    (!path.exists()).then(|| {
        let (image, path) = (image.display(), path.display());
        format!(
            "{image}: Could not open '{path}': No such file or directory\nCould not open backing image."
        )
    })
}

/// Our words for why no image is made, and those of qemu-img.
const CREATION: &[(&str, &str)] = &[
    (
        "has refcounts of 16 bits",
        "Different refcount widths than 16 bits require compatibility level 1.1 or above (use version=v3 or greater)",
    ),
    (
        "the disk is too large for clusters of this size",
        "The image size is too large for file format 'qcow2' (try using a larger cluster size)",
    ),
];

/// The words of qemu-img for why no image is made.
pub fn of_creation(text: &str) -> Option<&'static str> {
    CREATION.iter().find(|(ours, _)| text.contains(ours)).map(|(_, theirs)| *theirs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_are_out_of_bounds_are_refused_as_there() {
        for (text, value, words) in [
            ("cluster_size=4M", "4194304", "between 512 and 2048k"),
            ("refcount_bits=-1", "-1", "Refcount width"),
            ("compat=0.42", "0.42", "Parameter 'version' does not accept value '0.42'"),
        ] {
            let refusal = of(text).unwrap();
            assert_eq!(refusal.value, value);
            assert!(refusal.words.contains(words), "{text}: {}", refusal.words);
        }
        assert_eq!(of("cluster_size=abc"), None);
        assert_eq!(of("foo=1"), None);
    }
}
