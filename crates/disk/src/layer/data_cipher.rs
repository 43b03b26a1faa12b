//! How the guest's data of an image is encrypted, and the memory in which that is done.

use blockhouse_core::{Alignment, Result};
use blockhouse_crypt::SectorCipher;
use blockhouse_format::{DataPlace, Encryption};

use crate::buffers::{Bounce, BounceBuffers};

/// How the guest's data is stored.
pub(crate) enum DataEncryption {
    /// As it is.
    None,
    /// Encrypted with a key that was not given.
    Locked,
    /// Encrypted.
    Unlocked(Box<DataCipher>),
}

impl DataEncryption {
    /// The storage's demands, with those of the cipher: it takes whole sectors, and any memory.
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
pub(crate) struct DataCipher {
    cipher: SectorCipher,
    encryption: Encryption,
    buffers: BounceBuffers,
}

impl DataCipher {
    pub(crate) fn new(encryption: Encryption, cipher: SectorCipher) -> Self {
        Self { cipher, encryption, buffers: BounceBuffers::new() }
    }

    /// Memory for encrypted bytes. While it is held, only the storage may be waited for.
    pub(crate) async fn buffer(&self, length: usize) -> Result<Bounce<'_>> {
        self.buffers.get(length).await
    }

    /// Encrypts whole sectors whose location is `place`.
    pub(crate) fn encrypt(&self, place: DataPlace, bytes: &mut [u8]) {
        self.cipher.encrypt(self.encryption.sector_number(place), bytes);
    }

    /// Decrypts whole sectors from `place`.
    pub(crate) fn decrypt(&self, place: DataPlace, bytes: &mut [u8]) {
        self.cipher.decrypt(self.encryption.sector_number(place), bytes);
    }
}
