//! One option of a new image, whatever its format.

use blockhouse_format::qcow2::{Compression, Preallocation, Switch, Version};

use crate::qemu_refusals::Refusal;

/// A kind of encryption of the guest's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncryptFormat {
    /// QEMU's encryption before LUKS (`encrypt.format=aes`): the password is the key.
    Aes,
    /// LUKS: the header of the image has the encrypted key.
    Luks,
}

/// One option.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Setting {
    /// Bytes of a cluster.
    ClusterSize(u64),
    /// The revision of the format.
    Compat(Version),
    /// Bits of a refcount.
    RefcountBits(u32),
    /// Whether refcount updates may be delayed (`lazy_refcounts`).
    LazyRefcounts(Switch),
    /// Whether there are subclusters.
    ExtendedL2(Switch),
    /// How clusters will be compressed.
    CompressionType(Compression),
    /// The space that is allocated when the image is created.
    Preallocation(Preallocation),
    /// The name of the backing file.
    BackingFile(String),
    /// The format of the backing file.
    BackingFormat(String),
    /// The name of the file that holds the guest's data.
    DataFile(String),
    /// Whether the data file is a raw image of the guest's disk.
    RawDataFile(Switch),
    /// How the guest's data is encrypted.
    Encrypt(EncryptFormat),
    /// Whether the data is encrypted as QEMU did before LUKS, by the older option.
    EncryptionSwitch(Switch),
    /// Milliseconds that the derivation of the key should take.
    EncryptIterTime(u32),
    /// The name of the secret that opens the image.
    KeySecret(String),
    /// An option of LUKS that has no effect: new images have this value, or do not use it.
    UsualLuks,
    /// Whether copy-on-write is turned off for the file (`nocow`), on a file system such as btrfs.
    NoCopyOnWrite(Switch),
    /// The allocation unit, in bytes, that the file system is advised to use for the file.
    ExtentSize(u32),
    /// The size of the disk in bytes.
    Size(u64),
    /// The name of an option of a foreign format, and its valid value.
    Foreign(&'static str, String),
    /// An unknown option or a wrong value, under the name qemu-img only. Reason: qemu-img reports
    /// it when it creates the image, not when it parses the command line.
    Refused(Refusal),
}

/// The name and the value of an option in qemu-img's line "Formatting"; `None` if that line omits
/// the option.
pub fn name_and_value(setting: &Setting) -> Option<(&'static str, String)> {
    let switch = |switch: &Switch| if *switch == Switch::On { "on" } else { "off" }.to_owned();
    Some(match setting {
        Setting::ClusterSize(size) => ("cluster_size", size.to_string()),
        Setting::Compat(version) => {
            ("compat", if *version == Version::V2 { "0.10" } else { "1.1" }.to_owned())
        }
        Setting::RefcountBits(bits) => ("refcount_bits", bits.to_string()),
        Setting::LazyRefcounts(on) => ("lazy_refcounts", switch(on)),
        Setting::ExtendedL2(on) => ("extended_l2", switch(on)),
        Setting::CompressionType(Compression::Zlib) => ("compression_type", "zlib".to_owned()),
        Setting::CompressionType(Compression::Zstd) => ("compression_type", "zstd".to_owned()),
        Setting::Preallocation(mode) => {
            let mode = match mode {
                Preallocation::Off => "off",
                Preallocation::Metadata => "metadata",
                Preallocation::Falloc => "falloc",
                Preallocation::Full => "full",
            };
            ("preallocation", mode.to_owned())
        }
        Setting::BackingFile(name) => ("backing_file", name.clone()),
        Setting::BackingFormat(format) => ("backing_fmt", format.clone()),
        Setting::DataFile(name) => ("data_file", name.clone()),
        Setting::RawDataFile(on) => ("data_file_raw", switch(on)),
        Setting::EncryptIterTime(time) => ("iter-time", time.to_string()),
        Setting::KeySecret(name) => ("key-secret", name.clone()),
        Setting::NoCopyOnWrite(on) => ("nocow", switch(on)),
        Setting::ExtentSize(size) => ("extent_size_hint", size.to_string()),
        Setting::Foreign(name, value) => (*name, value.clone()),
        Setting::Refused(refusal) => (refusal.name, refusal.value.clone()),
        Setting::Encrypt(EncryptFormat::Aes) => ("encrypt.format", "aes".to_owned()),
        Setting::Encrypt(EncryptFormat::Luks) => ("encrypt.format", "luks".to_owned()),
        Setting::EncryptionSwitch(on) => ("encryption", switch(on)),
        Setting::UsualLuks | Setting::Size(_) => return None,
    })
}

/// The name of the data file, if an option gives it; the last option is used.
pub fn data_file(settings: &[Setting]) -> Option<&str> {
    settings.iter().rev().find_map(|setting| match setting {
        Setting::DataFile(name) => Some(name.as_str()),
        _ => None,
    })
}

/// The name of the backing file, if an option gives it; the last option is used.
pub fn backing_file(settings: &[Setting]) -> Option<&str> {
    settings.iter().rev().find_map(|setting| match setting {
        Setting::BackingFile(name) => Some(name.as_str()),
        _ => None,
    })
}
