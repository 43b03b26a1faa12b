//! The content of a LUKS header, whatever its version: ciphers, key slots, digests of the key.
//!
//! Guarantees: every value was checked when the header was parsed. Sizes and offsets are within the
//! limits below, ranges do not overflow, and names of unknown algorithms are errors that quote
//! printable ASCII only. The work of a slot's key derivation (iterations, memory) is not limited
//! here, but in the code that derives keys.

use blockhouse_core::ByteRange;

/// The maximum and the minimum size of a disk's key in bytes.
pub(super) const MAX_KEY: u64 = 64;
pub(super) const MIN_KEY: u64 = 16;
/// The maximum number of stripes of a key slot; all known programs use 4000.
pub(super) const MAX_STRIPES: u64 = 8192;
/// The maximum size of a salt or digest in bytes.
pub(super) const MAX_SALT: usize = 64;

/// A LUKS header of version 1 or 2.
#[derive(Clone, Debug)]
pub struct LuksHeader {
    /// 1 or 2.
    pub version: u32,
    /// The container's UUID, as the header contains it.
    pub uuid: String,
    /// How the disk's sectors are encrypted.
    pub cipher: LuksCipher,
    /// Bytes of the disk's key.
    pub key_bytes: usize,
    /// Bytes that are encrypted together: 512, 1024, 2048 or 4096.
    pub sector_size: u32,
    /// The number that is added to each sector's number (in units of 512 bytes) to form its
    /// initialization vector.
    pub iv_tweak: u64,
    /// The offset of the disk, in bytes from the start of the header.
    pub payload: u64,
    /// Bytes of the disk; `None` if the disk ends with the file.
    pub payload_size: Option<u64>,
    /// The key slots in use, in the order in which they are tried.
    pub slots: Vec<LuksSlot>,
    /// The offsets of the areas of all key slots, used or not, in bytes from the start of the
    /// header; empty for version 2.
    pub slot_offsets: Vec<u64>,
}

impl LuksHeader {
    /// The highest number of PBKDF2 iterations of all slots; `None` if a slot is unsupported or has
    /// another key derivation, or without slots.
    pub fn iterations(&self) -> Option<u32> {
        let iterations = self.slots.iter().map(|slot| match slot.key.as_ref().ok()?.kdf {
            LuksKdf::Pbkdf2 { iterations, .. } => Some(iterations),
            LuksKdf::Argon2 { .. } => None,
        });
        iterations.collect::<Option<Vec<_>>>()?.into_iter().max()
    }
}

/// A key slot: the disk's key, encrypted by a passphrase.
#[derive(Clone, Debug)]
pub struct LuksSlot {
    /// The number of the slot in the header.
    pub number: u32,
    /// The parameters that open the slot, or the reason why the slot is not supported.
    pub key: Result<LuksSlotKey, String>,
}

/// The parameters that open a key slot.
#[derive(Clone, Debug)]
pub struct LuksSlotKey {
    /// How the passphrase becomes the key of the slot's area.
    pub kdf: LuksKdf,
    /// The area with the disk's key in stripes, from the start of the header on.
    pub area: ByteRange,
    /// How the area is encrypted.
    pub cipher: LuksCipher,
    /// Bytes of the area's key.
    pub area_key_bytes: usize,
    /// Stripes of the area, each as long as the disk's key.
    pub stripes: u32,
    /// The hash with which the stripes are merged.
    pub stripe_hash: LuksHash,
    /// The digest by which the disk's key is recognized.
    pub digest: LuksDigest,
}

/// A key derivation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LuksKdf {
    /// PBKDF2 (RFC 8018).
    Pbkdf2 {
        /// The hash of PBKDF2's HMAC.
        hash: LuksHash,
        /// Iterations of PBKDF2.
        iterations: u32,
        /// The salt.
        salt: Vec<u8>,
    },
    /// Argon2 (RFC 9106), version 1.3.
    Argon2 {
        /// Whether it is Argon2id, otherwise Argon2i.
        is_id: bool,
        /// Passes over the memory.
        passes: u32,
        /// The memory in KiB.
        memory_kib: u32,
        /// The degree of parallelism (lanes).
        lanes: u32,
        /// The salt.
        salt: Vec<u8>,
    },
}

/// PBKDF2 of the disk's key, by which the right key is recognized.
#[derive(Clone, Debug)]
pub struct LuksDigest {
    /// The hash of PBKDF2's HMAC.
    pub hash: LuksHash,
    /// Iterations of PBKDF2.
    pub iterations: u32,
    /// The salt.
    pub salt: Vec<u8>,
    /// The result of PBKDF2.
    pub digest: Vec<u8>,
}

/// A hash function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LuksHash {
    /// SHA-1.
    Sha1,
    /// SHA-224.
    Sha224,
    /// SHA-256.
    Sha256,
    /// SHA-384.
    Sha384,
    /// SHA-512.
    Sha512,
}

/// A cipher, with its mode and how initialization vectors are made (`dm-crypt`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LuksCipher {
    /// AES-XTS, the sector's number in 32 bits.
    AesXtsPlain,
    /// AES-XTS, the sector's number in 64 bits.
    AesXtsPlain64,
    /// AES-CBC, the sector's number in 32 bits.
    AesCbcPlain,
    /// AES-CBC, the sector's number in 64 bits.
    AesCbcPlain64,
    /// AES-CBC, the sector's number encrypted with the SHA-256 of the key.
    AesCbcEssivSha256,
}

impl LuksCipher {
    const ALL: [Self; 5] = [
        Self::AesXtsPlain,
        Self::AesXtsPlain64,
        Self::AesCbcPlain,
        Self::AesCbcPlain64,
        Self::AesCbcEssivSha256,
    ];

    /// The name of the cipher in `dm-crypt`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::AesXtsPlain => "aes-xts-plain",
            Self::AesXtsPlain64 => "aes-xts-plain64",
            Self::AesCbcPlain => "aes-cbc-plain",
            Self::AesCbcPlain64 => "aes-cbc-plain64",
            Self::AesCbcEssivSha256 => "aes-cbc-essiv:sha256",
        }
    }

    pub(super) fn parse(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|cipher| cipher.as_str() == name);
        found.ok_or_else(|| format!("the cipher '{}' is not supported", printable(name)))
    }

    /// Whether the cipher has keys of this many bytes.
    pub(super) fn takes_key(self, bytes: u64) -> bool {
        match self {
            Self::AesXtsPlain | Self::AesXtsPlain64 => matches!(bytes, 32 | 48 | 64),
            Self::AesCbcPlain | Self::AesCbcPlain64 | Self::AesCbcEssivSha256 => {
                matches!(bytes, 16 | 24 | 32)
            }
        }
    }

    /// Checks a key size in bytes, and returns it.
    pub(super) fn check_key(self, bytes: u64) -> Result<usize, String> {
        if self.takes_key(bytes) {
            Ok(bytes as usize)
        } else {
            Err(format!("{} has no keys of {bytes} bytes", self.as_str()))
        }
    }
}

impl LuksHash {
    const ALL: [Self; 5] = [Self::Sha1, Self::Sha224, Self::Sha256, Self::Sha384, Self::Sha512];

    /// The name of the hash function in headers.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sha1 => "sha1",
            Self::Sha224 => "sha224",
            Self::Sha256 => "sha256",
            Self::Sha384 => "sha384",
            Self::Sha512 => "sha512",
        }
    }

    pub(super) fn parse(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|hash| hash.as_str() == name);
        found.ok_or_else(|| format!("the hash '{}' is not supported", printable(name)))
    }
}

/// A text of a header for use in a message: its first 40 characters, escaped to printable ASCII.
pub(super) fn printable(text: &str) -> String {
    let text: String = text.chars().take(40).collect();
    text.escape_default().to_string()
}

/// The area of a key slot with `stripes` stripes of `key` bytes, rounded up to whole sectors.
pub(super) fn slot_area(offset: u64, key: u64, stripes: u64) -> Result<ByteRange, String> {
    if stripes == 0 || stripes > MAX_STRIPES {
        return Err(format!("{stripes} stripes are not 1 to {MAX_STRIPES}"));
    }
    let length = (key * stripes).next_multiple_of(512);
    ByteRange::new(offset, length).ok_or_else(|| format!("its area cannot be at offset {offset}"))
}
