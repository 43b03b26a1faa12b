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

/// The command lines of qemu-img's commands, in the form of its help. Programs look there for an
/// option in brackets, on the line that begins with the command.
const SYNOPSES: &[&str] = &[
    "amend [-f FMT | --image-opts] [-t CACHE] [--force] [-p] [-q]
        [--object OBJDEF] -o OPTIONS FILENAME",
    "bench [-f FMT | --image-opts] [-t CACHE] [-c COUNT] [-d DEPTH]
        [-o OFFSET] [-s BUFFER_SIZE] [-S STEP_SIZE] [-i AIO] [-n]
        [-w [--pattern PATTERN] [--flush-interval INTERVAL [--no-drain]]]
        [-U] FILENAME",
    "bitmap ( --merge SOURCE | --add | --remove | --clear |
                --enable | --disable ).. [-f FMT | --image-opts]
        [ -b SRC_FILENAME [-F SOURCE_FMT]] [-g SIZE[KMGTPE]] [--object OBJDEF]
        FILENAME BITMAP",
    "check [-f FMT | --image-opts] [-T CACHE_MODE] [-r leaks|all] [-U]
        [--output human|json] [--object OBJDEF] FILENAME",
    "commit [-f FMT | --image-opts] [-t CACHE_MODE] [-b BASE_IMG] [-d]
        [-r RATE] [--object OBJDEF] FILENAME",
    "compare [--image-opts | [-f FMT] [-F FMT]] [-s]
        [-T CACHE] [-U] [--object OBJDEF] FILENAME1 FILENAME2",
    "convert [-f SRC_FMT|--image-opts] [-T SRC_CACHE] [--bitmaps [--skip-broken-bitmaps]]
        [-o TGT_OPTS|--target-image-opts] [-t TGT_CACHE] [-n]
        [-B BACKING_FILENAME [-F BACKING_FMT]]
        SRC_FILENAME [SRC_FILENAME2 [...]] TGT_FILENAME",
    "create [-f FMT] [-o FMT_OPTS] [-b BACKING_FILENAME [-F BACKING_FMT]]
        [--object OBJDEF] [-u] FILENAME [SIZE[bkKMGTPE]]",
    "dd [-f FMT|--image-opts] [-O OUTPUT_FMT] [-U]
        [bs=BLOCK_SIZE] [count=BLOCKS] if=INPUT of=OUTPUT",
    "info [-f FMT | --image-opts] [-b] [-U] [--object OBJDEF]
        [--output human|json] FILENAME",
    "map [-f FMT | --image-opts] [--object OBJDEF] [--output human|json]
        [--start-offset OFFSET] [--max-length LENGTH] [-U] FILENAME",
    "measure [-f FMT|--image-opts] [-o OPTIONS] [-O OUTPUT_FMT]
       [--output OFMT] [--object OBJDEF] [-l SNAPSHOT_PARAM]
       (--size SIZE | FILENAME)",
    "rebase [-f FMT | --image-opts] [-t CACHE] [-q] [-U] [-p]
        [-b BACKING_FILENAME [-F BACKING_FMT] [-T BACKING_CACHE]] [-u]
        [--object OBJDEF] [-c] FILENAME",
    "resize [-f FMT | --image-opts] [--preallocation PREALLOC] [--shrink]
        [--object OBJECTDEF] [-q] FILENAME [+-]SIZE[bkKMGTPE]",
    "snapshot [-f FMT | --image-opts] [-l | -a|-c|-d SNAPSHOT]
        [-U] [--object OBJDEF] FILENAME",
];

/// The help of a command, without the command's word that the name of a QEMU tool implies. Under
/// the name qemu-img the command's line in the form of qemu-img precedes it.
pub fn of_command(command: &str, help: &str) -> String {
    let help = help
        .replace("qemu-nbd serve", "qemu-nbd")
        .replace("qemu-storage-daemon qemu-storage-daemon", "qemu-storage-daemon");
    match synopsis(command).filter(|_| called_as::is_qemu_img()) {
        Some(synopsis) => format!("Usage:\n\n  qemu-img {synopsis}\n\n{help}"),
        None => help,
    }
}

/// The command's line in [`SYNOPSES`], by this program's name of the command.
fn synopsis(command: &str) -> Option<&'static str> {
    let command = if command == "qemu-bench" { "bench" } else { command };
    SYNOPSES.iter().copied().find(|line| line.split(' ').next() == Some(command))
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
    fn every_option_of_a_synopsis_is_one_of_the_command() {
        let root = crate::command();
        let mut unknown = Vec::new();
        for line in SYNOPSES {
            let name = line.split(' ').next().expect("it begins with the command");
            let name = if name == "bench" { "qemu-bench" } else { name };
            assert_eq!(synopsis(name), Some(*line));
            let command = root.find_subcommand(name).expect("there is such a command");
            let words = line.split([' ', '[', ']', '(', ')', '|', '\n']);
            for word in words.filter(|word| word.starts_with('-')) {
                let is_it = |option: &clap::Arg| match word.strip_prefix("--") {
                    Some(long) => {
                        let aliases = option.get_all_aliases().unwrap_or_default();
                        option.get_long() == Some(long) || aliases.contains(&long)
                    }
                    None => {
                        let short = word.chars().nth(1).expect("it has a letter");
                        let aliases = option.get_all_short_aliases().unwrap_or_default();
                        option.get_short() == Some(short) || aliases.contains(&short)
                    }
                };
                let mut options = command.get_arguments().chain(root.get_arguments());
                if !options.any(is_it) {
                    unknown.push(format!("{name} {word}"));
                }
            }
        }
        assert!(unknown.is_empty(), "{unknown:?}");
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
