//! What a qcow2 header says about its image, for people who ask.
//!
//! Only for images that were opened before, which is where headers are checked. The places of the
//! fields are those of QEMU's `docs/interop/qcow2.txt`, section "Header".

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Map, Value};

const DIRTY: u64 = 1;
const CORRUPT: u64 = 1 << 1;
const HAS_COMPRESSION_TYPE: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;
const LAZY_REFCOUNTS: u64 = 1;
/// Refcounts of 16 bits, as all of version 2.
const VERSION_2_REFCOUNT_ORDER: u32 = 4;

/// What the header says.
pub struct Qcow2Facts {
    version: u32,
    incompatible: u64,
    compatible: u64,
    refcount_order: u32,
    is_zstd: bool,
}

impl Qcow2Facts {
    /// Reads them from an image.
    ///
    /// # Errors
    /// One that names the file, when it cannot be read.
    pub fn read(image: &Path) -> Result<Self> {
        let mut bytes = [0; 105];
        File::open(image)
            .and_then(|file| file.read_exact_at(&mut bytes, 0))
            .with_context(|| format!("{}: cannot read the header", image.display()))?;
        let be32 = |at: usize| bytes[at..at + 4].iter().fold(0, |sum, b| sum << 8 | u32::from(*b));
        let be64 = |at: usize| u64::from(be32(at)) << 32 | u64::from(be32(at + 4));
        let version = be32(4);
        if version == 2 {
            let refcount_order = VERSION_2_REFCOUNT_ORDER;
            let (incompatible, compatible) = (0, 0);
            return Ok(Self { version, incompatible, compatible, refcount_order, is_zstd: false });
        }
        let incompatible = be64(72);
        Ok(Self {
            version,
            incompatible,
            compatible: be64(80),
            refcount_order: be32(96),
            is_zstd: incompatible & HAS_COMPRESSION_TYPE != 0 && bytes[104] == 1,
        })
    }

    /// Whether refcounts may be wrong: the image was not closed.
    pub fn is_dirty(&self) -> bool {
        self.incompatible & DIRTY != 0
    }

    /// The `format-specific` data of `qemu-img info`, by its keys.
    pub fn data(&self) -> Map<String, Value> {
        let is_v3 = self.version >= 3;
        let mut data = Map::new();
        data.insert("compat".into(), if is_v3 { "1.1" } else { "0.10" }.into());
        let compression = if self.is_zstd { "zstd" } else { "zlib" };
        data.insert("compression-type".into(), compression.into());
        data.insert("refcount-bits".into(), (1u32 << self.refcount_order).into());
        if is_v3 {
            let lazy = self.compatible & LAZY_REFCOUNTS != 0;
            data.insert("lazy-refcounts".into(), lazy.into());
            data.insert("corrupt".into(), (self.incompatible & CORRUPT != 0).into());
            data.insert("extended-l2".into(), (self.incompatible & EXTENDED_L2 != 0).into());
        }
        data
    }
}
