//! Images that are named as QEMU names block devices: `--image-opts
//! driver=qcow2,file.filename=disk.qcow2`, or the same as JSON, `json:{"driver": "qcow2", ...}`.
//!
//! Guarantees: an option is either obeyed or refused, never ignored. A command that opens one
//! image, reads or writes it, and ends accepts options that cannot affect it (such as options for
//! long-running servers) without effect.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Result, anyhow, bail};
use blockhouse_disk::ImageFormat;
pub use blockhouse_images::escape_uri as escape;
use blockhouse_images::{BackingUse, QemuName};

use crate::tls_object::with_tls;

/// The option that all commands have that open one image.
#[derive(clap::Args, Clone, Copy)]
pub struct ImageOptsArgs {
    /// The image is given as QEMU's options: driver=qcow2,file.filename=disk.qcow2. The drivers are
    /// raw, qcow2, those of docs/formats.md, and below them file, host_device, nbd, null-co and
    /// rbd.
    #[arg(long)]
    image_opts: bool,
}

/// An image, however it was named.
pub type Named = QemuName;

impl ImageOptsArgs {
    /// The arguments of a command whose option with this meaning has another name.
    pub fn if_used(image_opts: bool) -> Self {
        Self { image_opts }
    }

    /// Whether images are named by options.
    pub fn is_used(self) -> bool {
        self.image_opts
    }

    /// As [`resolve`](Self::resolve), for an image that will be changed.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve); also if the options forbid changes of the image, or locking
    /// it.
    pub fn resolve_to_change(self, image: &Path, format: Option<ImageFormat>) -> Result<Named> {
        Self::check_change(self.resolve(image, format)?, image)
    }

    fn check_change(named: Named, image: &Path) -> Result<Named> {
        match () {
            () if named.is_read_only => bail!("{}: its options say read-only=on", image.display()),
            () if named.is_shared => {
                bail!(
                    "{}: an image that is changed is locked; leave locking=off out",
                    image.display()
                )
            }
            () => Ok(named),
        }
    }

    /// As [`resolve_to_read`](Self::resolve_to_read), of a whole image with its backing file.
    ///
    /// # Errors
    /// As [`resolve_to_read`](Self::resolve_to_read); also if the options name a part of a file, or
    /// omit the backing file.
    pub fn resolve(self, image: &Path, format: Option<ImageFormat>) -> Result<Named> {
        let named = self.resolve_whole(image, format)?;
        if named.is_compressed {
            bail!("{}: the driver compress is of a target: convert writes to it", image.display());
        }
        if named.backing_use == BackingUse::LeftOut {
            bail!(
                "{}: an image without its backing file (backing: null) is only read or served",
                image.display()
            );
        }
        Ok(named)
    }

    /// As [`resolve_to_change`](Self::resolve_to_change), for the target of a copy, which may be
    /// compressed.
    ///
    /// # Errors
    /// As [`resolve_to_change`](Self::resolve_to_change).
    pub fn resolve_target(self, image: &Path, format: Option<ImageFormat>) -> Result<Named> {
        let named = self.resolve_whole(image, format)?;
        refuse_data_file(&named, image)?;
        let is_compressed = named.is_compressed;
        let named = Named { is_compressed: false, ..named };
        Ok(Named { is_compressed, ..Self::check_change(named, image)? })
    }

    /// As [`resolve_to_read`](Self::resolve_to_read), of an image that is served.
    ///
    /// # Errors
    /// As [`resolve_to_read`](Self::resolve_to_read); also if the options request what a server
    /// does not support.
    pub fn resolve_to_serve(self, image: &Path, format: Option<ImageFormat>) -> Result<Named> {
        let named = self.resolve_to_read(image, format)?;
        if named.space.keeps_clusters {
            bail!(
                "{}: a server gives discarded clusters back; leave discard-no-unref out, or say discard=ignore",
                image.display()
            );
        }
        Ok(named)
    }

    /// As [`resolve_to_read`](Self::resolve_to_read), of a whole file.
    ///
    /// # Errors
    /// As [`resolve_to_read`](Self::resolve_to_read); also if the options name a part of a file.
    fn resolve_whole(self, image: &Path, format: Option<ImageFormat>) -> Result<Named> {
        let named = self.resolve_to_read(image, format)?;
        if named.part.is_some() {
            bail!(
                "{}: a part of a file (offset=, size=) is served, and read by convert, info, map, check, compare, measure and \
                 dd",
                image.display()
            );
        }
        Ok(named)
    }

    /// As [`resolve_to_change`](Self::resolve_to_change), for an image that is committed into its
    /// backing file, which the options may name.
    ///
    /// # Errors
    /// As [`resolve_to_change`](Self::resolve_to_change).
    pub fn resolve_to_commit(self, image: &Path, format: Option<ImageFormat>) -> Result<Named> {
        let named = Self::check_change(self.find(image, format)?, image)?;
        if named.part.is_some() || named.is_compressed || named.context.is_some() {
            bail!("{}: its options are none of an image to commit", image.display())
        } else {
            Ok(named)
        }
    }

    /// As [`resolve_to_read`](Self::resolve_to_read), of an image that is mapped. For an export,
    /// the options may name a metadata context other than `base:allocation`.
    ///
    /// # Errors
    /// As [`resolve_to_read`](Self::resolve_to_read).
    pub fn resolve_to_map(self, image: &Path, format: Option<ImageFormat>) -> Result<Named> {
        let named = self.find(image, format)?;
        if let Some((backing, _)) = &named.backing {
            bail!(
                "{}: the backing file is the one that the image names; leave backing.* out ('{}')",
                image.display(),
                backing.display()
            );
        }
        Ok(named)
    }

    /// The image that a command-line argument names. `format` is the format that another argument
    /// gives.
    ///
    /// # Errors
    /// The option that is unknown, or that requests something impossible.
    pub fn resolve_to_read(self, image: &Path, format: Option<ImageFormat>) -> Result<Named> {
        let named = self.resolve_to_map(image, format)?;
        match named.context {
            Some(_) => bail!("{}: x-dirty-bitmap is an option of map alone", image.display()),
            None => Ok(named),
        }
    }

    fn find(self, image: &Path, format: Option<ImageFormat>) -> Result<Named> {
        let text = image.to_str();
        let named = match text.and_then(QemuName::of) {
            Some(named) => named,
            None if self.image_opts => {
                from_words(text.ok_or_else(|| anyhow!("options of an image are UTF-8"))?)
            }
            None => {
                return Ok(Named { path: image.to_owned(), format, ..Named::default() });
            }
        };
        let mut named = named.map_err(|why| anyhow!("{}: {why}", image.display()))?;
        if let Some(tls) = named.tls.take() {
            named.path = with_tls(&named.path.to_string_lossy(), &tls)?.into();
        }
        match (format, named.format) {
            (Some(said), Some(found)) if said != found => bail!(
                "{}: its driver is {}, and the option says {}",
                image.display(),
                found.as_str(),
                said.as_str()
            ),
            (said, found) => Ok(Named { format: found.or(said), ..named }),
        }
    }
}

/// Refuses options that give the image a data file, for a command that opens the image by its path.
///
/// # Errors
/// The options give a data file.
pub fn refuse_data_file(named: &Named, image: &Path) -> Result<()> {
    match named.data_file {
        Some(_) => bail!(
            "{}: the data file is the one that the image names here; leave data-file.* out, or change that name \
             (amend -o data_file=PATH)",
            image.display()
        ),
        None => Ok(()),
    }
}

/// `KEY=VALUE,...`; a comma in a value is written twice.
fn from_words(text: &str) -> Result<QemuName, String> {
    let mut options = BTreeMap::new();
    for part in crate::create_options::split(text) {
        let (key, value) = part.split_once('=').ok_or_else(|| {
            format!("'{part}' is no KEY=VALUE; write driver=qcow2,file.filename=PATH")
        })?;
        options.insert(key.to_owned(), value.to_owned());
    }
    QemuName::of_pairs(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(text: &str) -> Result<Named> {
        ImageOptsArgs { image_opts: true }.resolve_to_read(Path::new(text), None)
    }

    #[test]
    fn options_name_images() {
        for (text, path, format) in [
            ("driver=qcow2,file.filename=a,,b.img", "a,b.img", Some(ImageFormat::Qcow2)),
            ("driver=qcow2,file.driver=file,file.filename=d.q", "d.q", Some(ImageFormat::Qcow2)),
            (
                "driver=raw,file.driver=host_device,file.filename=/dev/x",
                "/dev/x",
                Some(ImageFormat::Raw),
            ),
            ("driver=file,filename=/a", "/a", Some(ImageFormat::Raw)),
            ("file.filename=/a,file.locking=auto", "/a", None),
            ("driver=nbd,host=::1,export=a b", "nbd://[::1]:10809/a%20b", Some(ImageFormat::Raw)),
            (
                "driver=qcow2,file.driver=nbd,file.server.type=unix,file.server.path=/s",
                "nbd+unix:///?socket=/s",
                Some(ImageFormat::Qcow2),
            ),
            (
                "driver=raw,file.driver=rbd,file.pool=p,file.image=i,file.conf=/c,file.user=u",
                "rbd:p/i?conf=/c&id=u",
                Some(ImageFormat::Raw),
            ),
            (
                r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"/x","locking":"off"}}"#,
                "/x",
                Some(ImageFormat::Qcow2),
            ),
        ] {
            let found = named(text).unwrap();
            assert_eq!((found.path.as_path(), found.format), (Path::new(path), format), "{text}");
            assert_eq!(found.is_shared, text.contains("\"off\""), "{text}");
            let is_bare =
                ["driver=file", "driver=nbd"].iter().any(|driver| text.starts_with(driver));
            assert_eq!(found.driver.is_some(), is_bare, "{text}");
        }
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        for (text, said) in [
            ("disk.qcow2", "KEY=VALUE"),
            ("driver=qcow2", "filename"),
            ("driver=quorum,file.filename=a", "quorum"),
            ("driver=vhd,file.filename=a", "there is no format 'vhd'"),
            ("driver=qcow2,file.driver=ssh,file.filename=a", "ssh"),
            ("driver=qcow2,file.filename=a,backing.file.filename=b", "backing"),
            ("driver=raw,offset=x,file.filename=a", "offset"),
            ("json:[]", "object"),
            ("json:{", "JSON"),
        ] {
            let error = named(text).unwrap_err().to_string();
            assert!(error.contains(said), "{text}: {error}");
        }
        let twice = ImageOptsArgs { image_opts: true };
        let twice =
            twice.resolve(Path::new("driver=qcow2,file.filename=a"), Some(ImageFormat::Raw));
        assert!(twice.unwrap_err().to_string().contains("qcow2"));
    }
}
