//! Derivation of a slot's area key from a passphrase, with a limit on the work.
//!
//! A header is untrusted: without limits it could ask for hours of work and for all memory. One
//! [`Work`] limits all slots of a header together, so that 32 slots take no longer than one slot
//! may.

use argon2::{Algorithm, Argon2, Block, Params, Version};
use blockhouse_engine::LockedBytes;
use blockhouse_format::{LuksDigest, LuksHash, LuksKdf};
use zeroize::Zeroize;

use crate::hash;

/// The maximum number of HMAC rounds. cryptsetup and QEMU choose a number that takes two seconds:
/// some millions.
const MAX_ROUNDS: u64 = 1 << 27;
/// The maximum number of HMAC rounds of a new slot. Eight slots with their digests, which take an
/// eighth of a slot's iterations, are less than [`MAX_ROUNDS`].
const MAX_SLOT_ROUNDS: u64 = MAX_ROUNDS / 10;
/// The maximum memory of one Argon2 derivation, in KiB: cryptsetup's default maximum.
const MAX_MEMORY_KIB: u32 = 1 << 20;
/// The maximum number of KiB that all Argon2 derivations together may fill, over all passes.
const MAX_FILLED_KIB: u64 = 32 << 20;
/// The error text for a limit that is exceeded.
const TOO_MUCH: &str = "which is more than is done here";

/// The HMAC rounds of each iteration of PBKDF2, one for each block of the derived key.
fn rounds_each(hash: LuksHash, length: usize) -> u64 {
    length.div_ceil(hash::length(hash)) as u64
}

/// The maximum iterations of a new slot whose area key has `length` bytes.
pub(crate) fn max_iterations(hash: LuksHash, length: usize) -> u32 {
    (MAX_SLOT_ROUNDS / rounds_each(hash, length)) as u32
}

/// The work that may still be done for a header.
pub(crate) struct Work {
    rounds: u64,
    filled_kib: u64,
}

impl Work {
    pub(crate) fn new() -> Self {
        Self { rounds: MAX_ROUNDS, filled_kib: MAX_FILLED_KIB }
    }

    /// Subtracts the work of PBKDF2.
    fn take_rounds(
        &mut self,
        hash: LuksHash,
        iterations: u32,
        length: usize,
    ) -> Result<(), String> {
        if iterations == 0 {
            return Err("it asks for no iterations".into());
        }
        let rounds = u64::from(iterations) * rounds_each(hash, length);
        self.rounds = self
            .rounds
            .checked_sub(rounds)
            .ok_or_else(|| format!("it asks for {iterations} iterations, {TOO_MUCH}"))?;
        Ok(())
    }

    /// Subtracts the work of Argon2.
    fn take_filled(&mut self, passes: u32, memory_kib: u32) -> Result<(), String> {
        if memory_kib > MAX_MEMORY_KIB {
            let limit = MAX_MEMORY_KIB >> 10;
            return Err(format!(
                "it asks for {} MiB of memory, more than {limit} MiB",
                memory_kib >> 10
            ));
        }
        self.filled_kib = self
            .filled_kib
            .checked_sub(u64::from(passes) * u64::from(memory_kib))
            .ok_or_else(|| format!("it asks for {passes} passes over its memory, {TOO_MUCH}"))?;
        Ok(())
    }

    /// Derives a key from the secret into `into`.
    ///
    /// # Errors
    /// The parameters in the header are not supported, or cost too much.
    pub(crate) fn derive(
        &mut self,
        kdf: &LuksKdf,
        secret: &[u8],
        into: &mut [u8],
    ) -> Result<(), String> {
        match kdf {
            LuksKdf::Pbkdf2 { hash, iterations, salt } => {
                self.take_rounds(*hash, *iterations, into.len())?;
                hash::pbkdf2(*hash, secret, salt, *iterations, into);
                Ok(())
            }
            LuksKdf::Argon2 { is_id, passes, memory_kib, lanes, salt } => {
                self.take_filled(*passes, *memory_kib)?;
                let kind = if *is_id { Algorithm::Argon2id } else { Algorithm::Argon2i };
                if u64::from(*lanes) * 8 > u64::from(*memory_kib) {
                    return Err(format!("it asks for {lanes} lanes in {memory_kib} KiB of memory"));
                }
                let params = Params::new(*memory_kib, *passes, *lanes, Some(into.len()))
                    .map_err(|why| format!("its costs make no sense: {why}"))?;
                argon2(Argon2::new(kind, Version::V0x13, params), secret, salt, into)
            }
        }
    }

    /// Whether `digest` is the digest of `key`.
    ///
    /// # Errors
    /// As [`derive`](Self::derive).
    pub(crate) fn is_key_of(&mut self, digest: &LuksDigest, key: &[u8]) -> Result<bool, String> {
        let LuksDigest { hash, iterations, salt, digest } = digest;
        self.take_rounds(*hash, *iterations, digest.len())?;
        let mut found = vec![0; digest.len()];
        hash::pbkdf2(*hash, key, salt, *iterations, &mut found);
        Ok(found == *digest)
    }
}

fn argon2(argon2: Argon2<'_>, secret: &[u8], salt: &[u8], into: &mut [u8]) -> Result<(), String> {
    let count = argon2.params().block_count();
    let mut memory = Vec::new();
    memory
        .try_reserve_exact(count)
        .map_err(|_| format!("the {} MiB of memory that it asks for cannot be had", count >> 10))?;
    memory.resize(count, Block::default());
    let outcome = argon2.hash_password_into_with_memory(secret, salt, into, &mut memory);
    memory.iter_mut().for_each(Zeroize::zeroize);
    outcome.map_err(|why| format!("its costs make no sense: {why}"))
}

/// Zeros for a key of this many bytes.
pub(crate) fn empty_key(length: usize) -> Result<LockedBytes, String> {
    LockedBytes::new(length).map_err(|error| format!("no memory for its key: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_new_slots_of_any_key_can_be_tried() {
        for hash in [LuksHash::Sha1, LuksHash::Sha256, LuksHash::Sha512] {
            for length in [16, 24, 32, 64] {
                let mut work = Work::new();
                let most = max_iterations(hash, length);
                for _ in 0..8 {
                    work.take_rounds(hash, most, length).unwrap();
                    work.take_rounds(LuksHash::Sha256, most / 8, 20).unwrap();
                }
            }
        }
    }
}
