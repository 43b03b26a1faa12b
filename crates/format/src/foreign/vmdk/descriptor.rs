//! The descriptor of a VMDK image: text that names the files with the disk's data.
//!
//! Source: "Virtual Disk Format 5.0" of VMware, "The Descriptor File". As in other programs,
//! keywords may be in upper or lower case, and unknown lines are ignored.

use blockhouse_core::Result;

use crate::foreign::fields::SECTOR;
use crate::foreign::refusal::{corrupt, unsupported};

/// Maximum size of a descriptor in bytes.
pub(super) const MAX_LENGTH: usize = 1 << 20;
/// Maximum number of extents of one image.
const MAX_EXTENTS: usize = 4096;
/// Maximum size of a disk in bytes: 1 EiB, far larger than any that VMware makes.
const MAX_SIZE: u64 = 1 << 60;

/// The parent CID of an image without a parent.
pub(super) const NO_PARENT: u32 = u32::MAX;
/// The first line, as VMware writes it.
const FIRST_LINE: &[u8] = b"# disk descriptorfile";
/// The UTF-8 byte order mark that some editors put before a text.
const UTF8_MARK: &[u8] = b"\xef\xbb\xbf";

/// The content of a descriptor.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Descriptor {
    /// The content ID, which changes with the content of the disk.
    pub(super) cid: u32,
    /// The `cid` of the parent; [`NO_PARENT`] without a parent.
    pub(super) parent_cid: u32,
    pub(super) create_type: Option<String>,
    /// The name of the parent's file, as bytes of the host's file system; relative to the
    /// descriptor's folder.
    pub(super) parent: Option<Vec<u8>>,
    /// The parts of the disk in their order.
    pub(super) extents: Vec<ExtentLine>,
}

/// Whether a file with these first bytes is a descriptor: its first line is the one that VMware
/// writes, or the line after comments and empty lines states the version.
pub(crate) fn is_descriptor(first: &[u8]) -> bool {
    let text = first.strip_prefix(UTF8_MARK).unwrap_or(first).to_ascii_lowercase();
    if text.starts_with(FIRST_LINE) {
        return true;
    }
    let mut lines = text.split(|&byte| byte == b'\n').map(<[u8]>::trim_ascii);
    let line = lines.find(|line| !line.is_empty() && !line.starts_with(b"#"));
    line.is_some_and(|line| line.starts_with(b"version=") || line.starts_with(b"version ="))
}

/// A part of the disk.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ExtentLine {
    /// Bytes, a multiple of 512.
    pub(super) length: u64,
    /// The keyword of its type.
    pub(super) kind: &'static str,
    pub(super) content: Content,
}

/// The location of the bytes of a part.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// In no file: they are zeros.
    Zero,
    /// In a file, from an offset on.
    Flat {
        /// The file's name, as bytes of the host's file system; relative to the descriptor's
        /// folder.
        name: Vec<u8>,
        /// In bytes.
        offset: u64,
    },
    /// In a file with tables.
    Sparse {
        /// As in `Flat`.
        name: Vec<u8>,
    },
}

impl Descriptor {
    /// Parses the text that is at `offset` of the file, up to its first zero byte.
    ///
    /// # Errors
    /// `Corrupt` or `Unsupported`, with the line's offset.
    pub(super) fn parse(text: &[u8], offset: u64) -> Result<Self> {
        let end = text.iter().position(|&byte| byte == 0).unwrap_or(text.len());
        let mut descriptor = Self {
            cid: 0,
            parent_cid: NO_PARENT,
            create_type: None,
            parent: None,
            extents: vec![],
        };
        let (mut at, mut size) = (offset, 0u64);
        for line in text[..end].split(|&byte| byte == b'\n') {
            if let Some(extent) = descriptor.parse_line(line.trim_ascii(), at)? {
                size = size.saturating_add(extent.length);
                if size > MAX_SIZE || descriptor.extents.len() == MAX_EXTENTS {
                    let what = format!("more than {MAX_EXTENTS} extents, or {MAX_SIZE} bytes");
                    return Err(corrupt(what, at));
                }
                descriptor.extents.push(extent);
            }
            at += line.len() as u64 + 1;
        }
        match (descriptor.parent_cid, &descriptor.parent) {
            (NO_PARENT, _) | (_, Some(_)) => Ok(descriptor),
            (_, None) => Err(corrupt("it has a parent, and does not name its file", offset)),
        }
    }

    /// Parses a line: returns the extent that it describes, or stores the value that the line has
    /// for another field.
    fn parse_line(&mut self, line: &[u8], at: u64) -> Result<Option<ExtentLine>> {
        if line.starts_with(b"#") {
            return Ok(None);
        }
        let identifier = || {
            let text = str::from_utf8(value(line)).ok();
            let number = text.and_then(|text| u32::from_str_radix(text, 16).ok());
            number.ok_or_else(|| corrupt("an identifier that is no number of 32 bits", at))
        };
        let word = line.split(|byte| byte.is_ascii_whitespace() || *byte == b'=').next();
        match word.unwrap_or_default().to_ascii_lowercase().as_slice() {
            b"cid" => self.cid = identifier()?,
            b"parentcid" => self.parent_cid = identifier()?,
            b"createtype" => {
                self.create_type = Some(String::from_utf8_lossy(value(line)).into_owned());
            }
            b"parentfilenamehint" => {
                self.parent = Some(value(line).to_vec()).filter(|name| !name.is_empty());
            }
            b"rw" | b"rdonly" => return parse_extent(line, at).map(Some),
            b"noaccess" => {
                return Err(unsupported("an extent that must not be accessed (NOACCESS)", at));
            }
            _ => {}
        }
        Ok(None)
    }
}

/// The value of a line `key=value` or `key = "value"`.
fn value(line: &[u8]) -> &[u8] {
    let start = line.iter().position(|&byte| byte == b'=').map_or(line.len(), |at| at + 1);
    let value = line[start..].trim_ascii();
    value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\"")).unwrap_or(value)
}

/// Parses a line `ACCESS SECTORS TYPE ["FILE" [OFFSET]]`.
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
    const KINDS: [&str; 5] = ["ZERO", "SPARSE", "VMFSSPARSE", "FLAT", "VMFS"];
    let kind = KINDS.into_iter().find(|known| *known == kind).ok_or_else(|| {
        unsupported(format!("an extent of the type {}", kind.escape_default()), at)
    })?;
    let content = match kind {
        "ZERO" => Content::Zero,
        "SPARSE" | "VMFSSPARSE" => Content::Sparse { name: file()?.0 },
        _ => {
            let (name, rest) = file()?;
            let sectors = rest.split_ascii_whitespace().next().map_or(Ok(0), str::parse::<u64>);
            let offset = sectors.ok().and_then(|sectors| sectors.checked_mul(SECTOR));
            let offset = offset.filter(|offset| offset.checked_add(length).is_some());
            Content::Flat { name, offset: offset.ok_or_else(|| wrong("an extent at no offset"))? }
        }
    };
    Ok(ExtentLine { length, kind, content })
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
            (4_192_256 * 512, "FLAT", flat("a b-f001.vmdk", 0)),
            (16 * 512, "FLAT", flat("c.vmdk", 128 * 512)),
            (8 * 512, "ZERO", Content::Zero),
            (2048 * 512, "SPARSE", Content::Sparse { name: b"d.vmdk".to_vec() }),
            (512, "VMFS", flat("e.vmdk", 0)),
        ];
        let expected = expected.map(|(length, kind, content)| ExtentLine { length, kind, content });
        assert_eq!(found, expected);
        let cut = [TEXT.as_bytes(), b"\0RW 1 ZERO\n"].concat();
        assert_eq!(Descriptor::parse(&cut, 0).unwrap().extents.len(), 5, "text ends at a zero");
    }

    #[test]
    fn what_cannot_be_read_is_refused() {
        for (line, words) in [
            ("CID=123456789", "32 bits"),
            ("parentCID = x", "32 bits"),
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

    #[test]
    fn a_parent_is_named_with_its_identifier() {
        let parse = |text: &str| Descriptor::parse(text.as_bytes(), 0);
        let found =
            parse("cid=fffffffe\nparentCID = 1234\nParentFileNameHint=\"a b.vmdk\"\n").unwrap();
        assert_eq!((found.cid, found.parent_cid), (0xffff_fffe, 0x1234));
        assert_eq!(found.parent.as_deref(), Some(&b"a b.vmdk"[..]));
        let found = parse(TEXT).unwrap();
        assert_eq!((found.cid, found.parent_cid, found.parent), (0x1234_5678, NO_PARENT, None));
        assert_eq!(found.create_type.as_deref(), Some("twoGbMaxExtentFlat"));
        assert!(parse("parentCID=1").unwrap_err().to_string().contains("does not name"));
    }

    #[test]
    fn a_descriptor_begins_with_comments_and_its_version() {
        for text in [
            TEXT,
            "# disk descriptorfile\r\n",
            "\u{feff}# Disk DescriptorFile\n",
            "#!/usr/bin/vmware\n\n  \r\n# anything\nversion=3\r\n",
            "version=1\n",
        ] {
            assert!(is_descriptor(text.as_bytes()), "{text}");
        }
        for text in ["", "# a script\necho\n", "conversion=1\n", "version\n"] {
            assert!(!is_descriptor(text.as_bytes()), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(text in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = Descriptor::parse(&text, 0);
            let _ = Descriptor::parse(&[b"RW 8 FLAT \"", &*text].concat(), 0);
        }
    }
}
