//! The encryption of the guest's data, as the image describes it.

use crate::luks::LuksEncryption;

/// Location of a sector of the guest's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataPlace {
    /// The offset on the guest's disk, in bytes. VM state is past the end of the disk.
    pub guest: u64,
    /// The offset in the file that stores it, in bytes.
    pub host: u64,
}

impl DataPlace {
    /// The location `bytes` further on.
    #[must_use]
    pub fn skip(self, bytes: u64) -> Self {
        Self { guest: self.guest.wrapping_add(bytes), host: self.host.wrapping_add(bytes) }
    }
}

/// The encryption of an image's data.
pub enum Encryption {
    /// LUKS: the keys are in a LUKS header.
    Luks(LuksEncryption),
    /// QEMU's encryption before LUKS: AES-128-CBC with `plain64`; the key is the password. The
    /// image has no data to verify a password with.
    Aes,
}

impl Encryption {
    /// The keys in the LUKS header, if there is one.
    pub fn luks(&self) -> Option<&LuksEncryption> {
        match self {
            Self::Luks(encryption) => Some(encryption),
            Self::Aes => None,
        }
    }

    /// The sector number for the initialization vector at `place`, in units of 512 bytes.
    pub fn sector_number(&self, place: DataPlace) -> u64 {
        match self {
            Self::Luks(encryption) => encryption.sector_number(place.host),
            Self::Aes => place.guest / 512,
        }
    }
}
