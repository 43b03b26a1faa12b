//! Encryption and decryption of a disk's sectors in memory.
//!
//! As in `dm-crypt`, each sector is encrypted by itself, with an initialization vector made of the
//! sector's number in units of 512 bytes.

use std::io;

use aes::cipher::array::Array;
use aes::cipher::{BlockCipherDecrypt, BlockCipherEncrypt, KeyInit};
use aes::{Aes128, Aes192, Aes256};
use blockhouse_engine::Locked;
use blockhouse_format::LuksCipher;
use sha2::{Digest, Sha256};
use zeroize::Zeroize;

use crate::xts::{BLOCK, Block, xts};

/// The unit of sectors' numbers, in bytes.
const NUMBER_UNIT: u64 = 512;

/// A cipher with a key, for sectors of one size. Any number of threads may use it at once.
pub struct SectorCipher {
    keys: Locked<Keys>,
    is_32_bit: bool,
    sector_size: usize,
}

/// The key schedules.
enum Keys {
    Xts128(Xts<Aes128>),
    Xts192(Xts<Aes192>),
    Xts256(Xts<Aes256>),
    Cbc128(Cbc<Aes128>),
    Cbc192(Cbc<Aes192>),
    Cbc256(Cbc<Aes256>),
}

struct Xts<A> {
    data: A,
    tweak: A,
}

struct Cbc<A> {
    data: A,
    /// The cipher of the initialization vectors.
    essiv: Option<Aes256>,
}

/// The direction of the work on sectors.
#[derive(Clone, Copy)]
enum Direction {
    Encrypt,
    Decrypt,
}

impl SectorCipher {
    /// A cipher for sectors of `sector_size` bytes, a power of two from 512 to 4096. The key's
    /// length must be valid for the cipher.
    ///
    /// # Errors
    /// The kernel has no memory for the keys; `InvalidInput` for a key of an invalid length.
    pub fn new(cipher: LuksCipher, key: &[u8], sector_size: u32) -> io::Result<Self> {
        let keys = match cipher {
            LuksCipher::AesXtsPlain | LuksCipher::AesXtsPlain64 => xts_keys(key),
            LuksCipher::AesCbcPlain | LuksCipher::AesCbcPlain64 => cbc_keys(key, None),
            LuksCipher::AesCbcEssivSha256 => {
                let mut hashed = Sha256::digest(key);
                let essiv = Aes256::new(&hashed);
                hashed.as_mut_slice().zeroize();
                cbc_keys(key, Some(essiv))
            }
        };
        let wrong_length = || io::Error::new(io::ErrorKind::InvalidInput, "a key of this length");
        let is_32_bit = matches!(cipher, LuksCipher::AesXtsPlain | LuksCipher::AesCbcPlain);
        let keys = Locked::new(keys.ok_or_else(wrong_length)?)?;
        Ok(Self { keys, is_32_bit, sector_size: sector_size as usize })
    }

    /// Bytes of a sector.
    pub fn sector_size(&self) -> u32 {
        self.sector_size as u32
    }

    /// Encrypts whole sectors in place; `number` is the first sector's number in units of 512
    /// bytes.
    pub fn encrypt(&self, number: u64, bytes: &mut [u8]) {
        self.run(Direction::Encrypt, number, bytes);
    }

    /// Decrypts whole sectors in place; `number` as for [`encrypt`](Self::encrypt).
    pub fn decrypt(&self, number: u64, bytes: &mut [u8]) {
        self.run(Direction::Decrypt, number, bytes);
    }

    fn run(&self, direction: Direction, number: u64, bytes: &mut [u8]) {
        debug_assert!(bytes.len().is_multiple_of(self.sector_size), "whole sectors");
        let step = self.sector_size as u64 / NUMBER_UNIT;
        let iv = |index: u64| {
            let number = number.wrapping_add(index * step);
            let number = if self.is_32_bit { number & u64::from(u32::MAX) } else { number };
            let mut block = [0; BLOCK];
            block[..8].copy_from_slice(&number.to_le_bytes());
            Array(block)
        };
        let size = self.sector_size;
        match &*self.keys {
            Keys::Xts128(keys) => keys.run(direction, bytes, size, iv),
            Keys::Xts192(keys) => keys.run(direction, bytes, size, iv),
            Keys::Xts256(keys) => keys.run(direction, bytes, size, iv),
            Keys::Cbc128(keys) => keys.run(direction, bytes, size, iv),
            Keys::Cbc192(keys) => keys.run(direction, bytes, size, iv),
            Keys::Cbc256(keys) => keys.run(direction, bytes, size, iv),
        }
    }
}

impl std::fmt::Debug for SectorCipher {
    /// Does not show the keys.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SectorCipher")
    }
}

/// The first half is the data's key, the second half the tweaks'.
fn xts_keys(key: &[u8]) -> Option<Keys> {
    fn of<A: KeyInit>(key: &[u8]) -> Option<Xts<A>> {
        let (data, tweak) = key.split_at_checked(key.len() / 2)?;
        Some(Xts { data: A::new_from_slice(data).ok()?, tweak: A::new_from_slice(tweak).ok()? })
    }
    match key.len() {
        32 => of(key).map(Keys::Xts128),
        48 => of(key).map(Keys::Xts192),
        64 => of(key).map(Keys::Xts256),
        _ => None,
    }
}

fn cbc_keys(key: &[u8], essiv: Option<Aes256>) -> Option<Keys> {
    fn of<A: KeyInit>(key: &[u8], essiv: Option<Aes256>) -> Option<Cbc<A>> {
        Some(Cbc { data: A::new_from_slice(key).ok()?, essiv })
    }
    match key.len() {
        16 => of(key, essiv).map(Keys::Cbc128),
        24 => of(key, essiv).map(Keys::Cbc192),
        32 => of(key, essiv).map(Keys::Cbc256),
        _ => None,
    }
}

trait Aes:
    BlockCipherEncrypt<BlockSize = aes::cipher::consts::U16>
    + BlockCipherDecrypt<BlockSize = aes::cipher::consts::U16>
{
}
impl Aes for Aes128 {}
impl Aes for Aes192 {}
impl Aes for Aes256 {}

impl<A: Aes> Xts<A> {
    fn run(&self, direction: Direction, bytes: &mut [u8], size: usize, iv: impl Fn(u64) -> Block) {
        let tweaks = |blocks: &mut [Block]| self.tweak.encrypt_blocks(blocks);
        match direction {
            Direction::Encrypt => xts(bytes, size, iv, tweaks, |all| self.data.encrypt_blocks(all)),
            Direction::Decrypt => xts(bytes, size, iv, tweaks, |all| self.data.decrypt_blocks(all)),
        }
    }
}

impl<A: Aes> Cbc<A> {
    fn run(&self, direction: Direction, bytes: &mut [u8], size: usize, iv: impl Fn(u64) -> Block) {
        for (index, sector) in bytes.chunks_mut(size).enumerate() {
            let mut first = iv(index as u64);
            if let Some(essiv) = &self.essiv {
                essiv.encrypt_block(&mut first);
            }
            let (blocks, _) = Block::slice_as_chunks_mut(sector);
            match direction {
                Direction::Encrypt => self.encrypt(blocks, first),
                Direction::Decrypt => self.decrypt(blocks, first),
            }
        }
    }

    fn encrypt(&self, blocks: &mut [Block], mut before: Block) {
        for block in blocks {
            xor(block, &before);
            self.data.encrypt_block(block);
            before = *block;
        }
    }

    fn decrypt(&self, blocks: &mut [Block], first: Block) {
        let mut encrypted = [Block::default(); 4096 / BLOCK];
        encrypted[..blocks.len()].copy_from_slice(blocks);
        self.data.decrypt_blocks(blocks);
        let before = std::iter::once(&first).chain(&encrypted);
        blocks.iter_mut().zip(before).for_each(|(block, before)| xor(block, before));
    }
}

fn xor(block: &mut Block, other: &Block) {
    block.iter_mut().zip(other).for_each(|(byte, other)| *byte ^= other);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        let digits = text.as_bytes().chunks(2);
        digits
            .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
            .collect()
    }

    /// IEEE Std 1619-2007, annex B: the first bytes of the ciphertexts of vectors 4 and 10.
    #[test]
    fn xts_is_that_of_the_standard() {
        let plain: Vec<u8> = (0..512).map(|index| index as u8).collect();
        let keys = ["27182818284590452353602874713526", "31415926535897932384626433832795"];
        let mut bytes = plain.clone();
        let cipher = SectorCipher::new(LuksCipher::AesXtsPlain64, &hex(&keys.concat()), 512);
        cipher.unwrap().encrypt(0, &mut bytes);
        assert_eq!(bytes[..16], hex("27a7479befa1d476489f308cd4cfa6e2"));
        let keys = [
            "2718281828459045235360287471352662497757247093699959574966967627",
            "3141592653589793238462643383279502884197169399375105820974944592",
        ];
        let mut bytes = plain;
        let cipher = SectorCipher::new(LuksCipher::AesXtsPlain64, &hex(&keys.concat()), 512);
        cipher.unwrap().encrypt(0xff, &mut bytes);
        assert_eq!(bytes[..16], hex("1c3b3a102f770386e4836c99e370cf9b"));
    }

    #[test]
    fn every_cipher_gives_back_what_it_was_given_whatever_the_cut() {
        let ciphers = [
            (LuksCipher::AesXtsPlain, 32),
            (LuksCipher::AesXtsPlain64, 48),
            (LuksCipher::AesXtsPlain64, 64),
            (LuksCipher::AesCbcPlain, 16),
            (LuksCipher::AesCbcPlain64, 24),
            (LuksCipher::AesCbcEssivSha256, 32),
        ];
        for (kind, length) in ciphers {
            for sector in [512, 1024, 4096] {
                let key: Vec<u8> = (0..length).collect();
                let cipher = SectorCipher::new(kind, &key, sector).unwrap();
                let plain: Vec<u8> = (0..3 * 8192).map(|index| (index / 5) as u8).collect();
                let mut whole = plain.clone();
                cipher.encrypt(7, &mut whole);
                let mut parts = plain.clone();
                let units = u64::from(sector) / 512;
                for (index, part) in parts.chunks_mut(sector as usize).enumerate() {
                    cipher.encrypt(7 + index as u64 * units, part);
                }
                assert!(whole == parts && whole != plain, "{kind:?} {sector}");
                let split = 2 * 4096;
                cipher.decrypt(7, &mut whole[..split]);
                cipher.decrypt(7 + split as u64 / 512, &mut whole[split..]);
                assert!(whole == plain, "{kind:?} {sector}");
            }
        }
    }

    #[test]
    fn the_number_of_a_sector_has_32_bits_only_where_the_name_says_so() {
        let encrypt = |kind, number| {
            let mut bytes = [0; 512];
            SectorCipher::new(kind, &[1; 32], 512).unwrap().encrypt(number, &mut bytes);
            bytes
        };
        let far = 5 + (1 << 32);
        assert_eq!(encrypt(LuksCipher::AesXtsPlain, 5), encrypt(LuksCipher::AesXtsPlain, far));
        assert_ne!(encrypt(LuksCipher::AesXtsPlain64, 5), encrypt(LuksCipher::AesXtsPlain64, far));
    }
}
