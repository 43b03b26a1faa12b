//! How the guest's data of an image is encrypted, as the image says.

use crate::luks::LuksEncryption;

/// Where a sector of the guest's data is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataPlace {
    /// Its offset on the guest's disk, in bytes; that of a machine's state is past the end.
    pub guest: u64,
    /// Its offset in the file that has it, in bytes.
    pub host: u64,
}

impl DataPlace {
    /// The place this many bytes further on.
    #[must_use]
    pub fn skip(self, bytes: u64) -> Self {
        Self { guest: self.guest.wrapping_add(bytes), host: self.host.wrapping_add(bytes) }
    }
}

/// The encryption of an image's data.
pub enum Encryption {
    /// With keys in a header of LUKS.
    Luks(LuksEncryption),
    /// As QEMU did before LUKS: AES-128-CBC with `plain64`, whose key is the password. Nothing in
    /// the image tells whether a password is the right one.
    Aes,
}

impl Encryption {
    /// The keys in a header of LUKS, if there is one.
    pub fn luks(&self) -> Option<&LuksEncryption> {
        match self {
            Self::Luks(encryption) => Some(encryption),
            Self::Aes => None,
        }
    }

    /// The number of the sector at a place for its initialization vector, in units of 512 bytes.
    pub fn sector_number(&self, place: DataPlace) -> u64 {
        match self {
            Self::Luks(encryption) => encryption.sector_number(place.host),
            Self::Aes => place.guest / 512,
        }
    }
}
