//! The header of a new encrypted image: a random key, in a slot that one secret opens.
//!
//! Guarantee: keys, salts and stripes are random numbers of the kernel (`getrandom`), and
//! [`unlock`](crate::unlock) can open the slot with the secret within its limits.

use std::time::{Duration, Instant};

use blockhouse_core::{Error, Result};
use blockhouse_engine::LockedBytes;
use blockhouse_format::{LuksHash, NewLuks};

use crate::kdf::max_iterations;
use crate::{Secret, SectorCipher, hash, stripes};

/// The minimum number of iterations of a slot and of a digest, as in cryptsetup.
const MIN_ITERATIONS: u32 = 1000;
/// Iterations by which the machine's speed is measured.
const SAMPLE: u32 = 1 << 14;

/// The work that it takes to derive the key of a new slot, and so to try a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyWork {
    /// About this time on this machine.
    Time(Duration),
    /// Iterations of PBKDF2. The number is limited like that for a time: at least 1000, and so few
    /// that [`unlock`](crate::unlock) can try eight such slots (6.7 million).
    Iterations(u32),
}

impl KeyWork {
    fn iterations(self, secret: &Secret) -> u32 {
        match self {
            Self::Time(time) => iterations_for(secret, time, NewLuks::HASH, NewLuks::KEY),
            Self::Iterations(count) => {
                count.clamp(MIN_ITERATIONS, max_iterations(NewLuks::HASH, NewLuks::KEY))
            }
        }
    }
}

/// The LUKS 1 header for a new image, with its key areas: AES-256-XTS, a random key, and one slot,
/// which `secret` opens. Deriving the slot's key takes `work`. This call takes about as long, so do
/// not call it on an event loop.
///
/// # Errors
/// The kernel gives no random numbers or no memory.
pub fn create_header(secret: &Secret, work: KeyWork) -> Result<Vec<u8>> {
    build(secret, work).map_err(|error| Error::host("cannot make a key", error))
}

fn build(secret: &Secret, work: KeyWork) -> std::io::Result<Vec<u8>> {
    let iterations = work.iterations(secret);
    let mut key = LockedBytes::new(NewLuks::KEY)?;
    fill_random(&mut key)?;
    let mut header = NewLuks {
        uuid: uuid()?,
        digest: [0; 20],
        digest_salt: random()?,
        digest_iterations: (iterations / 8).max(MIN_ITERATIONS),
        salt: random()?,
        iterations,
    };
    let NewLuks { digest_salt, digest_iterations, .. } = &header;
    let mut digest = [0; 20];
    hash::pbkdf2(NewLuks::HASH, &key, digest_salt, *digest_iterations, &mut digest);
    header.digest = digest;
    let mut area_key = LockedBytes::new(NewLuks::KEY)?;
    hash::pbkdf2(NewLuks::HASH, secret.bytes(), &header.salt, iterations, &mut area_key);
    let mut material = LockedBytes::new(NewLuks::AREA_LENGTH)?;
    fill_random(&mut material)?;
    stripes::split(NewLuks::HASH, &key, &mut material);
    SectorCipher::new(NewLuks::CIPHER, &area_key, 512)?.encrypt(0, &mut material);
    let mut bytes = header.to_bytes();
    bytes[NewLuks::AREA..NewLuks::AREA + NewLuks::AREA_LENGTH].copy_from_slice(&material);
    Ok(bytes)
}

/// How many iterations for an area key of `length` bytes take about `time` on this machine.
pub(crate) fn iterations_for(
    secret: &Secret,
    time: Duration,
    hash: LuksHash,
    length: usize,
) -> u32 {
    let mut key = vec![0; length];
    let start = Instant::now();
    hash::pbkdf2(hash, secret.bytes(), &[0; 32], SAMPLE, &mut key);
    zeroize::Zeroize::zeroize(key.as_mut_slice());
    let each = start.elapsed().as_secs_f64() / f64::from(SAMPLE);
    // The conversion saturates, also if the clock did not advance (division by zero).
    let iterations = (time.as_secs_f64() / each) as u32;
    iterations.clamp(MIN_ITERATIONS, max_iterations(hash, length))
}

pub(crate) fn random<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    fill_random(&mut bytes)?;
    Ok(bytes)
}

pub(crate) fn fill_random(mut bytes: &mut [u8]) -> std::io::Result<()> {
    while !bytes.is_empty() {
        let count =
            match rustix::rand::getrandom(&mut *bytes, rustix::rand::GetRandomFlags::empty()) {
                Ok(count) => count,
                Err(rustix::io::Errno::INTR) => 0,
                Err(error) => return Err(error.into()),
            };
        bytes = &mut bytes[count..];
    }
    Ok(())
}

/// A UUID of random numbers (RFC 9562, version 4).
fn uuid() -> std::io::Result<String> {
    let mut bytes: [u8; 16] = random()?;
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let mut text = String::new();
    for (index, byte) in bytes.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text += &format!("{byte:02x}");
    }
    Ok(text)
}
