//! The descriptor of a VMDK image: text that names the files with the disk's data.
//!
//! Source: "Virtual Disk Format 5.0" of VMware, "The Descriptor File". Keywords are read in any case, lines that are not
//! known are passed over, as other programs do.

use blockhouse_core::Result;

use crate::foreign::fields::SECTOR;
use crate::foreign::refusal::{corrupt, has_parent, unsupported};

/// Bytes of the longest descriptor: 1 MiB.
pub(super) const MAX_LENGTH: usize = 1 << 20;
/// Files of one image.
const MAX_EXTENTS: usize = 4096;
/// Bytes of the largest disk: 1 EiB, far beyond what VMware makes.
const MAX_SIZE: u64 = 1 << 60;

/// The identifier of no parent.
const NO_PARENT: &str = "ffffffff";

/// What a descriptor says.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Descriptor {
    /// The parts of the disk in their order.
    pub(super) extents: Vec<ExtentLine>,
}

/// A part of the disk.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ExtentLine {
    /// Bytes, a multiple of 512.
    pub(super) length: u64,
    pub(super) content: Content,
}

/// Where the bytes of a part are.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// Nowhere: they are zeros.
    Zero,
    /// In a file, from an offset on.
    Flat {
        /// The file's name, as bytes of the host's file system; relative to the descriptor's folder.
        name: Vec<u8>,
        /// In bytes.
        offset: u64,
    },
    /// In a file with tables.
    Sparse {
        /// As above.
        name: Vec<u8>,
    },
}

impl Descriptor {
    /// Of the text that is at `offset` of the file, up to its first zero byte.
    ///
    /// # Errors
    /// `Corrupt` or `Unsupported`, with the line's offset.
    pub(super) fn parse(text: &[u8], offset: u64) -> Result<Self> {
        let end = text.iter().position(|&byte| byte == 0).unwrap_or(text.len());
        let mut descriptor = Self::default();
        let (mut at, mut size) = (offset, 0u64);
        for line in text[..end].split(|&byte| byte == b'\n') {
            if let Some(extent) = parse_line(line.trim_ascii(), at)? {
                size = size.saturating_add(extent.length);
                if size > MAX_SIZE || descriptor.extents.len() == MAX_EXTENTS {
                    let what = format!("more than {MAX_EXTENTS} extents, or {MAX_SIZE} bytes");
                    return Err(corrupt(what, at));
                }
                descriptor.extents.push(extent);
            }
            at += line.len() as u64 + 1;
        }
        Ok(descriptor)
    }
}

/// The extent of a line, if it is one; refuses an image with a parent.
fn parse_line(line: &[u8], at: u64) -> Result<Option<ExtentLine>> {
    if line.starts_with(b"#") {
        return Ok(None);
    }
    let word = line.split(|byte| byte.is_ascii_whitespace() || *byte == b'=').next();
    match word.unwrap_or_default().to_ascii_lowercase().as_slice() {
        b"parentcid" if !value(line).eq_ignore_ascii_case(NO_PARENT.as_bytes()) => {
            Err(has_parent(at))
        }
        b"parentfilenamehint" => Err(has_parent(at)),
        b"rw" | b"rdonly" => parse_extent(line, at).map(Some),
        b"noaccess" => Err(unsupported("an extent that must not be accessed (NOACCESS)", at)),
        _ => Ok(None),
    }
}

/// The value of a line `key=value` or `key = "value"`.
fn value(line: &[u8]) -> &[u8] {
    let start = line.iter().position(|&byte| byte == b'=').map_or(line.len(), |at| at + 1);
    let value = line[start..].trim_ascii();
    value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\"")).unwrap_or(value)
}

/// A line `ACCESS SECTORS TYPE ["FILE" [OFFSET]]`.
fn parse_extent(line: &[u8], at: u64) -> Result<ExtentLine> {
    let wrong = |what: &'static str| corrupt(what, at);
    let (head, rest) = match line.iter().position(|&byte| byte == b'"') {
        Some(quote) => (&line[..quote], Some(&line[quote + 1..])),
        None => (line, None),
    };
    let head = String::from_utf8_lossy(head);
    let mut words = head.split_ascii_whitespace().skip(1);
    let sectors = words.next().and_then(|word| word.parse::<u64>().ok());
    let length = sectors.and_then(|sectors| sectors.checked_mul(SECTOR)).filter(|&bytes| bytes > 0);
    let length = length.ok_or_else(|| wrong("an extent without a length"))?;
    let kind = words.next().unwrap_or_default().to_ascii_uppercase();
    let file = || {
        let rest = rest.ok_or_else(|| wrong("an extent without a file"))?;
        let end = rest.iter().position(|&byte| byte == b'"');
        let end = end.filter(|&end| end > 0).ok_or_else(|| wrong("an extent without a file"))?;
        let offset = String::from_utf8_lossy(&rest[end + 1..]).into_owned();
        Ok::<_, blockhouse_core::Error>((rest[..end].to_vec(), offset))
    };
    let content = match kind.as_str() {
        "ZERO" => Content::Zero,
        "SPARSE" => Content::Sparse { name: file()?.0 },
        "FLAT" | "VMFS" => {
            let (name, rest) = file()?;
            let sectors = rest.split_ascii_whitespace().next().map_or(Ok(0), str::parse::<u64>);
            let offset = sectors.ok().and_then(|sectors| sectors.checked_mul(SECTOR));
            let offset = offset.filter(|offset| offset.checked_add(length).is_some());
            Content::Flat { name, offset: offset.ok_or_else(|| wrong("an extent at no offset"))? }
        }
        other => {
            let what = format!("an extent of the type {}", other.escape_default());
            return Err(unsupported(what, at));
        }
    };
    Ok(ExtentLine { length, content })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TEXT: &str = "# Disk DescriptorFile\nversion=1\nCID=12345678\nparentCID=ffffffff\n\
        createType=\"twoGbMaxExtentFlat\"\n\n# Extent description\r\nRW 4192256 FLAT \"a b-f001.vmdk\" 0\r\n\
        RW 16 flat \"c.vmdk\" 128\nRDONLY 8 ZERO\nRW 2048 SPARSE \"d.vmdk\"\nRW 1 VMFS \"e.vmdk\"\n\
        ddb.adapterType = \"ide\"\n";

    #[test]
    fn extents_are_read_in_their_order() {
        let found = Descriptor::parse(TEXT.as_bytes(), 512).unwrap().extents;
        let flat = |name: &str, offset| Content::Flat { name: name.into(), offset };
        let expected = [
            (4_192_256 * 512, flat("a b-f001.vmdk", 0)),
            (16 * 512, flat("c.vmdk", 128 * 512)),
            (8 * 512, Content::Zero),
            (2048 * 512, Content::Sparse { name: b"d.vmdk".to_vec() }),
            (512, flat("e.vmdk", 0)),
        ];
        let expected = expected.map(|(length, content)| ExtentLine { length, content });
        assert_eq!(found, expected);
        let cut = [TEXT.as_bytes(), b"\0RW 1 ZERO\n"].concat();
        assert_eq!(Descriptor::parse(&cut, 0).unwrap().extents.len(), 5, "text ends at a zero");
    }

    #[test]
    fn what_cannot_be_read_is_refused() {
        for (line, words) in [
            ("parentCID=00000001", "parent image"),
            ("parentCID = 1234", "parent image"),
            ("parentFileNameHint=\"base.vmdk\"", "parent image"),
            ("NOACCESS 8 ZERO", "NOACCESS"),
            ("RW FLAT \"a\" 0", "without a length"),
            ("RW 0 ZERO", "without a length"),
            ("RW 36028797018963968 ZERO", "without a length"),
            ("RW 9007199254740992 ZERO", "bytes"),
            ("RW 8 FLAT", "without a file"),
            ("RW 8 FLAT \"", "without a file"),
            ("RW 8 FLAT \"\" 0", "without a file"),
            ("RW 8 FLAT \"a\" x", "at no offset"),
            ("RW 8 FLAT \"a\" 36028797018963967", "at no offset"),
            ("RW 8 VMFSSPARSE \"a\"", "VMFSSPARSE"),
            ("RW 8 SESPARSE \"a\"", "SESPARSE"),
            ("RW 8 \u{1b}[31m \"a\"", "\\u{1b}"),
            ("RW", "without a length"),
        ] {
            let text = format!("# Disk DescriptorFile\n{line}\n");
            let error = Descriptor::parse(text.as_bytes(), 512).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains("offset 534"), "{line}: {error}");
        }
        let many = "RW 1 ZERO\n".repeat(MAX_EXTENTS + 1);
        assert!(Descriptor::parse(many.as_bytes(), 0).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(text in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = Descriptor::parse(&text, 0);
            let _ = Descriptor::parse(&[b"RW 8 FLAT \"", &*text].concat(), 0);
        }
    }
}
