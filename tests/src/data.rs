//! Random bytes that a seed reproduces.

use fastrand::Rng;

/// A random number generator with a different seed in every run, unless `BLOCKHOUSE_SEED` is set.
/// Prints how to repeat the run.
///
/// # Panics
/// When `BLOCKHOUSE_SEED` is not a number.
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

/// Asserts that two byte strings are equal, without printing them.
///
/// # Panics
/// The message has the offset of the first byte that differs.
#[track_caller]
pub fn assert_same(found: &[u8], expected: &[u8], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    // Without optimisation a comparison byte by byte takes a second for a disk of 64 MiB.
    if found != expected {
        let at = found.iter().zip(expected).position(|(one, other)| one != other);
        panic!("{what}: byte {at:?} differs");
    }
}

/// A disk with data of all lengths up to `longest`, and holes; the last sector has data.
pub fn random_disk(random: &mut Rng, size: usize, pieces: usize, longest: usize) -> Vec<u8> {
    let mut content = vec![0; size];
    for _ in 0..pieces {
        let start = random.usize(..size / 512) * 512;
        let longest = [512, 70_000, longest][random.usize(..3)];
        let length = random.usize(1..=longest).min(size - start);
        content[start..start + length].copy_from_slice(&random_bytes(random, length));
    }
    content[size - 512..].fill(7);
    content
}

/// The flat model of a new image: every byte is known to be zero.
pub fn model_of_zeros(length: usize) -> Vec<Option<u8>> {
    vec![Some(0); length]
}
