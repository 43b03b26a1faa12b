//! The options of new images (`create -o NAME=VALUE,...`), with the names of `qemu-img`.

use std::time::Duration;

use blockhouse_disk::{Backing, DataFile, ImageFormat};
use blockhouse_engine::NewFile;
use blockhouse_format::SpaceMode;
use blockhouse_format::qcow2::{Compression, CreateOptions, Preallocation, Switch, Version};
use blockhouse_images::{QemuName, is_address, is_foreign_address};

use blockhouse_config::{size, switch};

use crate::called_as;
use crate::create_setting::{EncryptFormat, Setting, name_and_value};
use crate::foreign_options;
use crate::format_names;
use crate::qemu_help;
use crate::qemu_refusals::{Refusal, is_switch, refusal};

/// The settings of one `-o`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Settings {
    /// These options.
    Given(Vec<Setting>),
    /// `-o help`: list the options.
    Help,
}

impl Settings {
    /// The options of several `-o`; `None` if one of them is `-o help`.
    pub fn join(all: Vec<Self>) -> Option<Vec<Setting>> {
        let settings = all.into_iter().map(|settings| match settings {
            Self::Given(settings) => Some(settings),
            Self::Help => None,
        });
        settings.collect::<Option<Vec<_>>>().map(|settings| settings.concat())
    }
}

/// The options, as `-o help` lists them.
const HELP: &str = "\
Options of all images:
  extent_size_hint=SIZE               in how many bytes at a time XFS gives the file space
  nocow=on|off                        have btrfs write in place (off)
  size=SIZE                           the size of the disk, if it is not said otherwise
Options of raw images:
  preallocation=off|falloc|full       reserve space, or write zeros
Options of qcow2 images:
  backing_file=FILE                   the image's backing file, found from the image's folder
  backing_fmt=raw|qcow2               its format, which is never guessed
  cluster_size=SIZE                   512 to 2M, a power of two (64K)
  compat=0.10|1.1                     version 2 or 3 of the format (1.1)
  compression_type=zlib|zstd          how clusters are compressed (zlib)
  data_file=FILE                      a new file that holds the guest's data
  data_file_raw=on|off                keep it readable as the guest's disk (off)
  encrypt.format=luks                 encrypt the data; the key is named by --key-file
                                      or --passphrase-file (aes: as QEMU did before, weakly)
  encrypt.iter-time=MS                how long deriving its key takes here (2000)
  encryption=on|off                   the old words for encrypt.format=aes (off)
  extended_l2=on|off                  allocate in 32nds of a cluster (off)
  lazy_refcounts=on|off               write refcounts late; after a crash they are counted anew (off)
  preallocation=off|metadata|falloc|full
                                      give each cluster its place; reserve space, or write zeros (off)
  refcount_bits=1|2|4|8|16|32|64      width of a refcount (16)
Options of images of other programs:
  adapter_type=ide|lsilogic|buslogic|legacyESX
                                      VMDK: the controller that the image names (ide)
  block_size=SIZE                     VHDX: bytes of a block, 1M to 256M (by the size of the disk)
  block_state_zero=on|off             VHDX: what was never written reads as zeros either way
  compat6=on|off                      VMDK: version 6 of the hardware (off)
  force_size=on|off                   VHD: the size is what was asked for either way
  hwversion=N                         VMDK: the version of the hardware (4)
  log_size=SIZE                       VHDX: bytes of the log (1M)
  static=on|off                       VDI: each block has its place (off)
  subformat=monolithicSparse|streamOptimized
                                      VMDK: one file with tables, or a compressed stream as in an OVA
  subformat=monolithicFlat|twoGbMaxExtentFlat|twoGbMaxExtentSparse
                                      VMDK: a descriptor, and the data beside it in one raw file, or in files of 2G
  subformat=dynamic|fixed             VHD, VHDX: blocks take space when they have data, or have their place
  toolsversion=N                      VMDK: the version of VMware's tools (2147483647: not VMware's to manage)
  zeroed_grain=on|off                 VMDK: programs may name grains of zeros (off)
Options of LUKS containers, which have AES-256-XTS, SHA-256 and one key slot:
  iter-time=MS                        how long deriving the key takes here (2000)
  key-secret=ID                       the key, of those that --object secret,id=ID,file=FILE
                                      names; left out, the first that is named
  preallocation=off|falloc|full       space that is allocated now, as of a raw image (off)";

/// The text that `-o help` prints; under the name qemu-img, in qemu-img's form.
pub fn help(format: Option<ImageFormat>, has_file: bool) -> String {
    match called_as::is_qemu_img() {
        true => qemu_help::options_of(format.unwrap_or(ImageFormat::Raw), has_file),
        false => HELP.to_owned(),
    }
}

/// The default time to derive a key, in milliseconds: as QEMU.
const DEFAULT_KEY_TIME: u32 = 2000;

/// All names, as listed to users.
const NAMES: &str = "cluster_size, compat, refcount_bits, lazy_refcounts, extended_l2, \
                     compression_type, preallocation, backing_file, backing_fmt, data_file, \
                     data_file_raw, encrypt.format, encrypt.iter-time, encryption, iter-time, key-secret, \
                     nocow, extent_size_hint, size, adapter_type, block_size, block_state_zero, compat6, \
                     force_size, hwversion, log_size, static, subformat, toolsversion, \
                     zeroed_grain";

/// Parses `NAME=VALUE,...`; a comma in a value is written twice.
///
/// # Errors
/// The mistake, and the names or values that exist.
pub fn parse(text: &str) -> Result<Settings, String> {
    if matches!(text, "help" | "?") {
        return Ok(Settings::Help);
    }
    let settings = split(text).into_iter().map(|part| parse_one(&part));
    settings.collect::<Result<_, _>>().map(Settings::Given)
}

/// Parses the name of `-o backing_file=NAME`.
///
/// # Errors
/// The reason why `name` cannot be the name of a backing file.
pub fn parse_backing_file(name: &str) -> Result<Setting, String> {
    parse_one(&format!("backing_file={name}"))
}

/// Parses the name of `-o backing_fmt=NAME`.
///
/// # Errors
/// For an unknown `name`: the list of the formats.
pub fn parse_backing_format(name: &str) -> Result<Setting, String> {
    parse_one(&format!("backing_fmt={name}"))
}

/// Splits at single commas. Two commas stand for one.
pub fn split(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut rest = text.chars().peekable();
    while let Some(letter) = rest.next() {
        if letter == ',' && rest.next_if_eq(&',').is_none() {
            parts.push(String::new());
        } else if let Some(part) = parts.last_mut() {
            part.push(letter);
        }
    }
    parts
}

/// One `NAME=VALUE`.
///
/// # Errors
/// As [`parse`].
pub fn parse_one(text: &str) -> Result<Setting, String> {
    parse_known(text).or_else(|why| refusal(text, NAMES).map(Setting::Refused).ok_or(why))
}

fn parse_known(text: &str) -> Result<Setting, String> {
    // A switch without a value means "on", as in QEMU.
    let (name, value) = text
        .split_once('=')
        .or_else(|| is_switch(text).then_some((text, "on")))
        .ok_or_else(|| format!("'{text}' is no NAME=VALUE; the names are {NAMES}"))?;
    let wrong = |known: &str| format!("{name} cannot be '{value}'; use {known}");
    let switch = || match switch::parse(value) {
        Some(true) => Ok(Switch::On),
        Some(false) => Ok(Switch::Off),
        None => Err(wrong("on or off")),
    };
    match name {
        "cluster_size" => match size::parse(value) {
            Ok(size) if size.is_power_of_two() && (512..=2 << 20).contains(&size) => {
                Ok(Setting::ClusterSize(size))
            }
            _ => Err(wrong("a power of two from 512 to 2M")),
        },
        "compat" => match value {
            "0.10" | "v2" => Ok(Setting::Compat(Version::V2)),
            "1.1" | "v3" => Ok(Setting::Compat(Version::V3)),
            _ => Err(wrong("0.10 (version 2) or 1.1 (version 3)")),
        },
        "refcount_bits" => match value.parse::<u32>() {
            Ok(bits) if bits.is_power_of_two() && bits <= 64 => Ok(Setting::RefcountBits(bits)),
            _ => Err(wrong("1, 2, 4, 8, 16, 32 or 64")),
        },
        "lazy_refcounts" => switch().map(Setting::LazyRefcounts),
        "extended_l2" => switch().map(Setting::ExtendedL2),
        "compression_type" => match value {
            "zlib" => Ok(Setting::CompressionType(Compression::Zlib)),
            "zstd" => Ok(Setting::CompressionType(Compression::Zstd)),
            _ => Err(wrong("zlib or zstd")),
        },
        "preallocation" => match value {
            "off" => Ok(Setting::Preallocation(Preallocation::Off)),
            "metadata" => Ok(Setting::Preallocation(Preallocation::Metadata)),
            "falloc" => Ok(Setting::Preallocation(Preallocation::Falloc)),
            "full" => Ok(Setting::Preallocation(Preallocation::Full)),
            _ => Err(wrong("off, metadata, falloc or full")),
        },
        "backing_file" if is_foreign_address(value.as_bytes()) && QemuName::of(value).is_none() => {
            Err(format!(
                "the backing file '{value}' is no file but an address of QEMU; write a server's export as a URI \
             (nbd://HOST/NAME); if it is a file, write './{value}'"
            ))
        }
        "backing_file" if (1..=1023).contains(&value.len()) => {
            Ok(Setting::BackingFile(value.to_owned()))
        }
        "backing_file" => Err("backing_file needs a name of 1 to 1023 bytes".to_owned()),
        "backing_fmt" => match format_names::parse(value) {
            Ok(_) => Ok(Setting::BackingFormat(value.to_owned())),
            Err(_) => Err(wrong("raw or qcow2")),
        },
        "data_file" if is_address(value.as_bytes()) => Err(format!(
            "the data file '{value}' is no file but a server's address; if it is a file, write \
             './{value}'"
        )),
        "data_file" if (1..=1023).contains(&value.len()) => Ok(Setting::DataFile(value.to_owned())),
        "data_file" => Err("data_file needs a name of 1 to 1023 bytes".to_owned()),
        "data_file_raw" => switch().map(Setting::RawDataFile),
        "encrypt.format" => match value {
            "luks" => Ok(Setting::Encrypt(EncryptFormat::Luks)),
            "aes" => Ok(Setting::Encrypt(EncryptFormat::Aes)),
            _ => Err(wrong("luks")),
        },
        "encryption" => switch().map(Setting::EncryptionSwitch),
        "encrypt.iter-time" | "iter-time" => match value.parse() {
            Ok(time @ 1..=60_000) => Ok(Setting::EncryptIterTime(time)),
            // The fewest iterations.
            Ok(0) if called_as::is_qemu_img() => Ok(Setting::EncryptIterTime(0)),
            _ => Err(wrong("1 to 60000 milliseconds")),
        },
        "nocow" => switch().map(Setting::NoCopyOnWrite),
        "extent_size_hint" => match size::parse(value).map(u32::try_from) {
            Ok(Ok(size)) => Ok(Setting::ExtentSize(size)),
            _ => Err(wrong("a size below 4G")),
        },
        "size" => size::parse(value).map(Setting::Size),
        "encrypt.key-secret" | "key-secret" if !value.is_empty() => {
            Ok(Setting::KeySecret(value.to_owned()))
        }
        _ if foreign_options::is_name(name) => foreign_options::parse(name, value),
        // IVs that are sector numbers use no hash, so the hash is ignored.
        "ivgen-hash-alg" | "encrypt.ivgen-hash-alg" => Ok(Setting::UsualLuks),
        _ => match usual_luks(name.strip_prefix("encrypt.").unwrap_or(name)) {
            Some(usual) if usual == value => Ok(Setting::UsualLuks),
            Some(usual) => Err(format!(
                "{name} is always {usual} here; leave it out, or make the image by qemu-img or cryptsetup"
            )),
            None => Err(format!("there is no option '{name}'; the options are {NAMES}")),
        },
    }
}

/// The value that QEMU's LUKS option `name` has in every image that Blockhouse creates.
fn usual_luks(name: &str) -> Option<&'static str> {
    Some(match name {
        "cipher-alg" => "aes-256",
        "cipher-mode" => "xts",
        "ivgen-alg" => "plain64",
        "hash-alg" => "sha256",
        "detached-header" => "off",
        _ => return None,
    })
}

/// The options for an image of `size` bytes, from `settings`. If an option is given more than once,
/// the last one is used.
///
/// # Errors
/// A backing file without its format, or a format without a file; `data_file_raw` without a data
/// file; a refused value; an option of another format.
pub fn qcow2(size: u64, settings: Vec<Setting>) -> Result<CreateOptions, String> {
    let mut options = CreateOptions::new(size);
    let (mut backing_file, mut backing_format) = (None, None);
    let (mut data_file, mut raw) = (None, Switch::Off);
    for setting in settings {
        match setting {
            Setting::ClusterSize(size) => options.cluster_size = size,
            Setting::Compat(version) => options.version = version,
            Setting::RefcountBits(bits) => options.refcount_bits = bits,
            Setting::LazyRefcounts(switch) => options.lazy_refcounts = switch,
            Setting::ExtendedL2(switch) => options.extended_l2 = switch,
            Setting::CompressionType(compression) => options.compression = compression,
            Setting::Preallocation(preallocation) => options.preallocation = preallocation,
            Setting::BackingFile(name) => backing_file = Some(name),
            Setting::BackingFormat(format) => backing_format = Some(format),
            Setting::DataFile(name) => data_file = Some(name),
            Setting::RawDataFile(switch) => raw = switch,
            // The encryption key is made when the image is created.
            Setting::Encrypt(_)
            | Setting::EncryptionSwitch(_)
            | Setting::EncryptIterTime(_)
            | Setting::KeySecret(_)
            | Setting::UsualLuks => {}
            // `new_file` and `size_of` read these.
            Setting::NoCopyOnWrite(_) | Setting::ExtentSize(_) | Setting::Size(_) => {}
            Setting::Refused(refusal) => return Err(refusal.words),
            Setting::Foreign(name, _) => return Err(not_of_qcow2(name)),
        }
    }
    options.backing = match (backing_file, backing_format) {
        (Some(name), Some(format)) => Some(Backing { name: name.into(), format: Some(format) }),
        (Some(name), None) => {
            return Err(format!(
                "the format of the backing file '{name}' is not guessed; add -F raw or -F qcow2 (with -o, \
                 backing_fmt=raw or backing_fmt=qcow2)"
            ));
        }
        (None, Some(_)) => return Err("backing_fmt without backing_file".to_owned()),
        (None, None) => None,
    };
    if data_file.is_none() && raw == Switch::On {
        return Err(match called_as::is_qemu_img() {
            true => "data-file-raw requires data-file".to_owned(),
            false => "data_file_raw without data_file".to_owned(),
        });
    }
    options.data_file = data_file.map(|name| DataFile { name: name.into(), raw });
    Ok(options)
}

/// The encryption of the image to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChosenEncryption {
    /// The AES encryption that QEMU used before LUKS.
    Aes,
    /// LUKS, with the time that the derivation of the key should take.
    Luks(Duration),
}

/// The encryption of the new image; `None` if it is not encrypted.
///
/// # Errors
/// `encryption` and `encrypt.format` together, or an option of an encryption that the image does
/// not have.
pub fn encryption(settings: &[Setting]) -> Result<Option<ChosenEncryption>, String> {
    let (mut format, mut switch, mut time) = (None, None, None);
    for setting in settings {
        match setting {
            Setting::Encrypt(chosen) => format = Some(*chosen),
            Setting::EncryptionSwitch(on) => switch = Some(*on == Switch::On),
            Setting::EncryptIterTime(given) => time = Some(*given),
            _ => {}
        }
    }
    if format.is_some() && switch.is_some() {
        let why = "Options encryption and encrypt.format are mutually exclusive";
        return Err(why.to_owned());
    }
    let format = format.or_else(|| (switch == Some(true)).then_some(EncryptFormat::Aes));
    match (format, time) {
        (Some(EncryptFormat::Luks), time) => {
            let time = Duration::from_millis(time.unwrap_or(DEFAULT_KEY_TIME).into());
            Ok(Some(ChosenEncryption::Luks(time)))
        }
        (Some(EncryptFormat::Aes), None) => Ok(Some(ChosenEncryption::Aes)),
        (None, None) if key_secret(settings).is_none() => Ok(None),
        _ => Err("options of encryption without encrypt.format=luks".to_owned()),
    }
}

/// The option of a new LUKS container: the time that the derivation of its key should take.
///
/// # Errors
/// An option that only other formats have, or a value that qemu-img refuses.
pub fn luks(settings: &[Setting]) -> Result<Duration, String> {
    let mut time = DEFAULT_KEY_TIME;
    for setting in settings {
        match setting {
            Setting::EncryptIterTime(given) => time = *given,
            Setting::KeySecret(_) | Setting::UsualLuks => {}
            Setting::NoCopyOnWrite(_) | Setting::ExtentSize(_) | Setting::Size(_) => {}
            // `space_of` reads it.
            Setting::Preallocation(mode) if *mode != Preallocation::Metadata => {}
            Setting::Refused(refusal) => return Err(refusal.words.clone()),
            _ => {
                return Err(
                    "LUKS containers have no options (-o) but preallocation=off, falloc and \
                            full, key-secret and iter-time"
                        .to_owned(),
                );
            }
        }
    }
    Ok(Duration::from_millis(time.into()))
}

/// How the new file is made.
pub fn new_file(settings: &[Setting]) -> NewFile {
    let mut file = called_as::new_file();
    for setting in settings {
        match setting {
            Setting::NoCopyOnWrite(switch) => file.no_copy_on_write = *switch == Switch::On,
            Setting::ExtentSize(size) => file.extent_size = Some(*size),
            _ => {}
        }
    }
    file
}

/// The size of the disk, if an option gives it; the last option is used.
pub fn size_of(settings: &[Setting]) -> Option<u64> {
    settings.iter().rev().find_map(|setting| match setting {
        Setting::Size(size) => Some(*size),
        _ => None,
    })
}

/// The space that a new file gets at once, if an option asks for it; the last option is used.
pub fn space_of(settings: &[Setting]) -> Option<SpaceMode> {
    let mode = settings.iter().rev().find_map(|setting| match setting {
        Setting::Preallocation(Preallocation::Falloc) => Some(Some(SpaceMode::Falloc)),
        Setting::Preallocation(Preallocation::Full) => Some(Some(SpaceMode::Full)),
        Setting::Preallocation(_) => Some(None),
        _ => None,
    });
    mode.flatten()
}

/// The first value that qemu-img refuses when it makes the image.
pub fn refusal_of(settings: &[Setting]) -> Option<&Refusal> {
    settings.iter().find_map(|setting| match setting {
        Setting::Refused(refusal) => Some(refusal),
        _ => None,
    })
}

/// The name of the secret that opens the new image; the last option is used.
pub fn key_secret(settings: &[Setting]) -> Option<&str> {
    settings.iter().rev().find_map(|setting| match setting {
        Setting::KeySecret(name) => Some(name.as_str()),
        _ => None,
    })
}

/// Why metadata of a raw image cannot be preallocated.
pub fn raw_has_no_tables() -> String {
    let why = if called_as::is_qemu_img() {
        "Unsupported preallocation mode: metadata"
    } else {
        "Unsupported preallocation mode 'metadata' of a raw image, which has none; use off, falloc \
         or full"
    };
    why.to_owned()
}

/// The space to allocate for a raw image, from `settings`.
///
/// # Errors
/// An option or a value that raw images do not have.
pub fn raw(settings: &[Setting]) -> Result<Option<SpaceMode>, String> {
    for setting in settings {
        match setting {
            Setting::Preallocation(Preallocation::Metadata) => return Err(raw_has_no_tables()),
            Setting::Preallocation(_) => {}
            Setting::NoCopyOnWrite(_) | Setting::ExtentSize(_) | Setting::Size(_) => {}
            Setting::Refused(refusal) => return Err(refusal.words.clone()),
            other if called_as::is_qemu_img() => return Err(not_of_raw(other)),
            _ => {
                return Err("raw images have no options (-o) but preallocation=off, falloc and \
                            full; for others say --format qcow2"
                    .to_owned());
            }
        }
    }
    Ok(space_of(settings))
}

fn not_of_qcow2(name: &str) -> String {
    match called_as::is_qemu_img() {
        true => format!("Invalid parameter '{name}'"),
        false => format!("qcow2 images have no option '{name}'"),
    }
}

/// The message of qemu-img for an option that raw images do not have.
fn not_of_raw(setting: &Setting) -> String {
    match (setting, name_and_value(setting)) {
        (Setting::BackingFile(_) | Setting::BackingFormat(_), _) => {
            "Backing file not supported for file format 'raw'".to_owned()
        }
        (_, Some((name, _))) => format!("Invalid parameter '{name}'"),
        (_, None) => "Invalid parameter 'encrypt.format'".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(text: &str) -> Vec<Setting> {
        Settings::join(vec![parse(text).unwrap()]).unwrap()
    }

    #[test]
    fn help_names_every_option() {
        assert_eq!(Settings::join(vec![parse("help").unwrap()]), None);
        for name in NAMES.split(", ") {
            assert!(HELP.contains(&format!("\n  {name}=")), "{name}");
        }
    }

    #[test]
    fn commas_in_names_are_doubled() {
        let expected = [Setting::BackingFile("a,b,".into()), Setting::BackingFormat("raw".into())];
        assert_eq!(settings("backing_file=a,,b,,,backing_fmt=raw"), expected);
    }

    #[test]
    fn the_last_of_several_counts() {
        let options = qcow2(512, settings("cluster_size=4K,compat=0.10,cluster_size=2M")).unwrap();
        assert_eq!((options.cluster_size, options.version), (2 << 20, Version::V2));
    }

    #[test]
    fn what_is_not_known_is_refused_with_what_is() {
        for (text, known) in [
            ("clustersize=4K", "cluster_size"),
            ("", "cluster_size"),
            ("compat", "refcount_bits"),
            ("cluster_size=3K", "2M"),
            ("cluster_size=256", "512"),
            ("compat=2", "0.10"),
            ("refcount_bits=3", "64"),
            ("lazy_refcounts=1", "on or off"),
            ("preallocation=lots", "metadata"),
            ("backing_fmt=qed", "qcow2"),
            ("backing_file=", "1023"),
            ("backing_file=sheepdog:disk", "./sheepdog"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(known), "{text}: {error}");
        }
    }

    #[test]
    fn a_server_is_a_backing_file_as_qemu_names_it() {
        for name in ["nbd:host:10809", "nbd://host/disk"] {
            let expected = [Setting::BackingFile(name.to_owned())];
            assert_eq!(settings(&format!("backing_file={name}")), expected);
        }
    }

    #[test]
    fn a_backing_file_needs_its_format() {
        for text in ["backing_file=base", "backing_fmt=raw"] {
            let error = qcow2(512, settings(text)).unwrap_err();
            assert!(error.contains("backing_fmt"), "{error}");
        }
    }
}
