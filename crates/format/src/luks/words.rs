//! Access to numbers and texts in the bytes of a header. The caller has read the whole header, so
//! no offset lies past its end.

pub(super) fn be16(bytes: &[u8], offset: usize) -> u16 {
    u16::from_be_bytes(array(bytes, offset))
}

pub(super) fn be32(bytes: &[u8], offset: usize) -> u32 {
    u32::from_be_bytes(array(bytes, offset))
}

pub(super) fn be64(bytes: &[u8], offset: usize) -> u64 {
    u64::from_be_bytes(array(bytes, offset))
}

fn array<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
    bytes[offset..offset + N].try_into().expect("N bytes")
}

/// The text in a field of `length` bytes, up to the first zero byte.
pub(super) fn text(bytes: &[u8], offset: usize, length: usize) -> String {
    let field = &bytes[offset..offset + length];
    let end = field.iter().position(|&byte| byte == 0).unwrap_or(length);
    String::from_utf8_lossy(&field[..end]).into_owned()
}
