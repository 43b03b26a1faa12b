//! The texts of qemu-img's errors for an image that it refuses to create. Used if the program is
//! called qemu-img.

use blockhouse_config::size;
use blockhouse_disk::ImageFormat;

use crate::called_as;

/// A value of an option that is refused when the image is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The option.
    pub name: &'static str,
    /// The value, as the line "Formatting" shows it.
    pub value: String,
    /// The text of the error.
    pub words: String,
    /// Whether the error is printed in place of the line "Formatting".
    pub is_first: bool,
}

impl Refusal {
    /// The text of the error for an image of this format.
    pub fn words_of(&self, format: ImageFormat) -> String {
        match (self.name, format) {
            ("preallocation", ImageFormat::Raw) => {
                format!("invalid parameter value: {}", self.value)
            }
            _ => self.words.clone(),
        }
    }
}

/// The refusal of `NAME=VALUE`, if NAME is not in `names` or VALUE is not valid. Only under the
/// name qemu-img.
pub fn refusal(text: &str, names: &str) -> Option<Refusal> {
    if called_as::is_qemu_img() { of(text, names) } else { None }
}

fn of(text: &str, names: &str) -> Option<Refusal> {
    let (name, value) = text.split_once('=')?;
    if let Some(words) = of_name(name, names) {
        return Some(Refusal { name: "", value: value.to_owned(), words, is_first: true });
    }
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
        "adapter_type" => {
            ("adapter_type", value.to_owned(), format!("invalid parameter value: {value}"))
        }
        "compression_type" => ("compression_type", value.to_owned(), unknown("compression-type")),
        _ => return None,
    };
    Some(Refusal { name, value, words, is_first: false })
}

/// The options of new images that are on or off.
const SWITCHES: [&str; 9] = [
    "lazy_refcounts",
    "extended_l2",
    "data_file_raw",
    "nocow",
    "block_state_zero",
    "compat6",
    "force_size",
    "static",
    "zeroed_grain",
];

/// Whether the option of this name is on or off.
pub fn is_switch(name: &str) -> bool {
    SWITCHES.contains(&name)
}

/// The refusal of an option that does not exist, or of a switch whose value is neither on nor off.
fn of_name(name: &str, names: &str) -> Option<String> {
    if is_switch(name) {
        return Some(format!("Parameter '{name}' expects 'on' or 'off'"));
    }
    let is_known = names.split(", ").any(|known| known == name);
    // Encryption has more options than `names` contains.
    let is_absent = !is_known && !name.starts_with("encrypt") && !name.contains('-');
    is_absent.then(|| format!("Invalid parameter '{name}'"))
}

/// This program's texts for wrong usage, and the texts of QEMU's tools.
const USAGE: &[(&str, &str)] = &[
    (
        "several sources make one disk, which is no overlay",
        "Having a backing file for the target makes no sense when concatenating multiple input images",
    ),
    ("one action at a time", "Cannot mix '-l', '-a', '-c', '-d'"),
    ("only qcow2 images have bitmaps", "Format driver 'raw' does not support bitmaps"),
    (
        "only qcow2 images have compressed clusters",
        "Compression not supported for this file format",
    ),
    (
        "compressed clusters (-c) are not encrypted",
        "Compression and encryption not supported at the same time",
    ),
    (
        "--detect-zeroes unmap needs --discard unmap",
        "setting detect-zeroes to unmap is not allowed without setting discard operation to unmap",
    ),
    ("both a source and a target are needed", "Must specify image file name"),
    (
        "both a source (if=) and a target (of=) are needed",
        "Must specify both input and output files",
    ),
    (
        "no image is named: blockhouse create IMAGE SIZE",
        "Expecting image file name\nTry 'qemu-img create --help' for more info",
    ),
    (
        "which image to change is missing",
        "Expecting one image file name\nTry 'qemu-img amend --help' for more info",
    ),
];

/// Texts that are already qemu-img's own.
const OWN: &[&str] = &[
    "Invalid number of arguments",
    "Invalid parameter",
    "Invalid number of coroutines",
    "Invalid buffer size",
    "Cannot enable copy offloading",
    "--target-image-opts requires",
    "Backing file not supported",
    "data-file-raw requires data-file",
    "List mode is incompatible",
    "Unsupported preallocation mode: ",
    "Image creation needs a size parameter",
    "Compression and preallocation not supported",
    "error while converting ",
    "expects 'on' or 'off'",
    "does not accept value",
    "invalid parameter value: ",
    "compat6 cannot be enabled with",
    "backing_file must be a vmdk",
];

/// The words of qemu-img and qemu-nbd for wrong usage. Only under their names.
pub fn of_usage(text: &str) -> Option<&str> {
    if !called_as::is_qemu_img() && !called_as::is_qemu_nbd() {
        return None;
    }
    let mut words = USAGE.iter().filter(|(ours, _)| text.contains(ours)).map(|(_, theirs)| *theirs);
    if OWN.iter().any(|own| text.contains(own)) {
        return Some(text);
    }
    // 'create' has a line of its own.
    let is_of_convert = text.contains("is not guessed; add -F") && called_as::has_word("convert");
    words.next().or(is_of_convert.then_some("Use of backing file requires explicit backing format"))
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
            ("adapter_type=pvscsi", "pvscsi", "invalid parameter value: pvscsi"),
            ("static=maybe", "maybe", "Parameter 'static' expects 'on' or 'off'"),
        ] {
            let names = "cluster_size, refcount_bits, compat, adapter_type, static";
            let refusal = of(text, names).unwrap();
            assert_eq!(refusal.value, value);
            assert!(refusal.words.contains(words), "{text}: {}", refusal.words);
        }
        assert_eq!(of("cluster_size=abc", "cluster_size"), None);
        assert_eq!(of("foo=1", "cluster_size").unwrap().words, "Invalid parameter 'foo'");
        assert_eq!(of("encrypt.format=aes", "cluster_size"), None);
    }
}
