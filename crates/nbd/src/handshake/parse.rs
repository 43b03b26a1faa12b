//! Parses the data of options. Every length is checked against the bytes that remain.

use super::negotiation::MetaContext;
use crate::proto::option::InfoType;
use crate::proto::{ALLOCATION_DEPTH, BASE_ALLOCATION, DIRTY_BITMAP, MAX_STRING};

/// The data of an option violates the protocol. The text is the reason, for the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

/// A string of the protocol ("Conventions").
pub fn string(bytes: &[u8]) -> Result<&str, Malformed> {
    if bytes.len() > MAX_STRING {
        return Err(Malformed("a string is longer than 4096 bytes"));
    }
    let text = std::str::from_utf8(bytes).map_err(|_| Malformed("a string is not UTF-8"))?;
    if text.contains('\0') {
        return Err(Malformed("a string contains NUL"));
    }
    Ok(text)
}

/// The data of INFO and GO.
#[derive(Debug, PartialEq, Eq)]
pub struct ExportRequest<'a> {
    /// The requested export name.
    pub name: &'a str,
    /// The numbers of the requested information types, two bytes each.
    wanted: &'a [u8],
}

impl<'a> ExportRequest<'a> {
    /// Parses the data.
    pub fn parse(data: &'a [u8]) -> Result<Self, Malformed> {
        let mut fields = Fields(data);
        let name = fields.string()?;
        let count = usize::from(u16::from_be_bytes(*fields.chunk()?));
        let wanted = fields.take(2 * count)?;
        fields.finish()?;
        Ok(Self { name, wanted })
    }

    /// Whether the client requested this information.
    pub fn asks_for(&self, info: InfoType) -> bool {
        self.wanted.chunks_exact(2).any(|number| number == (info as u16).to_be_bytes())
    }
}

/// The data of LIST_META_CONTEXT and SET_META_CONTEXT.
#[derive(Debug, PartialEq, Eq)]
pub struct MetaQueries<'a> {
    name: &'a str,
    has_queries: bool,
    /// The queries that can match a context of this server.
    queries: Vec<Query<'a>>,
}

/// The meaning of one query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Query<'a> {
    /// `base:allocation`.
    Allocation,
    /// The bitmap of this name.
    DirtyBitmap(&'a str),
    /// `qemu:allocation-depth`.
    AllocationDepth,
    /// `base:`. In a list request it matches every context of this namespace; in a selection it
    /// matches none.
    AllOfBase,
    /// `qemu:`, as `base:`.
    AllOfQemu,
    /// `qemu:dirty-bitmap:`, as `base:`.
    AllBitmaps,
}

impl<'a> Query<'a> {
    /// `None` for a query that matches no context of this server.
    fn parse(query: &'a str) -> Option<Self> {
        match query {
            BASE_ALLOCATION => Some(Self::Allocation),
            "base:" => Some(Self::AllOfBase),
            ALLOCATION_DEPTH => Some(Self::AllocationDepth),
            "qemu:" => Some(Self::AllOfQemu),
            DIRTY_BITMAP => Some(Self::AllBitmaps),
            _ => query.strip_prefix(DIRTY_BITMAP).map(Self::DirtyBitmap),
        }
    }

    fn names(self, context: &MetaContext) -> bool {
        match (self, context) {
            (Self::Allocation, MetaContext::Allocation)
            | (Self::AllocationDepth, MetaContext::AllocationDepth) => true,
            (Self::DirtyBitmap(name), MetaContext::DirtyBitmap(own)) => name == own,
            _ => false,
        }
    }

    fn is_wildcard_for(self, context: &MetaContext) -> bool {
        match context {
            MetaContext::Allocation => self == Self::AllOfBase,
            MetaContext::DirtyBitmap(_) => matches!(self, Self::AllBitmaps | Self::AllOfQemu),
            MetaContext::AllocationDepth => self == Self::AllOfQemu,
        }
    }
}

impl<'a> MetaQueries<'a> {
    /// Parses the data.
    pub fn parse(data: &'a [u8]) -> Result<Self, Malformed> {
        let mut fields = Fields(data);
        let name = fields.string()?;
        let count = u32::from_be_bytes(*fields.chunk()?);
        let mut queries = Vec::new();
        for _ in 0..count {
            let query = fields.string()?;
            if !query.contains(':') {
                return Err(Malformed("a query has no namespace before a colon"));
            }
            queries.extend(Query::parse(query));
        }
        fields.finish()?;
        Ok(Self { name, has_queries: count > 0, queries })
    }

    /// The name of the queried export.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// Whether the list for the client contains this context.
    pub fn list(&self, context: &MetaContext) -> bool {
        let is_meant = |query: &Query<'_>| query.names(context) || query.is_wildcard_for(context);
        !self.has_queries || self.queries.iter().any(is_meant)
    }

    /// Whether this context is selected.
    pub fn select(&self, context: &MetaContext) -> bool {
        self.queries.iter().any(|query| query.names(context))
    }
}

/// The bytes that are not parsed yet.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    const SHORT: Malformed = Malformed("the data ends too early");

    fn take(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(Self::SHORT)?;
        self.0 = rest;
        Ok(taken)
    }

    fn chunk<const N: usize>(&mut self) -> Result<&'a [u8; N], Malformed> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(Self::SHORT)?;
        self.0 = rest;
        Ok(taken)
    }

    /// A string with a 32-bit length prefix.
    fn string(&mut self) -> Result<&'a str, Malformed> {
        let length = u32::from_be_bytes(*self.chunk()?);
        string(self.take(length as usize)?)
    }

    fn finish(self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed("there is data after the end")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(text: &[u8]) -> Vec<u8> {
        [&(text.len() as u32).to_be_bytes()[..], text].concat()
    }

    fn queries(texts: &[&str]) -> Vec<u8> {
        let mut data = counted(b"disk");
        data.extend((texts.len() as u32).to_be_bytes());
        for text in texts {
            data.extend(counted(text.as_bytes()));
        }
        data
    }

    /// For each of four contexts, whether it is listed, and whether it is selected.
    fn meant(texts: &[&str]) -> Result<[Vec<bool>; 2], Malformed> {
        let data = queries(texts);
        let queries = MetaQueries::parse(&data)?;
        let bitmap = |name: &str| MetaContext::DirtyBitmap(name.to_owned());
        let depth = MetaContext::AllocationDepth;
        let all = [MetaContext::Allocation, bitmap("a"), bitmap("a:b"), depth];
        let listed = all.iter().map(|context| queries.list(context)).collect();
        Ok([listed, all.iter().map(|context| queries.select(context)).collect()])
    }

    #[test]
    fn an_export_request_knows_what_it_asks_for() {
        let data = [&counted(b"disk")[..], &[0, 2, 0, 3, 0, 77]].concat();
        let request = ExportRequest::parse(&data).unwrap();
        assert_eq!(request.name, "disk");
        assert!(request.asks_for(InfoType::BlockSize) && !request.asks_for(InfoType::Name));
    }

    #[test]
    fn data_cut_or_padded_anywhere_is_malformed() {
        let info = [&counted(b"disk")[..], &[0, 2, 0, 3, 0, 77]].concat();
        let meta = queries(&["base:", "base:allocation"]);
        for end in 0..info.len() {
            assert!(ExportRequest::parse(&info[..end]).is_err(), "cut at {end}");
        }
        for end in 0..meta.len() {
            assert!(MetaQueries::parse(&meta[..end]).is_err(), "cut at {end}");
        }
        assert!(ExportRequest::parse(&[&info[..], &[0]].concat()).is_err());
        assert!(MetaQueries::parse(&[&meta[..], &[0]].concat()).is_err());
    }

    #[test]
    fn lengths_beyond_the_data_are_malformed() {
        for length in [0xffff_ffffu32, 0x8000_0000, 100] {
            let data = [&length.to_be_bytes()[..], b"disk\0\0"].concat();
            assert!(ExportRequest::parse(&data).is_err());
            assert!(MetaQueries::parse(&data).is_err());
        }
        let many = [&counted(b"disk")[..], &[0xff; 4]].concat();
        assert!(MetaQueries::parse(&many).is_err());
    }

    #[test]
    fn queries_select_by_the_letter() {
        let (yes, no) = (true, false);
        for (texts, listed, selected) in [
            (&[][..], [yes, yes, yes, yes], [no, no, no, no]),
            (&["base:"], [yes, no, no, no], [no, no, no, no]),
            (&["base:allocation", "base:"], [yes, no, no, no], [yes, no, no, no]),
            (&["base:nothing", "x-other:allocation"], [no; 4], [no; 4]),
            (&["qemu:"], [no, yes, yes, yes], [no; 4]),
            (&["qemu:dirty-bitmap:", "base:allocation"], [yes, yes, yes, no], [yes, no, no, no]),
            (&["qemu:dirty-bitmap:a:b"], [no, no, yes, no], [no, no, yes, no]),
            (
                &["qemu:dirty-bitmap:A", "qemu:allocation-depth"],
                [no, no, no, yes],
                [no, no, no, yes],
            ),
        ] {
            assert_eq!(meant(texts), Ok([listed.to_vec(), selected.to_vec()]), "{texts:?}");
        }
        assert!(meant(&["base:allocation", "nocolon"]).is_err());
    }

    #[test]
    fn strings_are_utf8_without_nul_and_not_too_long() {
        assert_eq!(string("Größe".as_bytes()), Ok("Größe"));
        assert!(string(b"a\0b").is_err());
        assert!(string(b"\xff").is_err());
        assert!(string(&vec![b'x'; MAX_STRING]).is_ok());
        assert!(string(&vec![b'x'; MAX_STRING + 1]).is_err());
    }
}
