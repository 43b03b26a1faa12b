//! Unpacking deflate streams (RFC 1951), bare or as zlib streams (RFC 1950).

use flate2::{Decompress, FlushDecompress, Status};

/// The wrapping of a stream's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wrapper {
    /// Nothing.
    None,
    /// The header of zlib, and its checksum.
    Zlib,
}

/// Unpacks `stream` until `into` is full; what follows is not looked at. Reads what any window
/// wrote, with the memory of the largest.
///
/// # Errors
/// The mistake in the bytes: they are no such stream, or do not fill `into`.
pub(crate) fn inflate(stream: &[u8], into: &mut [u8], wrapper: Wrapper) -> Result<(), String> {
    let mut decoder = Decompress::new(wrapper == Wrapper::Zlib);
    let (mut read, mut written) = (0, 0);
    while written < into.len() {
        let status = decoder
            .decompress(&stream[read..], &mut into[written..], FlushDecompress::None)
            .map_err(|error| error.to_string())?;
        let (total_in, total_out) = (decoder.total_in() as usize, decoder.total_out() as usize);
        let progress = (total_in, total_out) != (read, written);
        (read, written) = (total_in, total_out);
        if written < into.len() && (status == Status::StreamEnd || !progress) {
            return Err(format!("{written} bytes instead of {}", into.len()));
        }
    }
    Ok(())
}
