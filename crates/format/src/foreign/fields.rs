//! Access to numbers in the bytes of a header. The caller has read the whole header, so no offset
//! lies past its end.

/// Bytes of a sector, the unit of disk sizes and of most offsets.
pub(super) const SECTOR: u64 = 512;

/// The little-endian number of two bytes at `offset`.
pub(super) fn le16(bytes: &[u8], offset: usize) -> u16 {
    u16::from_le_bytes(array(bytes, offset))
}

/// The little-endian number of four bytes at `offset`.
pub(super) fn le32(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(array(bytes, offset))
}

/// The little-endian number of eight bytes at `offset`.
pub(super) fn le64(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(array(bytes, offset))
}

/// The big-endian number of four bytes at `offset`.
pub(super) fn be32(bytes: &[u8], offset: usize) -> u32 {
    u32::from_be_bytes(array(bytes, offset))
}

/// The big-endian number of eight bytes at `offset`.
pub(super) fn be64(bytes: &[u8], offset: usize) -> u64 {
    u64::from_be_bytes(array(bytes, offset))
}

/// The `N` bytes at `offset`.
pub(super) fn array<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
    bytes[offset..offset + N].try_into().expect("N bytes")
}

/// Stores a number's bytes at `offset`.
pub(super) fn put<const N: usize>(bytes: &mut [u8], offset: usize, value: [u8; N]) {
    bytes[offset..offset + N].copy_from_slice(&value);
}

/// Pads the bytes with zeros to a multiple of `unit`.
pub(super) fn padded(mut bytes: Vec<u8>, unit: u64) -> Vec<u8> {
    let length = bytes.len().next_multiple_of(unit as usize);
    bytes.resize(length, 0);
    bytes
}

/// Little-endian numbers one after the other.
pub(super) fn le32_bytes(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().copied().flat_map(u32::to_le_bytes).collect()
}
