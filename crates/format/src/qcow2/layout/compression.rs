//! Compressed clusters: the two kinds of compression.

use std::io::Read;

use flate2::{Compress, FlushCompress, Status};
use schemars::JsonSchema;
use serde::Deserialize;

use crate::inflate::{Wrapper, inflate};

/// How clusters are compressed.
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Compression {
    /// Raw deflate with a window of 4 KiB, because other programs read with such a window.
    #[default]
    Zlib = 0,
    /// One zstd frame.
    Zstd = 1,
}

/// The deflate window that QEMU uses to read clusters: 4 KiB.
const WINDOW_BITS: u8 = 12;
/// The compression levels that QEMU uses.
const ZLIB_LEVEL: u32 = 6;
const ZSTD_LEVEL: i32 = 3;

/// Decompresses `bytes` until `into` is full; the rest of `bytes` is padding and is ignored. `Err`
/// describes the fault of the bytes; it is also a fault if they do not fill `into`. Takes no more
/// memory than the two slices and the decoder's window.
pub fn decompress(kind: Compression, bytes: &[u8], into: &mut [u8]) -> Result<(), String> {
    match kind {
        Compression::Zlib => inflate(bytes, into, Wrapper::None),
        Compression::Zstd => unpack_zstd(bytes, into),
    }
}

/// Compresses a cluster; `None` if the result is not shorter.
pub fn compress(kind: Compression, cluster: &[u8]) -> Option<Vec<u8>> {
    let packed = match kind {
        Compression::Zlib => deflate(cluster)?,
        Compression::Zstd => zstd::bulk::compress(cluster, ZSTD_LEVEL).ok()?,
    };
    (packed.len() < cluster.len()).then_some(packed)
}

fn unpack_zstd(bytes: &[u8], into: &mut [u8]) -> Result<(), String> {
    let mut decoder = zstd::stream::read::Decoder::with_buffer(bytes)
        .map_err(|error| error.to_string())?
        .single_frame();
    // Clusters have at most 2 MiB, so a valid frame does not need a larger window.
    decoder.window_log_max(WINDOW_LOG_MAX).map_err(|error| error.to_string())?;
    decoder.read_exact(into).map_err(|error| error.to_string())
}

/// 8 MiB, the window size that the zstd format recommends every decoder to support.
const WINDOW_LOG_MAX: u32 = 23;

fn deflate(cluster: &[u8]) -> Option<Vec<u8>> {
    let level = flate2::Compression::new(ZLIB_LEVEL);
    let mut encoder = Compress::new_with_window_bits(level, false, WINDOW_BITS);
    let mut packed = vec![0; cluster.len()];
    let status = encoder.compress(cluster, &mut packed, FlushCompress::Finish).ok()?;
    packed.truncate(encoder.total_out() as usize);
    (status == Status::StreamEnd).then_some(packed)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [Compression; 2] = [Compression::Zlib, Compression::Zstd];

    fn text() -> Vec<u8> {
        (0..65_536u32).map(|i| (i / 7 % 251) as u8 ^ (i / 4096) as u8).collect()
    }

    #[test]
    fn a_cluster_comes_back_as_it_was_packed() {
        for kind in KINDS {
            let mut packed = compress(kind, &text()).expect("it is compressible");
            packed.resize(packed.len() + 300, 0xa5);
            let mut unpacked = vec![0; 65_536];
            decompress(kind, &packed, &mut unpacked).unwrap();
            assert!(unpacked == text(), "{kind:?}");
        }
    }

    #[test]
    fn noise_is_not_packed() {
        let mut state = 1u64;
        let noise: Vec<u8> = (0..4096)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        for kind in KINDS {
            assert_eq!(compress(kind, &noise), None, "{kind:?}");
        }
    }

    #[test]
    fn damaged_or_short_data_is_an_error() {
        for kind in KINDS {
            let packed = compress(kind, &text()).unwrap();
            let mut unpacked = vec![0; 65_536];
            assert!(decompress(kind, &packed[..packed.len() / 2], &mut unpacked).is_err());
            assert!(decompress(kind, &[0xff; 100], &mut unpacked).is_err());
            assert!(decompress(kind, &[], &mut unpacked).is_err());
            assert!(decompress(kind, &packed, &mut vec![0; 65_537]).is_err(), "too few bytes");
        }
    }
}
