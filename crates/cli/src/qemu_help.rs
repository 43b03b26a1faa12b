//! The help texts of qemu-img, printed under its name, because scripts look there for the version,
//! the formats and the options of a format.
//!
//! Guarantee: the help names only formats and options that this program has.

use blockhouse_disk::ImageFormat;
use blockhouse_format::ForeignKind;

use crate::called_as::{self, Tool};

/// An option of a format: its name, the type of its value, its description.
type FormatOption = (&'static str, &'static str, &'static str);

const QCOW2: &[FormatOption] = &[
    ("backing_file", "<str>", "File that the image is an overlay of"),
    ("backing_fmt", "<str>", "Format of that file"),
    ("cluster_size", "<size>", "Bytes of a cluster"),
    ("compat", "<str>", "Version of the format (v2 [0.10] or v3 [1.1])"),
    ("compression_type", "<str>", "How clusters are compressed (zlib, zstd)"),
    ("data_file", "<str>", "File that holds the guest's data"),
    ("data_file_raw", "<bool (on/off)>", "That file reads as the guest's disk"),
    ("encrypt.format", "<str>", "Encrypt the data ('luks'; 'aes' is weak)"),
    ("encrypt.iter-time", "<num>", "Milliseconds that deriving the key takes"),
    ("encrypt.key-secret", "<str>", "ID of the secret with the key"),
    ("extended_l2", "<bool (on/off)>", "Allocate in 32nds of a cluster"),
    ("lazy_refcounts", "<bool (on/off)>", "Write refcounts late"),
    ("preallocation", "<str>", "What is allocated at once (off, metadata, falloc, full)"),
    ("refcount_bits", "<num>", "Width of a refcount"),
    ("size", "<size>", "Size of the disk"),
];

const RAW: &[FormatOption] = &[("size", "<size>", "Size of the disk")];

const LUKS: &[FormatOption] = &[
    ("cipher-alg", "<str>", "Cipher (aes-256)"),
    ("cipher-mode", "<str>", "Mode of the cipher (xts)"),
    ("hash-alg", "<str>", "Hash (sha256)"),
    ("iter-time", "<num>", "Milliseconds that deriving the key takes"),
    ("ivgen-alg", "<str>", "Generator of IVs (plain64)"),
    ("key-secret", "<str>", "ID of the secret with the key"),
    ("size", "<size>", "Size of the disk"),
];

const VDI: &[FormatOption] = &[
    ("size", "<size>", "Size of the disk"),
    ("static", "<bool (on/off)>", "Each block has its place"),
];

const VPC: &[FormatOption] = &[
    ("force_size", "<bool (on/off)>", "The size is the one that is said (it always is)"),
    ("size", "<size>", "Size of the disk"),
    ("subformat", "<str>", "How the disk is stored (dynamic, fixed)"),
];

const VHDX: &[FormatOption] = &[
    ("block_size", "<size>", "Bytes of a block, 1 MiB to 256 MiB; 0: by the size of the disk"),
    ("block_state_zero", "<bool (on/off)>", "Zeros that were never written read as zeros"),
    ("log_size", "<size>", "Bytes of the log"),
    ("size", "<size>", "Size of the disk"),
    ("subformat", "<str>", "How the disk is stored (dynamic, fixed)"),
];

const VMDK: &[FormatOption] = &[
    ("backing_file", "<str>", "VMDK image that has what this one has not"),
    ("backing_fmt", "<str>", "Format of that image (vmdk)"),
    ("adapter_type", "<str>", "Controller (ide, lsilogic, buslogic, legacyESX)"),
    ("compat6", "<bool (on/off)>", "Version 6 of the hardware"),
    ("hwversion", "<str>", "Version of the hardware"),
    ("size", "<size>", "Size of the disk"),
    (
        "subformat",
        "<str>",
        "How the disk is stored (monolithicSparse, monolithicFlat, twoGbMaxExtentSparse, twoGbMaxExtentFlat, streamOptimized)",
    ),
    ("toolsversion", "<str>", "Version of VMware's tools in the guest"),
    ("zeroed_grain", "<bool (on/off)>", "Programs may name grains of zeros"),
];

/// Options of the file that an image is in.
const FILE: &[FormatOption] = &[
    ("extent_size_hint", "<size>", "In how many bytes at a time XFS gives the file space"),
    ("nocow", "<bool (on/off)>", "Have btrfs write in place"),
    ("preallocation", "<str>", "How space is reserved (off, falloc, full)"),
];

/// The options of a format, and the options of the image's file if it is in one.
pub fn options_of(format: ImageFormat, has_file: bool) -> String {
    let own = match format {
        ImageFormat::Qcow2 => QCOW2,
        ImageFormat::Luks => LUKS,
        ImageFormat::Raw => RAW,
        ImageFormat::Foreign(ForeignKind::Vdi) => VDI,
        ImageFormat::Foreign(ForeignKind::Vpc) => VPC,
        ImageFormat::Foreign(ForeignKind::Vhdx) => VHDX,
        ImageFormat::Foreign(ForeignKind::Vmdk) => VMDK,
    };
    let mut options = own.to_vec();
    if has_file {
        let of_file = FILE.iter().filter(|(name, ..)| own.iter().all(|(known, ..)| known != name));
        options.extend(of_file);
        options.sort_unstable();
    }
    let mut lines = vec![if has_file {
        "Supported options:".to_owned()
    } else {
        format!("Supported {} options:", format.as_str())
    }];
    lines.extend(options.iter().map(|(name, value, what)| {
        let option = format!("{name}={value}");
        format!("  {option:<22} - {what}")
    }));
    if !has_file {
        lines.push(String::new());
        lines.push("The protocol level may support further options.".into());
        lines.push("Specify the target filename to include those options.".into());
    }
    lines.join("\n")
}

/// The help of a command, without the command's word that the name of a QEMU tool implies.
pub fn of_command(help: &str) -> String {
    help.replace("qemu-nbd serve", "qemu-nbd")
        .replace("qemu-storage-daemon qemu-storage-daemon", "qemu-storage-daemon")
}

/// The help of the whole program, with the lines that scripts look for.
pub fn of_program(help: &str) -> String {
    if !called_as::is_qemu_img() {
        return help.to_owned();
    }
    let version = Tool::Img.version();
    format!(
        "{version}\n{help}\n\nSupported image formats:\n\n  file host_device luks nbd qcow2 raw rbd vdi vhdx vmdk vpc"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_told_in_the_form_of_qemu_img() {
        let raw = options_of(ImageFormat::Raw, false);
        assert!(
            raw.starts_with("Supported raw options:\n  size=<size>            - Size"),
            "{raw}"
        );
        let qcow2 = options_of(ImageFormat::Qcow2, true);
        assert!(qcow2.starts_with("Supported options:\n  backing_file=<str>     - "), "{qcow2}");
        assert_eq!(qcow2.matches("preallocation=").count(), 1, "{qcow2}");
        assert!(qcow2.contains("\n  nocow=<bool (on/off)>  - "), "{qcow2}");
    }

    #[test]
    fn every_option_can_be_given() {
        let foreign = [VDI, VPC, VHDX, VMDK].concat();
        for (name, ..) in QCOW2.iter().chain(LUKS).chain(FILE).chain(&foreign) {
            let error = crate::create_options::parse_one(&format!("{name}=nothing-like-it")).err();
            assert!(!error.is_some_and(|why| why.contains("there is no option")), "{name}");
        }
    }
}
