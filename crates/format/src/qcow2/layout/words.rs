//! Big-endian words in bytes: the format stores all numbers this way.

/// The big-endian word at `offset`.
pub(crate) fn be64(bytes: &[u8], offset: usize) -> u64 {
    u64::from_be_bytes(bytes[offset..offset + 8].try_into().expect("eight bytes"))
}

/// The big-endian word of four bytes at `offset`.
pub(crate) fn be32(bytes: &[u8], offset: usize) -> u32 {
    u32::from_be_bytes(bytes[offset..offset + 4].try_into().expect("four bytes"))
}

/// Big-endian words as bytes.
pub(crate) fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

/// Bytes as big-endian words.
pub(crate) fn words_of(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|word| be64(word, 0)).collect()
}
