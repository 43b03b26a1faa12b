//! Decompression of deflate streams (RFC 1951), bare or as zlib streams (RFC 1950).

use flate2::{Decompress, FlushDecompress, Status};

/// The format around the deflate stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wrapper {
    /// None: a bare deflate stream.
    None,
    /// zlib: a header, and a checksum at the end.
    Zlib,
}

/// Decompresses `stream` until `into` is full; the rest of the stream is ignored. Accepts every
/// window size, and always takes the memory of the largest window.
///
/// # Errors
/// The reason why the bytes are not such a stream, or that they do not fill `into`.
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
