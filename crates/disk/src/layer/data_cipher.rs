//! The encryption of the guest's data of an image, and the memory for encrypted bytes.

use std::sync::Arc;

use blockhouse_core::{Alignment, Result};
use blockhouse_crypt::{Secret, SectorCipher};
use blockhouse_format::{DataPlace, Encryption};

use crate::buffers::{Bounce, BounceBuffers};

/// The form in which the guest's data is stored.
pub enum DataEncryption {
    /// Not encrypted.
    None,
    /// Encrypted with a key that was not given.
    Locked,
    /// Encrypted; the key is known.
    Unlocked(Box<DataCipher>),
}

impl DataEncryption {
    /// The secret that opened the image; `None` if no secret did.
    pub fn secret(&self) -> Option<&Arc<Secret>> {
        match self {
            Self::Unlocked(cipher) => cipher.secret.as_ref(),
            Self::None | Self::Locked => None,
        }
    }

    /// The maximum number of PBKDF2 iterations of a key slot; `None` without LUKS, without the key
    /// or without slots, or if a slot is unsupported or has another key derivation.
    pub fn iterations(&self) -> Option<u32> {
        match self {
            Self::Unlocked(cipher) => cipher.encryption.luks()?.header().iterations(),
            Self::None | Self::Locked => None,
        }
    }

    /// The alignment for storage and cipher. The cipher needs whole sectors, and accepts memory of
    /// any alignment.
    pub(crate) fn alignment(&self, storage: Alignment) -> Alignment {
        let sector = match self {
            Self::None => return storage,
            Self::Locked => 512,
            Self::Unlocked(cipher) => cipher.cipher.sector_size(),
        };
        Alignment { offset: storage.offset.max(sector), memory: 1 }
    }
}

/// The cipher of an image's data.
pub struct DataCipher {
    cipher: SectorCipher,
    /// The secret that opened the image; `None` if the key itself was given.
    secret: Option<Arc<Secret>>,
    encryption: Encryption,
    buffers: BounceBuffers,
}

impl DataCipher {
    pub(crate) fn new(
        encryption: Encryption,
        cipher: SectorCipher,
        secret: Option<Arc<Secret>>,
    ) -> Self {
        Self { cipher, secret, encryption, buffers: BounceBuffers::new() }
    }

    /// Memory for encrypted bytes. While a caller holds it, the caller may wait only for the
    /// storage.
    pub(crate) async fn buffer(&self, length: usize) -> Result<Bounce<'_>> {
        self.buffers.get(length).await
    }

    /// Encrypts whole sectors whose location is `place`.
    pub(crate) fn encrypt(&self, place: DataPlace, bytes: &mut [u8]) {
        self.cipher.encrypt(self.encryption.sector_number(place), bytes);
    }

    /// Decrypts whole sectors whose location is `place`.
    pub(crate) fn decrypt(&self, place: DataPlace, bytes: &mut [u8]) {
        self.cipher.decrypt(self.encryption.sector_number(place), bytes);
    }
}
