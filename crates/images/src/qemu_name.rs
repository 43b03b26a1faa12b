//! The meaning of QEMU's names of images: JSON with a driver for the format and one for the layer
//! below it, and a protocol before a colon (`file:PATH`, `nbd:HOST:PORT`).
//!
//! Guarantees: every option is either obeyed or refused. Exception: an option without a meaning for
//! a program that opens one image, uses it and ends is accepted without effect.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use blockhouse_core::{Error, ErrorKind, Result};
use blockhouse_disk::{DetectZeroes, Discard};
use blockhouse_format::{Backing, ImageFormat};
use serde_json::Value;

use crate::image_options::{BackingUse, FilePart};

/// Options of QEMU without effect on the bytes read and written.
const WITHOUT_EFFECT: [&str; 5] =
    ["aio", "auto-read-only", "cache.no-flush", "node-name", "overlap-check"];

/// Options of qcow2 nodes whose values are numbers, without effect on the bytes read and written.
pub const NUMBERS_WITHOUT_EFFECT: [&str; 5] = [
    "cache-clean-interval",
    "cache-size",
    "l2-cache-entry-size",
    "l2-cache-size",
    "refcount-cache-size",
];

/// Options of qcow2 nodes that are on or off, without effect on the bytes read and written.
pub const FLAGS_WITHOUT_EFFECT: [&str; 3] =
    ["lazy-refcounts", "pass-discard-other", "pass-discard-request"];

/// The characters before an export's name in [`nbd_of`].
const EXPORT: &str = ":exportname=";

/// The image that QEMU's options name.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct QemuName {
    /// The path, or the URI of a server's export.
    pub path: PathBuf,
    /// `None` if the file's name decides.
    pub format: Option<ImageFormat>,
    /// The driver of the bytes themselves (`file`, `nbd`), if the options name it without a format
    /// above it.
    pub driver: Option<String>,
    /// The part of the file that holds the image.
    pub part: Option<FilePart>,
    /// Whether the image must not be locked.
    pub is_shared: bool,
    /// Whether the image must not be changed.
    pub is_read_only: bool,
    /// Whether reads bypass the host's page cache, in commands that inspect one image.
    pub is_direct: bool,
    /// Whether the image's backing file is left out.
    pub backing_use: BackingUse,
    /// Whether writes to the image are compressed.
    pub is_compressed: bool,
    /// The treatment of discards and zeros, for a program that serves the image.
    pub space: SpaceOptions,
    /// The backing file that the options give the image, and its format, if they name that.
    pub backing: Option<(PathBuf, Option<ImageFormat>)>,
    /// The data file that the options give the image.
    pub data_file: Option<PathBuf>,
    /// The context of block status requested from a server (`x-dirty-bitmap`).
    pub context: Option<String>,
    /// The TLS options for the server, which `path` does not contain.
    pub tls: Option<QemuTls>,
}

/// The TLS options for a server, which refer to an object of QEMU's command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QemuTls {
    /// The object's name (`tls-creds`).
    pub credentials: String,
    /// The name in the server's certificate, if it differs from the host's name (`tls-hostname`).
    pub hostname: Option<String>,
}

/// The treatment of discards and of zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceOptions {
    /// The effect of a discard.
    pub discard: Option<Discard>,
    /// The treatment of zeros that are written.
    pub detect_zeroes: Option<DetectZeroes>,
    /// Whether a discarded cluster keeps its host offset.
    pub keeps_clusters: bool,
}

impl QemuName {
    /// The meaning of a name that begins with `json:`, `file:`, `host_device:` or `nbd:`; `None`
    /// for any other name, and for an NBD URI.
    ///
    /// # Errors
    /// A message that names the option that is unknown or not possible.
    pub fn of(name: &str) -> Option<Result<Self, String>> {
        let (scheme, rest) = name.split_once(':')?;
        let path = match scheme {
            "json" => return Some(from_json(rest).and_then(Options::named)),
            "file" | "host_device" => Ok(path_of(rest)),
            "nbd" if !rest.starts_with("//") => nbd_of(rest),
            _ => return None,
        };
        Some(path.map(|path| Self { path, ..Self::default() }))
    }

    /// The meaning of options whose keys have dots between their parts.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn of_pairs(pairs: BTreeMap<String, String>) -> Result<Self, String> {
        Options(pairs).named()
    }
}

/// Keys with dots between their parts, and their values.
struct Options(BTreeMap<String, String>);

fn from_json(text: &str) -> Result<Options, String> {
    let text = with_double_quotes(text);
    let value: Value = serde_json::from_str(&text).map_err(|error| format!("no JSON: {error}"))?;
    if !value.is_object() {
        return Err("the JSON is no object".into());
    }
    let mut options = BTreeMap::new();
    flatten("", &value, &mut options);
    Ok(Options(options))
}

/// Converts JSON as QEMU reads it, where strings may be in single quotes, to standard JSON.
fn with_double_quotes(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut quote = None;
    let mut characters = text.chars();
    while let Some(next) = characters.next() {
        match (quote, next) {
            (Some(_), '\\') => match characters.next() {
                Some('\'') => plain.push('\''),
                escaped => plain.extend(std::iter::once('\\').chain(escaped)),
            },
            (Some(begun), end) if begun == end => {
                quote = None;
                plain.push('"');
            }
            (Some(_), '"') => plain.push_str("\\\""),
            (None, '\'' | '"') => {
                quote = Some(next);
                plain.push('"');
            }
            (_, other) => plain.push(other),
        }
    }
    plain
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

    /// The image that the options name.
    fn named(mut self) -> Result<QemuName, String> {
        if self.0.get("driver").is_some_and(|driver| driver == "compress") {
            let below = self.0.into_iter().filter(|(key, _)| key != "driver");
            let below = below.map(|(key, value)| match key.strip_prefix("file.") {
                Some(inner) => (inner.to_owned(), value),
                None => (key, value),
            });
            return Ok(QemuName { is_compressed: true, ..Self(below.collect()).named()? });
        }
        if self.0.get("driver").is_some_and(|driver| driver == "blkdebug") {
            return self.below_limits()?.named();
        }
        let (backing, data_file) = (self.backing()?, self.data_file()?);
        let context = self.take("x-dirty-bitmap");
        let tls = self.tls();
        let (mut locking, mut read_only, mut direct) = (Vec::new(), Vec::new(), Vec::new());
        for prefix in ["", "file.", "file.file."] {
            locking.extend(self.take(&format!("{prefix}locking")));
            let shared = self.take(&format!("{prefix}force-share"));
            locking.extend(shared.filter(|value| value == "on").map(|_| "off".to_owned()));
            read_only.extend(self.take(&format!("{prefix}read-only")));
            direct.extend(self.take(&format!("{prefix}cache.direct")));
            let numbers_and_flags = NUMBERS_WITHOUT_EFFECT.iter().chain(&FLAGS_WITHOUT_EFFECT);
            for key in WITHOUT_EFFECT.iter().chain(numbers_and_flags) {
                self.take(&format!("{prefix}{key}"));
            }
        }
        let space = self.space()?;
        let driver = self.take("driver");
        // Options for keys are ignored, because each key is tried on each image that is opened.
        for key in ["key-secret", "encrypt.key-secret", "encrypt.format"] {
            self.take(key);
        }
        // JSON's `null`, or its form as an option, the empty string.
        let backing_use = match self.0.get("backing").map(String::as_str) {
            Some("null" | "") => {
                self.take("backing");
                BackingUse::LeftOut
            }
            _ => BackingUse::Followed,
        };
        if self.0.keys().any(|key| key == "header" || key.starts_with("header.")) {
            return Err(
                "a LUKS header in another file is not read; cryptsetup opens such containers"
                    .into(),
            );
        }
        let (format, prefix) = match driver.as_deref() {
            // These drivers name the bytes of a file or export, without a format.
            Some("file" | "host_device" | "nbd" | "rbd" | "null-co" | "null-aio") => {
                (Some(ImageFormat::Raw), "")
            }
            // This program's own name of `vpc`.
            Some(name @ "vhd") => return Err(format!("there is no format '{name}': name it vpc")),
            Some(name) => (Some(name.parse::<ImageFormat>()?), "file."),
            None => (None, "file."),
        };
        let below = match prefix {
            "" => driver.clone(),
            _ => self.take("file.driver"),
        };
        let is_bare = prefix.is_empty();
        let mut part = match driver.as_deref() {
            Some("raw") => self.part("")?,
            _ => None,
        };
        // A raw layer below a format, or below another raw layer, selects a part of the file.
        let (prefix, below) = match below.as_deref() {
            Some("raw") if part.is_none() => {
                part = self.part("file.")?;
                let below = self.take("file.file.driver");
                ("file.file.", below)
            }
            _ => (prefix, below),
        };
        let path = self.place(prefix, below.as_deref())?;
        if let Some(key) = self.0.keys().next() {
            return Err(format!(
                "the option '{key}' is not understood; name the image by its path or URI"
            ));
        }
        Ok(QemuName {
            path,
            format,
            driver: driver.filter(|_| is_bare),
            part,
            is_shared: locking.iter().any(|value| value == "off"),
            is_read_only: read_only.iter().any(|value| value == "on"),
            is_direct: direct.iter().any(|value| value == "on"),
            backing_use,
            is_compressed: false,
            space,
            backing,
            data_file,
            context,
            tls,
        })
    }

    /// `tls-creds=ID[,tls-hostname=NAME]` of a server.
    fn tls(&mut self) -> Option<QemuTls> {
        ["", "file.", "file.file."].iter().find_map(|prefix| {
            let credentials = self.take(&format!("{prefix}tls-creds"))?;
            Some(QemuTls { credentials, hostname: self.take(&format!("{prefix}tls-hostname")) })
        })
    }

    /// The image below the driver `blkdebug`. Options that only limit requests have no effect,
    /// because tools' requests are within such limits. Options that inject faults are refused.
    fn below_limits(self) -> Result<Self, String> {
        const BOUNDS: [&str; 7] = [
            "align",
            "max-transfer",
            "opt-write-zero",
            "max-write-zero",
            "opt-discard",
            "max-discard",
            "driver",
        ];
        let mut image = BTreeMap::new();
        for (key, value) in self.0 {
            match key.strip_prefix("image.") {
                Some(inner) => drop(image.insert(inner.to_owned(), value)),
                None if BOUNDS.contains(&&*key) => {}
                None => {
                    return Err(format!(
                        "there is no driver 'blkdebug' with '{key}': faults are not injected here"
                    ));
                }
            }
        }
        Ok(Self(image))
    }

    /// The backing file that `backing.file.filename` and the like name.
    fn backing(&mut self) -> Result<Option<(PathBuf, Option<ImageFormat>)>, String> {
        let Some(options) = self.take_child("backing.") else { return Ok(None) };
        match options.named()? {
            QemuName { tls: Some(_), .. } => Err("a backing file has no tls-creds".into()),
            QemuName { part: Some(_), .. } | QemuName { context: Some(_), .. } => {
                Err("a backing file has no offset, size or x-dirty-bitmap".into())
            }
            QemuName { path, format, backing: None, data_file: None, backing_use, .. }
                if backing_use == BackingUse::Followed || format == Some(ImageFormat::Raw) =>
            {
                Ok(Some((path, format)))
            }
            _ => Err("a backing file has the files that it names: leave backing.backing and \
                      backing.data-file out"
                .into()),
        }
    }

    /// The data file that `data-file.filename` and the like name.
    fn data_file(&mut self) -> Result<Option<PathBuf>, String> {
        let Some(options) = self.take_child("data-file.") else { return Ok(None) };
        match options.named()? {
            // Caching, locking and discards are as for the image.
            QemuName {
                path,
                format: None | Some(ImageFormat::Raw),
                part: None,
                is_read_only: false,
                is_compressed: false,
                backing: None,
                data_file: None,
                context: None,
                tls: None,
                ..
            } => Ok(Some(path)),
            _ => Err(
                "a data file is a whole raw file: data-file.driver=file,data-file.filename=PATH"
                    .into(),
            ),
        }
    }

    /// The options of a child node, without their prefix; `None` if there are none.
    fn take_child(&mut self, prefix: &str) -> Option<Self> {
        let of_child = self.0.extract_if(.., |key, _| key.starts_with(prefix));
        let options: BTreeMap<_, _> =
            of_child.map(|(key, value)| (key[prefix.len()..].to_owned(), value)).collect();
        (!options.is_empty()).then_some(Self(options))
    }

    /// `discard=`, `detect-zeroes=` and `discard-no-unref=` of the image. The first two override
    /// the same options of the layers below.
    fn space(&mut self) -> Result<SpaceOptions, String> {
        let mut space = SpaceOptions::default();
        for prefix in ["file.file.", "file.", ""] {
            if let Some(discard) = self.take(&format!("{prefix}discard")) {
                space.discard = Some(match &*discard {
                    "unmap" | "on" => Discard::Unmap,
                    "ignore" | "off" => Discard::Ignore,
                    _ => return Err(format!("'discard={discard}' is neither unmap nor ignore")),
                });
            }
            if let Some(zeroes) = self.take(&format!("{prefix}detect-zeroes")) {
                space.detect_zeroes = Some(match &*zeroes {
                    "off" => DetectZeroes::Off,
                    "on" => DetectZeroes::On,
                    "unmap" => DetectZeroes::Unmap,
                    _ => {
                        return Err(format!(
                            "'detect-zeroes={zeroes}' is none of off, on and unmap"
                        ));
                    }
                });
            }
        }
        space.keeps_clusters = self.take("discard-no-unref").is_some_and(|value| value == "on");
        Ok(space)
    }

    /// `offset=` and `size=` of a raw layer.
    fn part(&mut self, prefix: &str) -> Result<Option<FilePart>, String> {
        let mut number = |key: &str| {
            let text = self.take(&format!("{prefix}{key}"));
            let number = text.map(|text| bytes_of(&text).ok_or_else(|| format!("{key}={text}")));
            number.transpose().map_err(|text| format!("'{text}' is no number of bytes"))
        };
        let (offset, size) = (number("offset")?, number("size")?);
        let is_part = offset.is_some() || size.is_some();
        Ok(is_part.then(|| FilePart { offset: offset.unwrap_or(0), size }))
    }

    /// The path or URI below the format.
    fn place(&mut self, prefix: &str, driver: Option<&str>) -> Result<PathBuf, String> {
        let filename = self.take(&format!("{prefix}filename"));
        let filename = match filename {
            None if driver.is_none() => self.take("filename"),
            filename => filename,
        };
        match (driver, filename) {
            (None | Some("file" | "host_device"), Some(name)) => {
                // With a driver, even a file name with a colon is a path.
                let is_path = driver.is_some();
                Ok(if is_path { path_of(&name) } else { name.into() })
            }
            (Some("nbd"), _) => self.nbd(prefix),
            (Some("rbd"), _) => self.rbd(prefix),
            (Some(driver @ ("null-co" | "null-aio")), None) => Ok(self.null(driver, prefix)),
            (Some(other @ ("file" | "host_device")), None) => {
                Err(format!("the driver {other} needs {prefix}filename=PATH"))
            }
            (None, None) => Err(format!("which file is missing: {prefix}filename=PATH")),
            (Some(other), _) => Err(format!(
                "there is no driver '{other}' below a format; use file, host_device, nbd, null-co or rbd"
            )),
        }
    }

    /// `server.type=inet,server.host=H,server.port=P` or `server.path=SOCKET`, with or without
    /// `server.`, and `export=NAME`.
    fn nbd(&mut self, prefix: &str) -> Result<PathBuf, String> {
        self.take(&format!("{prefix}server.type"));
        let mut take = |key: &str| {
            let inner = self.take(&format!("{prefix}server.{key}"));
            inner.or_else(|| self.take(&format!("{prefix}{key}")))
        };
        let (socket, host, port, export) =
            (take("path"), take("host"), take("port"), take("export"));
        let export = escape(&export.unwrap_or_default());
        match (socket, host) {
            (Some(socket), None) => Ok(unix_uri(&socket, &export)),
            (None, Some(host)) => {
                let host = if host.contains(':') { format!("[{host}]") } else { host };
                let port = port.as_deref().unwrap_or("10809");
                Ok(format!("nbd://{host}:{port}/{export}").into())
            }
            _ => Err(format!(
                "the driver nbd needs {prefix}server.path=SOCKET, or {prefix}server.host=HOST"
            )),
        }
    }

    /// `size=SIZE,latency-ns=NUMBER,read-zeroes=on`.
    fn null(&mut self, driver: &str, prefix: &str) -> PathBuf {
        let keys = ["size", "latency-ns", "read-zeroes"];
        let options = keys.into_iter().filter_map(|key| {
            self.take(&format!("{prefix}{key}")).map(|value| format!("{key}={}", escape(&value)))
        });
        format!("{driver}://?{}", options.collect::<Vec<_>>().join("&")).into()
    }

    /// `pool=POOL,image=IMAGE[,snapshot=NAME][,conf=FILE][,user=ID]`.
    fn rbd(&mut self, prefix: &str) -> Result<PathBuf, String> {
        let mut take = |key: &str| self.take(&format!("{prefix}{key}"));
        let (Some(pool), Some(image)) = (take("pool"), take("image")) else {
            return Err(format!("the driver rbd needs {prefix}pool=POOL and {prefix}image=IMAGE"));
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

/// `HOST:PORT` or `unix:PATH`, with or without `:exportname=NAME` after it.
fn nbd_of(rest: &str) -> Result<PathBuf, String> {
    let (server, export) = rest.split_once(EXPORT).unwrap_or((rest, ""));
    let export = escape(export);
    if let Some(socket) = server.strip_prefix("unix:") {
        return match socket {
            "" => Err("nbd:unix: is followed by the path of a socket".into()),
            socket => Ok(unix_uri(socket, &export)),
        };
    }
    match server.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {
            Ok(format!("nbd://{host}:{port}/{export}").into())
        }
        _ => Err(format!("write nbd:HOST:PORT, nbd:HOST:PORT{EXPORT}NAME or nbd:unix:SOCKET")),
    }
}

fn unix_uri(socket: &str, export: &str) -> PathBuf {
    format!("nbd+unix:///{export}?socket={}", escape(socket)).into()
}

/// Converts a backing file whose name is one of [QEMU's](QemuName) to a path or URI and a format,
/// and the part of the file that holds it. Any other backing file is returned unchanged.
///
/// # Errors
/// `Unsupported` if the name asks for something impossible, or for another format than the image
/// does.
pub fn plain_backing<'a>(
    backing: &'a Backing,
    image: &str,
) -> Result<(Cow<'a, Backing>, Option<FilePart>)> {
    let name = str::from_utf8(&backing.name).ok().and_then(QemuName::of);
    let Some(named) = name else { return Ok((Cow::Borrowed(backing), None)) };
    let refuse = |what: String| {
        let what = format!("cannot open its backing file: {what}");
        Error::new(ErrorKind::Unsupported, what).on(image)
    };
    let QemuName {
        path, format, part, tls, backing_use, backing: below, data_file, context, ..
    } = named.map_err(refuse)?;
    let has_child = below.is_some() || data_file.is_some();
    if backing_use == BackingUse::LeftOut || has_child || context.is_some() {
        let what =
            "its name has backing=, data-file= or x-dirty-bitmap=, which are of a command line";
        return Err(refuse(format!("{what}; write its path or URI")));
    }
    if tls.is_some() {
        return Err(refuse("tls-creds is of a command line; write a URI: nbds://HOST/NAME".into()));
    }
    let (said, found) = (backing.format.as_deref(), format);
    let said_format = said.and_then(|said| said.parse::<ImageFormat>().ok());
    let format = match (said, found) {
        (Some(said), Some(found)) if said_format != Some(found) => {
            let found = found.as_str();
            return Err(refuse(format!("its driver is {found}, and the image says {said}")));
        }
        (said, found) => found.map(ImageFormat::as_str).or(said).map(str::to_owned),
    };
    Ok((Cow::Owned(Backing { name: path.into_os_string().into_vec(), format }), part))
}

/// As [`plain_backing`], for a backing file that will be changed.
///
/// # Errors
/// As there; `Unsupported` for a part of a file.
pub(crate) fn whole_backing<'a>(backing: &'a Backing, image: &str) -> Result<Cow<'a, Backing>> {
    match plain_backing(backing, image)? {
        (backing, None) => Ok(backing),
        (_, Some(_)) => {
            let what = "its backing file is a part of a file, which is only read";
            Err(Error::new(ErrorKind::Unsupported, what).on(image))
        }
    }
}

/// Whether the name of a backing file is an address and not a path, by the rule of QEMU:
/// "nbd://...", "json:{...}".
pub fn is_address(name: &[u8]) -> bool {
    name.iter().find(|byte| matches!(byte, b':' | b'/')) == Some(&b':')
}

/// The path of a file, even if `name` looks like a URI.
fn path_of(name: &str) -> PathBuf {
    if is_address(name.as_bytes()) || name == "-" { Path::new(".").join(name) } else { name.into() }
}

/// The text with each byte as %XX for a URI, except the unreserved characters (RFC 3986, section
/// 2.3) and the slash.
pub fn escape(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    let escaped = text.bytes().map(|byte| {
        if is_plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }
    });
    escaped.collect()
}

/// Parses a number of bytes, with or without a unit of QEMU after it.
fn bytes_of(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|unit: char| unit.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        "P" => 50,
        "E" => 60,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protocols_stand_before_a_colon() {
        for (name, path) in [
            ("file:/a/b.img", "/a/b.img"),
            ("file:nbd://x", "./nbd://x"),
            ("host_device:/dev/sdx", "/dev/sdx"),
            ("nbd:localhost:10809", "nbd://localhost:10809/"),
            ("nbd:[::1]:10809:exportname=a b", "nbd://[::1]:10809/a%20b"),
            ("nbd:unix:/run/s.sock", "nbd+unix:///?socket=/run/s.sock"),
            ("nbd:unix:/run/s:exportname=x", "nbd+unix:///x?socket=/run/s"),
        ] {
            let named = QemuName::of(name).expect("a protocol").expect(name);
            assert_eq!((named.path, named.format), (PathBuf::from(path), None), "{name}");
        }
        for name in ["nbd:localhost", "nbd:unix:", "nbd::10809", "nbd:host:many"] {
            assert!(QemuName::of(name).expect("a protocol").is_err(), "{name}");
        }
        for name in ["a.img", "./file:x", "nbd://host/x", "c:x", "rbd:pool/image"] {
            assert_eq!(QemuName::of(name), None, "{name}");
        }
    }

    #[test]
    fn nothing_is_an_image_by_its_driver() {
        for (name, path) in [
            (r#"json:{"driver":"null-co","read-zeroes":true}"#, "null-co://?read-zeroes=on"),
            (
                "json:{'driver':'raw','file':{'driver':'null-aio','size':512,'latency-ns':7}}",
                "null-aio://?size=512&latency-ns=7",
            ),
        ] {
            let named = QemuName::of(name).expect("JSON").expect(name);
            assert_eq!((named.path, named.format), (path.into(), Some(ImageFormat::Raw)), "{name}");
        }
    }

    #[test]
    fn strings_may_be_in_single_quotes() {
        for name in [
            r#"json:{'driver':'raw','file':{'driver':'file','filename':'/it\'s "x"'}}"#,
            r#"json:{"driver":"raw","file":{"driver":"file","filename":"/it's \"x\""}}"#,
        ] {
            let named = QemuName::of(name).expect("a protocol").expect(name);
            assert_eq!(named.path, Path::new(r#"/it's "x""#), "{name}");
        }
        assert!(QemuName::of("json:{'driver':'raw").expect("a protocol").is_err());
    }

    #[test]
    fn a_backing_file_is_left_out_by_null() {
        let of = |backing: &str| {
            let name = format!(r#"json:{{"driver":"qcow2","file":{{"filename":"a"}}{backing}}}"#);
            QemuName::of(&name).expect("JSON")
        };
        let left_out = of(r#","backing":null"#).map(|named| named.backing_use);
        assert_eq!(left_out, Ok(BackingUse::LeftOut));
        assert_eq!(of("").map(|named| named.backing_use), Ok(BackingUse::Followed));
        assert!(of(r#","backing":{"driver":"raw"}"#).is_err());
    }

    #[test]
    fn what_is_written_may_be_compressed_and_space_kept() {
        let of = |options: &str| {
            let name = format!("json:{{{options}}}");
            QemuName::of(&name).expect("JSON").expect("an image")
        };
        let compressed = of(
            "'driver':'compress','file':{'driver':'qcow2','file':{'driver':'file','filename':'a'}}",
        );
        assert_eq!((compressed.path.to_str(), compressed.is_compressed), (Some("a"), true));
        assert_eq!(compressed.format, Some(ImageFormat::Qcow2));
        let kept = of(
            "'driver':'qcow2','discard-no-unref':true,'discard':'unmap','file.discard':'unmap',\
             'detect-zeroes':'unmap','file':{'driver':'file','filename':'a','node-name':'n'}",
        );
        let expected = SpaceOptions {
            discard: Some(Discard::Unmap),
            detect_zeroes: Some(DetectZeroes::Unmap),
            keeps_clusters: true,
        };
        assert_eq!((kept.space, kept.is_compressed), (expected, false));
    }

    #[test]
    fn a_backing_file_in_a_header_has_the_bytes_that_its_name_says_or_is_refused() {
        let file = r#""driver":"qcow2","file":{"driver":"file","filename":"b"}"#;
        let plain = |more: &str| {
            let name = format!("json:{{{file}{more}}}").into();
            plain_backing(&Backing { name, format: Some("qcow2".into()) }, "i").map(drop)
        };
        plain("").expect("a file");
        plain(r#","cache":{"direct":true}"#).expect("a file");
        for more in [r#","backing":null"#, r#","backing":{"driver":"file","filename":"c"}"#] {
            plain(more).expect_err(more);
        }
        let of = |more: &str| QemuName::of(&format!("json:{{{file}{more}}}")).expect("JSON");
        let below = |named: QemuName| named.backing;
        let found = of(r#","backing":{"driver":"raw","file":{"driver":"file","filename":"c"}}"#);
        assert_eq!(found.map(below), Ok(Some(("c".into(), Some(ImageFormat::Raw)))));
        let part =
            r#","backing":{"driver":"raw","offset":512,"file":{"driver":"file","filename":"c"}}"#;
        assert!(of(part).is_err());
    }

    #[test]
    fn a_backing_file_may_be_a_part_of_a_file() {
        let backing = |name: &str, format: Option<&str>| Backing {
            name: name.into(),
            format: format.map(str::to_owned),
        };
        let name = r#"json:{"driver":"qcow2","file":{"driver":"raw","offset":512,"size":1024,
            "file":{"driver":"file","filename":"a.ova"}}}"#;
        let of_archive = backing(name, Some("qcow2"));
        let (plain, part) = plain_backing(&of_archive, "i").expect("a part");
        assert_eq!((&*plain.name, plain.format.as_deref()), (&b"a.ova"[..], Some("qcow2")));
        assert_eq!(part, Some(FilePart { offset: 512, size: Some(1024) }));
        assert!(whole_backing(&backing(name, None), "i").is_err());
        assert!(plain_backing(&backing(name, Some("raw")), "i").is_err());
        let by_object = r#"json:{"driver":"nbd","host":"h","port":"1","tls-creds":"t"}"#;
        assert!(plain_backing(&backing(by_object, None), "i").is_err());
        let remote = backing("nbd:h:1", Some("nbd"));
        let (plain, _) = plain_backing(&remote, "i").expect("an export");
        assert_eq!((&*plain.name, plain.format.as_deref()), (&b"nbd://h:1/"[..], Some("nbd")));
    }
}
