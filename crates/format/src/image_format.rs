//! The names of image formats: on the command line, in file names, and in images that name their
//! backing file's format.

use std::path::Path;
use std::str::FromStr;

use crate::ForeignKind;

/// The image formats that can be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageFormat {
    /// The disk byte for byte.
    Raw,
    /// A container with an encrypted disk (LUKS 1 and 2).
    Luks,
    /// QEMU's format: metadata has the location of each cluster of the disk.
    Qcow2,
    /// A format of another program: existing images are only read.
    Foreign(ForeignKind),
}

impl FromStr for ImageFormat {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "raw" => Ok(Self::Raw),
            // Names of QEMU's protocol drivers, which give access to the bytes themselves.
            "file" | "host_device" | "nbd" | "rbd" => Ok(Self::Raw),
            "luks" => Ok(Self::Luks),
            "qcow2" => Ok(Self::Qcow2),
            _ => ForeignKind::by_name(name).map(Self::Foreign).ok_or_else(|| {
                let foreign = ForeignKind::ALL.map(ForeignKind::as_str).join(", ");
                format!(
                    "there is no format '{name}': images are raw, qcow2 or luks, or of other programs: {foreign} \
                     (qemu-img convert makes qcow2 of some others)"
                )
            }),
        }
    }
}

impl ImageFormat {
    /// The name on the command line and in images.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Luks => "luks",
            Self::Qcow2 => "qcow2",
            Self::Foreign(kind) => kind.as_str(),
        }
    }

    /// Whether images of this format can be recognized by their first or last bytes, see
    /// [`probe`](crate::probe::probe).
    pub fn has_signature(self) -> bool {
        match self {
            Self::Raw => false,
            Self::Luks | Self::Qcow2 | Self::Foreign(_) => true,
        }
    }

    /// Whether this program writes to images of this format.
    pub fn is_writable(self) -> bool {
        matches!(self, Self::Raw | Self::Luks | Self::Qcow2)
    }

    /// The reason why a command makes no image of this format, if the format is not
    /// [writable](Self::is_writable).
    pub fn not_made(self) -> String {
        format!(
            "images of the format {} are made by 'create', 'convert' and 'dd' alone, and never written to; qcow2 and raw are",
            self.as_str()
        )
    }

    /// The format by a file's suffix: `.qcow2`, `.luks` or the suffix of a format that is only
    /// read; otherwise raw.
    pub fn by_name(path: &Path) -> Self {
        match suffix(path).as_deref() {
            Some("qcow2") => Self::Qcow2,
            Some("luks") => Self::Luks,
            Some(suffix) => ForeignKind::by_name(suffix).map_or(Self::Raw, Self::Foreign),
            None => Self::Raw,
        }
    }

    /// The format by the name of a new file: as [`by_name`](Self::by_name), but the suffix of a
    /// format that is not written is refused, because its user does not expect a raw image.
    ///
    /// # Errors
    /// The mistake in the name, and how to name the format.
    pub fn for_new(path: &Path) -> Result<Self, String> {
        match suffix(path) {
            Some(suffix) if FOREIGN_SUFFIXES.contains(&&*suffix) => Err(format!(
                "{}: images of the format '.{suffix}' cannot be made; say --format qcow2 or \
                 --format raw if the file is to have this name nevertheless",
                path.display()
            )),
            _ => Ok(Self::by_name(path)),
        }
    }
}

/// Suffixes of files in formats that this program does not write to.
const FOREIGN_SUFFIXES: [&str; 11] =
    ["bochs", "cloop", "dmg", "parallels", "qcow", "qed", "vdi", "vhd", "vhdx", "vmdk", "vpc"];

/// The part of a file's name after its last dot, in lower case.
pub(crate) fn suffix(path: &Path) -> Option<String> {
    path.extension()?.to_str().map(str::to_ascii_lowercase)
}
