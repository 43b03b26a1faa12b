//! What varies from run to run: the image's layout, the cache mode and the engine, and their names.

use std::fmt;

use anyhow::{Result, bail, ensure};
use lab_images::{Backing, LAYOUTS, Layout};

/// The image of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Image {
    /// A raw file.
    Raw,
    /// A qcow2 image.
    Qcow2 {
        /// How it is made.
        layout: Layout,
        /// Whether a snapshot shares its first clusters.
        has_snapshot: bool,
    },
}

/// Layouts that are also tried with an internal snapshot. Images with an external data file cannot
/// have snapshots.
const WITH_SNAPSHOT: &[&str] = &[
    "compat=0.10",
    "cluster_size=512",
    "cluster_size=64K",
    "refcount_bits=32,cluster_size=2K",
    "lazy_refcounts=on",
    "extended_l2=on",
];

/// The cache modes, as the command line calls them.
pub const CACHES: &[&str] = &["none", "writeback", "directsync", "writethrough", "unsafe"];

/// The engines, as the command line calls them.
pub const ENGINES: &[&str] = &["io_uring", "linux-aio", "threads"];

impl Image {
    /// All images.
    pub fn all() -> Vec<Self> {
        let qcow2 = |has_snapshot| move |&layout| Self::Qcow2 { layout, has_snapshot };
        let with_snapshot = |layout: &&Layout| WITH_SNAPSHOT.contains(&layout.options);
        [Self::Raw]
            .into_iter()
            .chain(LAYOUTS.iter().map(qcow2(false)))
            .chain(LAYOUTS.iter().filter(with_snapshot).map(qcow2(true)))
            .collect()
    }

    /// The layout, if it is a qcow2 image.
    pub fn layout(&self) -> Option<Layout> {
        match self {
            Self::Raw => None,
            Self::Qcow2 { layout, .. } => Some(*layout),
        }
    }

    /// The name of its format on command lines.
    pub fn format(&self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 { .. } => "qcow2",
        }
    }

    /// Bytes of a cluster; of a raw file, bytes of a usual file system block.
    pub fn cluster_size(&self) -> u64 {
        self.layout().map_or(4096, |layout| layout.cluster_size())
    }

    /// Bytes of the disk: some clusters and a part of one.
    pub fn size(&self) -> u64 {
        (32 * self.cluster_size()).clamp(2 << 20, 16 << 20) + 7 * 512
    }

    /// A discard zeroes the aligned blocks of this many bytes that it covers; `None` if no discard
    /// is sure to zero anything. That is so for a raw file, and for an image over a backing file
    /// that has version 2, which has no zero clusters, or an external data file, where only
    /// allocated clusters are discarded.
    pub fn discard_unit(&self) -> Option<u64> {
        let layout = self.layout()?;
        let zeroes = layout.version() >= 3 && layout.option("data_file").is_none();
        (zeroes || layout.backing == Backing::Nothing).then(|| layout.cluster_size())
    }

    /// Whether refcounts on disk may be too low until the image is closed.
    pub fn is_lazy(&self) -> bool {
        self.layout().is_some_and(|layout| layout.has("lazy_refcounts"))
    }
}

impl fmt::Display for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Qcow2 { layout, has_snapshot } = self else { return f.write_str("raw") };
        write!(f, "qcow2:{}", layout.options.replace("PATH/", ""))?;
        match layout.backing {
            Backing::Nothing => {}
            Backing::Raw => f.write_str("+backing")?,
            Backing::Chain => f.write_str("+chain")?,
        }
        if layout.compressed {
            f.write_str("+compressed")?;
        }
        if *has_snapshot { f.write_str("+snapshot") } else { Ok(()) }
    }
}

/// An image with the cache mode and the engine of its server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Combination {
    /// The image.
    pub image: Image,
    /// The cache mode.
    pub cache: &'static str,
    /// The engine.
    pub engine: &'static str,
}

impl fmt::Display for Combination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.image, self.cache, self.engine)
    }
}

/// Selects combinations: IMAGE/CACHE/ENGINE, where an empty part means any.
#[derive(Clone, Debug, Default)]
pub struct Only {
    image: String,
    cache: String,
    engine: String,
}

impl std::str::FromStr for Only {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut parts: Vec<String> = text.rsplitn(3, '/').map(str::to_owned).collect();
        parts.reverse();
        let [image, cache, engine] = &parts[..] else {
            let image = parts.pop().unwrap_or_default();
            ensure!(parts.is_empty(), "three parts: IMAGE/CACHE/ENGINE, each may be empty");
            return Self { image, ..Self::default() }.checked();
        };
        Self { image: image.clone(), cache: cache.clone(), engine: engine.clone() }.checked()
    }
}

impl Only {
    fn checked(self) -> Result<Self> {
        if combinations(&self).is_empty() {
            bail!("no combination is {}/{}/{}", self.image, self.cache, self.engine);
        }
        Ok(self)
    }

    /// Whether an image is selected, by its name or its format.
    pub fn has_image(&self, image: &Image) -> bool {
        self.image.is_empty() || self.image == image.format() || self.image == image.to_string()
    }

    fn has(&self, combination: &Combination) -> bool {
        let is = |wanted: &str, name: &str| wanted.is_empty() || wanted == name;
        self.has_image(&combination.image)
            && is(&self.cache, combination.cache)
            && is(&self.engine, combination.engine)
    }
}

/// All combinations that are selected.
pub fn combinations(only: &Only) -> Vec<Combination> {
    let mut all = Vec::new();
    for image in Image::all() {
        for cache in CACHES {
            for engine in ENGINES {
                all.push(Combination { image, cache, engine });
            }
        }
    }
    all.retain(|combination| only.has(combination));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_combination_is_found_by_its_name() {
        let all = combinations(&Only::default());
        assert_eq!(all.len(), Image::all().len() * 15);
        for combination in all {
            let only = combination.to_string().parse().unwrap();
            assert_eq!(combinations(&only), [combination]);
        }
    }

    #[test]
    fn a_part_may_be_left_out() {
        let count = |text: &str| combinations(&text.parse().unwrap()).len();
        assert_eq!(
            (count("raw"), count("raw/none/"), count("//")),
            (15, 3, count("raw") + count("qcow2"))
        );
        assert!("raw/x/".parse::<Only>().is_err() && "a/b".parse::<Only>().is_err());
    }
}
