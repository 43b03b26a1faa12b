//! The layouts of qcow2 images that tests and labs share: every option of `qemu-img create` that
//! changes what is on disk, without a backing file, over a raw file, or over a chain.
#![forbid(unsafe_code)]

/// The backing file of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// None.
    Nothing,
    /// A raw file.
    Raw,
    /// A qcow2 image over a raw file.
    Chain,
}

/// How an image is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Options of `qemu-img create` and `blockhouse create`. PATH stands for the folder of the
    /// image.
    pub options: &'static str,
    /// The backing file.
    pub backing: Backing,
    /// Whether the image gets compressed clusters first.
    pub compressed: bool,
}

impl Layout {
    /// Bytes of a cluster.
    pub fn cluster_size(&self) -> u64 {
        self.option("cluster_size").map_or(64 << 10, |text| match text.strip_suffix('K') {
            Some(number) => number.parse::<u64>().expect("a number of KiB") << 10,
            None => match text.strip_suffix('M') {
                Some(number) => number.parse::<u64>().expect("a number of MiB") << 20,
                None => text.parse().expect("a number of bytes"),
            },
        })
    }

    /// The version of its header.
    pub fn version(&self) -> u32 {
        if self.option("compat") == Some("0.10") { 2 } else { 3 }
    }

    /// Whether `option` is "on".
    pub fn has(&self, option: &str) -> bool {
        self.option(option) == Some("on")
    }

    /// The value of an option, if it is given.
    pub fn option(&self, name: &str) -> Option<&'static str> {
        let options = self.options.split(',').filter_map(|option| option.split_once('='));
        options.filter(|(key, _)| *key == name).map(|(_, value)| value).next()
    }
}

const fn plain(options: &'static str, backing: Backing) -> Layout {
    Layout { options, backing, compressed: false }
}

const fn compressed(options: &'static str, backing: Backing) -> Layout {
    Layout { options, backing, compressed: true }
}

use Backing::{Chain, Nothing, Raw};

/// All layouts that must work with QEMU's tools in both directions.
pub const LAYOUTS: &[Layout] = &[
    plain("compat=0.10", Nothing),
    compressed("compat=0.10,cluster_size=4K", Raw),
    plain("compat=0.10,cluster_size=2M", Chain),
    compressed("cluster_size=512", Nothing),
    plain("cluster_size=1K", Raw),
    plain("cluster_size=2K", Nothing),
    compressed("cluster_size=4K", Chain),
    compressed("cluster_size=8K", Raw),
    plain("cluster_size=16K", Nothing),
    plain("cluster_size=32K", Raw),
    compressed("cluster_size=64K", Chain),
    compressed("cluster_size=128K", Nothing),
    plain("cluster_size=256K", Raw),
    plain("cluster_size=512K", Chain),
    plain("cluster_size=1M", Nothing),
    compressed("cluster_size=2M", Raw),
    compressed("refcount_bits=1,cluster_size=4K", Raw),
    compressed("refcount_bits=2,cluster_size=512", Nothing),
    compressed("refcount_bits=4", Chain),
    plain("refcount_bits=8,cluster_size=1K", Nothing),
    plain("refcount_bits=16", Raw),
    compressed("refcount_bits=32,cluster_size=2K", Nothing),
    plain("refcount_bits=64,cluster_size=512", Raw),
    compressed("lazy_refcounts=on", Nothing),
    plain("lazy_refcounts=on,cluster_size=512", Chain),
    compressed("extended_l2=on", Nothing),
    plain("extended_l2=on,cluster_size=16K,refcount_bits=1", Raw),
    plain("extended_l2=on,cluster_size=2M,lazy_refcounts=on", Chain),
    compressed("compression_type=zstd", Raw),
    compressed("compression_type=zstd,cluster_size=4K,extended_l2=off", Nothing),
    compressed("compression_type=zstd,extended_l2=on,refcount_bits=64", Chain),
    plain("preallocation=metadata", Nothing),
    plain("preallocation=metadata,cluster_size=512", Nothing),
    plain("preallocation=falloc,cluster_size=4K", Nothing),
    plain("preallocation=falloc,extended_l2=on", Nothing),
    plain("preallocation=full,compat=0.10", Nothing),
    plain("preallocation=full,lazy_refcounts=on", Nothing),
    plain("data_file=PATH/disk.data", Chain),
    plain("data_file=PATH/disk.data,cluster_size=512,lazy_refcounts=on", Raw),
    plain("data_file=PATH/disk.data,extended_l2=on", Raw),
    plain("data_file=PATH/disk.data,data_file_raw=on", Nothing),
    plain("data_file=PATH/disk.data,data_file_raw=on,preallocation=full", Nothing),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_understood() {
        let layout = plain("extended_l2=on,cluster_size=16K,refcount_bits=1", Raw);
        assert_eq!((layout.cluster_size(), layout.version()), (16 << 10, 3));
        assert!(layout.has("extended_l2") && !layout.has("lazy_refcounts"));
        assert_eq!(LAYOUTS[0].version(), 2);
        let sizes = LAYOUTS.iter().map(Layout::cluster_size);
        assert!(sizes.clone().max() == Some(2 << 20) && sizes.min() == Some(512));
    }
}
