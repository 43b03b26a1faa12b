//! A compressed grain: a marker with its length, and a zlib stream ("Virtual Disk Format 5.0",
//! "Compressed Grains").

use crate::foreign::fields::le32;
use crate::inflate::{Wrapper, inflate};

/// Bytes of the marker: the grain's first sector of the disk, and the length of the stream.
pub(super) const MARKER: usize = 12;

/// The maximum number of bytes that a compressed grain of `grain_size` bytes takes with its marker:
/// for incompressible data, a zlib stream is longer than its input by a few bytes for each deflate
/// block.
pub(super) fn max_length(grain_size: u64) -> u64 {
    MARKER as u64 + grain_size + grain_size / 8 + 512
}

/// The bytes of the grain that begins with `marker`, marker included.
pub(super) fn length(marker: &[u8]) -> u64 {
    MARKER as u64 + u64::from(le32(marker, 8))
}

/// Decompresses the grain at the start of `bytes`, and stores its first bytes in `into`.
///
/// # Errors
/// The reason why `bytes` is not a sound grain.
pub(in crate::foreign) fn decompress(bytes: &[u8], into: &mut [u8]) -> Result<(), String> {
    let Some((marker, rest)) = bytes.split_at_checked(MARKER) else {
        return Err("it has no marker".to_owned());
    };
    let length = le32(marker, 8) as usize;
    let Some(stream) = rest.get(..length).filter(|stream| !stream.is_empty()) else {
        return Err(format!("its marker states {length} bytes, and there are {}", rest.len()));
    };
    inflate(stream, into, Wrapper::Zlib)
}

#[cfg(test)]
mod tests {
    use flate2::{Compress, Compression, FlushCompress};

    use super::*;

    /// A compressed grain with this content, padded to sectors.
    fn grain(content: &[u8]) -> Vec<u8> {
        let mut stream = vec![0; content.len() + 1000];
        let mut encoder = Compress::new(Compression::new(6), true);
        encoder.compress(content, &mut stream, FlushCompress::Finish).unwrap();
        let length = encoder.total_out() as usize;
        let mut bytes = vec![0; 8];
        bytes.extend((length as u32).to_le_bytes());
        bytes.extend(&stream[..length]);
        bytes.resize(bytes.len().next_multiple_of(512), 0xa5);
        bytes
    }

    #[test]
    fn a_grain_comes_back_as_it_was_packed() {
        let content: Vec<u8> = (0..65_536u32).map(|at| (at / 7 % 251) as u8).collect();
        let bytes = grain(&content);
        let mut unpacked = vec![0; content.len()];
        decompress(&bytes, &mut unpacked).unwrap();
        assert!(unpacked == content);
        // The last grain of a disk whose size is not a multiple of the grain size.
        let mut first = vec![0; 5000];
        decompress(&bytes, &mut first).unwrap();
        assert!(first == content[..5000]);
    }

    #[test]
    fn damaged_grains_are_errors() {
        let bytes = grain(&[7; 65_536]);
        let mut into = vec![0; 65_536];
        assert!(decompress(&bytes[..11], &mut into).is_err(), "no marker");
        assert!(decompress(&bytes[..14], &mut into).unwrap_err().contains("states"));
        assert!(decompress(&[0; 512], &mut into).is_err(), "an empty stream");
        let mut damaged = bytes.clone();
        damaged[12] ^= 0xff;
        assert!(decompress(&damaged, &mut into).is_err());
        assert!(decompress(&bytes, &mut vec![0; 65_537]).unwrap_err().contains("65536 bytes"));
    }

    #[test]
    fn noise_fits_into_what_is_read() {
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        };
        for size in [4096, 65_536] {
            let noise: Vec<u8> = (0..size).map(|_| random()).collect();
            assert!(grain(&noise).len() as u64 <= max_length(size as u64));
        }
    }
}
