//! The properties of a qcow2 image under QEMU's names.

use blockhouse_disk::{Compression, Features, Switch, Version};
use serde_json::{Map, Value};

/// The `format-specific` data of `qemu-img info`, by its keys.
pub fn qcow2_data(features: &Features) -> Map<String, Value> {
    let is_v3 = features.version != Version::V2;
    let mut data = Map::new();
    data.insert("compat".into(), if is_v3 { "1.1" } else { "0.10" }.into());
    let compression = match features.compression {
        Compression::Zlib => "zlib",
        Compression::Zstd => "zstd",
    };
    data.insert("compression-type".into(), compression.into());
    data.insert("refcount-bits".into(), features.refcount_bits.into());
    if is_v3 {
        data.insert("lazy-refcounts".into(), (features.lazy_refcounts == Switch::On).into());
        data.insert("corrupt".into(), features.is_corrupt.into());
        data.insert("extended-l2".into(), (features.extended_l2 == Switch::On).into());
    }
    data
}
