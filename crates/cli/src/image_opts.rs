//! Images that are named as QEMU names block devices: `--image-opts driver=qcow2,file.filename=disk.qcow2`, or the same as
//! JSON, `json:{"driver": "qcow2", ...}`.
//!
//! Guarantees: an option is either obeyed or refused, never passed over; those that cannot matter to a command that opens
//! one image, reads or writes it and ends, are obeyed by doing nothing.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use blockhouse_disk::ImageFormat;
use serde_json::Value;

/// The beginning of a name that is JSON.
const JSON: &str = "json:";

/// The option that all commands have that open one image.
#[derive(clap::Args, Clone, Copy)]
pub struct ImageOptsArgs {
    /// The image is no path but QEMU's options: driver=qcow2,file.filename=disk.qcow2. The drivers are raw, qcow2,
    /// those of docs/formats.md, and below them file, host_device, nbd and rbd.
    #[arg(long)]
    image_opts: bool,
}

/// An image, however it was named.
#[derive(Debug, PartialEq, Eq)]
pub struct Named {
    /// Its path, or the URI of a server's export.
    pub path: PathBuf,
    /// `None`: the file's name decides.
    pub format: Option<ImageFormat>,
    /// Whether it is not to be locked.
    pub is_shared: bool,
    /// Whether it is not to be changed.
    is_read_only: bool,
}

impl ImageOptsArgs {
    /// Whether images are named by options.
    pub fn is_used(self) -> bool {
        self.image_opts
    }

    /// As [`resolve`](Self::resolve), for an image that will be changed.
    ///
    /// # Errors
    /// As there; or its options say that it is not to be changed, or not to be locked.
    pub fn resolve_to_change(self, image: &Path, format: Option<ImageFormat>) -> Result<Named> {
        let named = self.resolve(image, format)?;
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

    /// What an image on the command line stands for. `format` is the one that was said beside it.
    ///
    /// # Errors
    /// Which option is not understood, or says what cannot be done.
    pub fn resolve(self, image: &Path, format: Option<ImageFormat>) -> Result<Named> {
        let text = image.to_str();
        let options = match text.and_then(|text| text.strip_prefix(JSON)) {
            Some(json) => from_json(json),
            None if self.image_opts => {
                from_words(text.ok_or_else(|| anyhow!("options of an image are UTF-8"))?)
            }
            None => {
                let path = image.to_owned();
                return Ok(Named { path, format, is_shared: false, is_read_only: false });
            }
        };
        let named = options.and_then(Options::named);
        let named = named.map_err(|why| anyhow!("{}: {why}", image.display()))?;
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

/// Keys with dots between their parts, and their values.
struct Options(BTreeMap<String, String>);

/// `KEY=VALUE,...`; a comma in a value is written twice.
fn from_words(text: &str) -> Result<Options> {
    let mut options = BTreeMap::new();
    for part in crate::create_options::split(text) {
        let (key, value) = part.split_once('=').ok_or_else(|| {
            anyhow!("'{part}' is no KEY=VALUE; write driver=qcow2,file.filename=PATH")
        })?;
        options.insert(key.to_owned(), value.to_owned());
    }
    Ok(Options(options))
}

fn from_json(text: &str) -> Result<Options> {
    let value: Value = serde_json::from_str(text).map_err(|error| anyhow!("no JSON: {error}"))?;
    if !value.is_object() {
        bail!("the JSON is no object");
    }
    let mut options = BTreeMap::new();
    flatten("", &value, &mut options);
    Ok(Options(options))
}

fn flatten(path: &str, value: &Value, options: &mut BTreeMap<String, String>) {
    match value {
        Value::Object(members) => {
            for (key, value) in members {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                flatten(&path, value, options);
            }
        }
        Value::String(text) => _ = options.insert(path.to_owned(), text.clone()),
        Value::Bool(true) => _ = options.insert(path.to_owned(), "on".into()),
        Value::Bool(false) => _ = options.insert(path.to_owned(), "off".into()),
        other => _ = options.insert(path.to_owned(), other.to_string()),
    }
}

impl Options {
    fn take(&mut self, key: &str) -> Option<String> {
        self.0.remove(key)
    }

    /// What they name.
    fn named(mut self) -> Result<Named> {
        let (mut locking, mut read_only) = (Vec::new(), Vec::new());
        for prefix in ["", "file."] {
            locking.extend(self.take(&format!("{prefix}locking")));
            read_only.extend(self.take(&format!("{prefix}read-only")));
            for key in ["cache.direct", "cache.no-flush", "aio", "auto-read-only"] {
                self.take(&format!("{prefix}{key}"));
            }
        }
        let driver = self.take("driver");
        // Each key is tried on each image that is opened.
        for key in ["key-secret", "encrypt.key-secret", "encrypt.format"] {
            self.take(key);
        }
        if self.0.keys().any(|key| key == "header" || key.starts_with("header.")) {
            bail!("a LUKS header in another file is not read; cryptsetup opens such containers");
        }
        let (format, prefix) = match driver.as_deref() {
            // The bytes of the file or export themselves.
            Some("file" | "host_device" | "nbd" | "rbd") => (Some(ImageFormat::Raw), ""),
            Some(name) => {
                (Some(name.parse::<ImageFormat>().map_err(|why| anyhow!("{why}"))?), "file.")
            }
            None => (None, "file."),
        };
        let below = match prefix {
            "" => driver,
            _ => self.take("file.driver"),
        };
        let path = self.place(prefix, below.as_deref())?;
        if let Some(key) = self.0.keys().next() {
            bail!("the option '{key}' is not understood; name the image by its path or URI");
        }
        Ok(Named {
            path,
            format,
            is_shared: locking.iter().any(|value| value == "off"),
            is_read_only: read_only.iter().any(|value| value == "on"),
        })
    }

    /// The path or URI below the format.
    fn place(&mut self, prefix: &str, driver: Option<&str>) -> Result<PathBuf> {
        let filename = self.take(&format!("{prefix}filename"));
        let filename = match filename {
            None if driver.is_none() => self.take("filename"),
            filename => filename,
        };
        match (driver, filename) {
            (None | Some("file" | "host_device"), Some(name)) => {
                // Whatever the file is called, it is a path.
                let is_path = driver.is_some();
                Ok(if is_path { path_of(&name) } else { name.into() })
            }
            (Some("nbd"), _) => self.nbd(prefix),
            (Some("rbd"), _) => self.rbd(prefix),
            (Some(other @ ("file" | "host_device")), None) => {
                bail!("the driver {other} needs {prefix}filename=PATH")
            }
            (None, None) => bail!("which file is missing: {prefix}filename=PATH"),
            (Some(other), _) => bail!(
                "there is no driver '{other}' below a format; use file, host_device, nbd or rbd"
            ),
        }
    }

    /// `server.type=inet,server.host=H,server.port=P` or `server.path=SOCKET`, with or without `server.`, and `export=NAME`.
    fn nbd(&mut self, prefix: &str) -> Result<PathBuf> {
        self.take(&format!("{prefix}server.type"));
        let mut take = |key: &str| {
            let inner = self.take(&format!("{prefix}server.{key}"));
            inner.or_else(|| self.take(&format!("{prefix}{key}")))
        };
        let (socket, host, port, export) =
            (take("path"), take("host"), take("port"), take("export"));
        let export = escape(&export.unwrap_or_default());
        Ok(match (socket, host) {
            (Some(socket), None) => format!("nbd+unix:///{export}?socket={}", escape(&socket)),
            (None, Some(host)) => {
                let host = if host.contains(':') { format!("[{host}]") } else { host };
                format!("nbd://{host}:{}/{export}", port.as_deref().unwrap_or("10809"))
            }
            _ => bail!(
                "the driver nbd needs {prefix}server.path=SOCKET, or {prefix}server.host=HOST"
            ),
        }
        .into())
    }

    /// `pool=POOL,image=IMAGE[,snapshot=NAME][,conf=FILE][,user=ID]`.
    fn rbd(&mut self, prefix: &str) -> Result<PathBuf> {
        let mut take = |key: &str| self.take(&format!("{prefix}{key}"));
        let (Some(pool), Some(image)) = (take("pool"), take("image")) else {
            bail!("the driver rbd needs {prefix}pool=POOL and {prefix}image=IMAGE");
        };
        let mut name = format!("rbd:{pool}/{image}");
        if let Some(snapshot) = take("snapshot") {
            name.push_str(&format!("@{snapshot}"));
        }
        let parameters = [("conf", take("conf")), ("id", take("user"))];
        let parameters = parameters.into_iter().filter_map(|(key, value)| Some((key, value?)));
        for (mark, (key, value)) in ["?", "&"].iter().zip(parameters) {
            name.push_str(&format!("{mark}{key}={value}"));
        }
        Ok(name.into())
    }
}

/// A path, also where it looks like a URI.
fn path_of(name: &str) -> PathBuf {
    if Path::new(name).is_absolute() { name.into() } else { Path::new(".").join(name) }
}

/// The text in a URI: everything but what needs no escape there (RFC 3986, section 2.3, and the slash) as %XX.
pub fn escape(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    let escaped = text.bytes().map(|byte| match is_plain(byte) {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02X}"),
    });
    escaped.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(text: &str) -> Result<Named> {
        ImageOptsArgs { image_opts: true }.resolve(Path::new(text), None)
    }

    #[test]
    fn options_name_images() {
        for (text, path, format) in [
            ("driver=qcow2,file.filename=a,,b.img", "a,b.img", Some(ImageFormat::Qcow2)),
            ("driver=qcow2,file.driver=file,file.filename=d.q", "./d.q", Some(ImageFormat::Qcow2)),
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
        }
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        for (text, said) in [
            ("disk.qcow2", "KEY=VALUE"),
            ("driver=qcow2", "filename"),
            ("driver=quorum,file.filename=a", "quorum"),
            ("driver=qcow2,file.driver=ssh,file.filename=a", "ssh"),
            ("driver=qcow2,file.filename=a,backing.file.filename=b", "backing"),
            ("driver=raw,offset=512,file.filename=a", "offset"),
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
