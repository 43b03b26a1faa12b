//! Random bytes that can be had again.

use fastrand::Rng;

/// A source of randomness that is different in every run, unless `BLOCKHOUSE_SEED` is set, and says
/// how to have the same again.
///
/// # Panics
/// When `BLOCKHOUSE_SEED` is no number.
pub fn seeded() -> Rng {
    let seed = match std::env::var("BLOCKHOUSE_SEED") {
        Ok(text) => text.parse().expect("BLOCKHOUSE_SEED is a number"),
        Err(_) => fastrand::u64(..),
    };
    let thread = std::thread::current();
    let test = thread.name().unwrap_or_default();
    eprintln!(
        "replay: BLOCKHOUSE_SEED={seed} cargo test --package blockhouse-tests -- --exact {test}"
    );
    Rng::with_seed(seed)
}

/// `length` random bytes.
pub fn random_bytes(random: &mut Rng, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    random.fill(&mut bytes);
    bytes
}

/// The content of a new image as the flat model sees it: every byte is known to be zero.
pub fn model_of_zeros(length: usize) -> Vec<Option<u8>> {
    vec![Some(0); length]
}
