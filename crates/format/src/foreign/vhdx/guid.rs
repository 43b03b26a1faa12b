//! Parts common to all structures of VHDX: their unit of 1 MiB, and GUIDs as they are stored (the
//! first three fields are little-endian).

/// The unit of regions and blocks in bytes.
pub(super) const MIB: u64 = 1 << 20;

/// A GUID as bytes.
pub(super) type Guid = [u8; 16];

/// The nil GUID, which means that there is no GUID.
pub(super) const NIL: Guid = [0; 16];

/// The bytes of a GUID that is written `{a-b-c-rest}`; `rest` is its last 16 digits.
pub(super) const fn guid(a: u32, b: u16, c: u16, rest: u64) -> Guid {
    let (a, b, c, rest) = (a.to_le_bytes(), b.to_le_bytes(), c.to_le_bytes(), rest.to_be_bytes());
    [
        a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], rest[0], rest[1], rest[2], rest[3],
        rest[4], rest[5], rest[6], rest[7],
    ]
}

/// A GUID in its usual text form.
pub(super) fn show(guid: &Guid) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let reversed = |bytes: &[u8]| hex(&bytes.iter().rev().copied().collect::<Vec<_>>());
    let fields = [reversed(&guid[..4]), reversed(&guid[4..6]), reversed(&guid[6..8])];
    format!("{}-{}-{}", fields.join("-"), hex(&guid[8..10]), hex(&guid[10..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guid_is_shown_as_it_is_written() {
        let bat = guid(0x2dc2_7766, 0xf623, 0x4200, 0x9d64_115e_9bfd_4a08);
        assert_eq!(bat[..4], [0x66, 0x77, 0xc2, 0x2d]);
        assert_eq!(show(&bat), "2dc27766-f623-4200-9d64-115e9bfd4a08");
    }
}
