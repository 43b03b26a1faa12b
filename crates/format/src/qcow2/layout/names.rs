//! Names of snapshots and bitmaps, as people read and write them.
//!
//! In an image, names are bytes. Guarantee: [`index_of`] finds a name by the text that [`listed`]
//! returns for it, unless another name has the same text.

/// A name for people: bytes that are not UTF-8 become U+FFFD.
pub(crate) fn listed(name: &[u8]) -> String {
    String::from_utf8_lossy(name).into_owned()
}

/// The index of the name `meant`: the first name with the same bytes, else the only name for which
/// [`listed`] returns `meant`.
pub(crate) fn index_of<'a>(
    names: impl Iterator<Item = &'a [u8]> + Clone,
    meant: &str,
) -> Option<usize> {
    names.clone().position(|name| name == meant.as_bytes()).or_else(|| {
        let mut alike = names.enumerate().filter(|(_, name)| listed(name) == meant);
        let (index, _) = alike.next()?;
        alike.next().is_none().then_some(index)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_found_as_it_is_listed_where_that_is_one_name() {
        let names: [&[u8]; 5] = [b"one", b"t\xffwo", b"\xfe", b"\xff", "t\u{fffd}hree".as_bytes()];
        let index = |meant: &str| index_of(names.into_iter(), meant);
        assert_eq!(index("one"), Some(0));
        assert_eq!(index(&listed(b"t\xffwo")), Some(1));
        assert_eq!(index("t\u{fffd}hree"), Some(4));
        assert_eq!(index("\u{fffd}"), None, "two are listed so");
        assert_eq!(index("four"), None);
    }

    #[test]
    fn a_name_with_these_bytes_goes_before_one_that_is_listed_so() {
        let names: [&[u8]; 2] = [b"\xff", "\u{fffd}".as_bytes()];
        assert_eq!(index_of(names.into_iter(), "\u{fffd}"), Some(1));
    }
}
