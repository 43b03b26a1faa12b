//! The payload of a BLOCK_STATUS with `NBD_CMD_FLAG_PAYLOAD_LEN`: the number of bytes to describe,
//! and the ids of the selected contexts, which were negotiated.
//!
//! Guarantee: any bytes are either parsed or refused, and the memory used is bounded by the number
//! of negotiated contexts. Each context is described at most once.

use blockhouse_core::ByteRange;

use crate::command::{RequestError, check_status_payload, invalid};
use crate::handshake::MetaContext;

/// A status request for some of the negotiated contexts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelectedStatus<'a> {
    /// The bytes of the export; not empty.
    pub range: ByteRange,
    /// The contexts, at least one, in the order in which they were negotiated.
    pub contexts: Vec<&'a (u32, MetaContext)>,
}

impl<'a> SelectedStatus<'a> {
    /// Parses the payload of a request at `offset`; it may select `negotiated` contexts.
    ///
    /// # Errors
    /// The payload is too short or too long, the range is empty or ends beyond 64 bits, or a
    /// context was not negotiated or is selected twice.
    pub fn parse(
        payload: &[u8],
        offset: u64,
        negotiated: &'a [(u32, MetaContext)],
    ) -> Result<Self, RequestError> {
        check_status_payload(payload.len() as u64, negotiated.len())?;
        let (length, ids) = payload.split_at(8);
        let ids: Vec<&[u8]> = ids.chunks_exact(4).collect();
        let is_selected = |id: u32| ids.contains(&&id.to_be_bytes()[..]);
        let contexts: Vec<_> = negotiated.iter().filter(|(id, _)| is_selected(*id)).collect();
        if contexts.len() != ids.len() {
            return Err(invalid("a context was not negotiated, or is selected twice"));
        }
        let length = length.iter().fold(0, |number, &byte| number << 8 | u64::from(byte));
        match ByteRange::new(offset, length) {
            Some(range) if !range.is_empty() => Ok(Self { range, contexts }),
            Some(_) => Err(invalid("there is no status of no bytes")),
            None => Err(invalid("the range ends beyond 64 bits")),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn negotiated() -> Vec<(u32, MetaContext)> {
        let bitmap = MetaContext::DirtyBitmap("b".into());
        vec![(1, MetaContext::Allocation), (2, bitmap), (7, MetaContext::AllocationDepth)]
    }

    fn payload(length: u64, ids: &[u32]) -> Vec<u8> {
        let ids = ids.iter().flat_map(|id| id.to_be_bytes());
        length.to_be_bytes().into_iter().chain(ids).collect()
    }

    #[test]
    fn contexts_are_told_of_in_the_order_in_which_they_were_negotiated() {
        let negotiated = negotiated();
        let bytes = payload(4096, &[7, 1]);
        let selected = SelectedStatus::parse(&bytes, 512, &negotiated).unwrap();
        assert_eq!(selected.range, ByteRange::between(512, 512 + 4096));
        assert_eq!(selected.contexts, [&negotiated[0], &negotiated[2]]);
    }

    #[test]
    fn what_selects_nothing_that_was_negotiated_once_is_refused() {
        let negotiated = negotiated();
        let is_refused =
            |bytes: &[u8], offset| SelectedStatus::parse(bytes, offset, &negotiated).is_err();
        assert!(is_refused(&[], 0));
        assert!(is_refused(&payload(4096, &[]), 0));
        assert!(is_refused(&payload(4096, &[3]), 0));
        assert!(is_refused(&payload(4096, &[1, 1]), 0));
        assert!(is_refused(&payload(4096, &[1, 2, 7, 1]), 0));
        assert!(is_refused(&payload(0, &[1]), 0));
        assert!(is_refused(&payload(2, &[1]), u64::MAX - 1));
        assert!(is_refused(&payload(4096, &[1])[..11], 0));
        assert!(!is_refused(&payload(4096, &[1, 2, 7]), 0));
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_select_what_was_negotiated(
            bytes in prop::collection::vec(any::<u8>(), 0..40),
            offset in any::<u64>(),
        ) {
            let negotiated = negotiated();
            if let Ok(selected) = SelectedStatus::parse(&bytes, offset, &negotiated) {
                prop_assert_eq!(selected.contexts.len(), (bytes.len() - 8) / 4);
                prop_assert!(!selected.range.is_empty());
            }
        }
    }
}
