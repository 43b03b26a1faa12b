//! The options of all commands that open images, and how images are opened by tools.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use blockhouse_config::server::StateSetup;
use blockhouse_disk::{Access, ImageFormat, StateDir};
use blockhouse_format::qcow2::NewEncryption;
use blockhouse_images::{
    AllowedPaths, CacheMode, FilePart, ImageOptions, KeyFiles, Locking, Probing, RemoteBacking,
    Secrets, StateUse, probe_nameless,
};
use blockhouse_storage::Location;

use crate::create_options::ChosenEncryption;
use crate::image_opts::Named;
use crate::secret_object::{self, Object, SecretObject};
use crate::{called_as, output};

/// The variable of the environment that has further paths for `--allow-path`, separated by colons:
/// for programs that call a QEMU tool and cannot add an option.
const ALLOWED_PATHS: &str = "BLOCKHOUSE_ALLOW_PATH";

/// The variable of the environment that acts as `--allow-remote` if it is 1, for callers of
/// qemu-img that give the image's format.
const ALLOW_REMOTE: &str = "BLOCKHOUSE_ALLOW_REMOTE";

/// The paths in [`ALLOWED_PATHS`] that exist. A missing path allows nothing and is no error,
/// because the same environment may be used on many hosts.
fn allowed_by_environment() -> Vec<PathBuf> {
    let paths = std::env::var_os(ALLOWED_PATHS).unwrap_or_default();
    std::env::split_paths(&paths).filter(|path| path.exists()).collect()
}

/// The files that images may name (docs/security.md).
#[derive(clap::Args, Clone, Debug)]
pub struct AllowPathArgs {
    /// Let images name files below this folder, or this file, as their backing files and data
    /// files. May be repeated.
    ///
    /// Without it an image may name only regular files below its own folder, in paths without a
    /// leading dot in any name, and only its own data file is written to (docs/security.md).
    /// Reason: an untrusted image can name any file of this host. Paths on the command line are not
    /// restricted. The name of an image on another server, as 'rbd:POOL/IMAGE?conf=FILE&id=USER',
    /// allows that image with the files and the user that it names.
    #[arg(long, value_name = "DIR")]
    pub allow_path: Vec<PathBuf>,
    /// Let images name exports of other servers (nbd://...) and images in Ceph (rbd:...) as their
    /// backing files.
    #[arg(long)]
    pub allow_remote: bool,
}

impl AllowPathArgs {
    /// The files that images may name, by the options and the environment.
    ///
    /// # Errors
    /// A path of an option is missing; the error names it.
    pub fn allowed_paths(&self) -> blockhouse_core::Result<AllowedPaths> {
        AllowedPaths::new(&self.paths())
    }

    /// The paths of the options, and those of the environment.
    pub fn paths(&self) -> Vec<PathBuf> {
        self.allow_path.iter().cloned().chain(allowed_by_environment()).collect()
    }
}

/// The files that images may name, or a ban on all names.
#[derive(clap::Args, Clone, Debug)]
pub struct ReferenceArgs {
    #[command(flatten)]
    pub allow: AllowPathArgs,
    /// Open no file and no server that an image names, except below --allow-path: no backing file,
    /// no data file, no external extents. For untrusted images; 'info --json' lists all names in an
    /// image.
    #[arg(long, conflicts_with = "allow_remote")]
    pub no_references: bool,
}

impl ReferenceArgs {
    /// Restricts images to the allowed paths, because their formats were probed.
    pub fn follow_only_allowed(&mut self) {
        self.allow.allow_path = self.paths_of_probed();
        self.no_references = true;
    }

    /// The files that images may name.
    ///
    /// # Errors
    /// A path of an option is missing; the error names it.
    pub fn allowed_paths(&self) -> blockhouse_core::Result<AllowedPaths> {
        if self.no_references {
            AllowedPaths::only(&self.paths())
        } else {
            AllowedPaths::new(&self.paths())
        }
    }

    /// The only paths that an image may name if its format was probed: those of the options, and
    /// under the name of a QEMU tool those of the environment. Reason: callers of a QEMU tool may
    /// be unable to name a format.
    fn paths_of_probed(&self) -> Vec<PathBuf> {
        match called_as::tool() {
            Some(_) => self.paths(),
            None => self.allow.allow_path.clone(),
        }
    }

    /// The paths that images may name: those of the options, and without --no-references also those
    /// of the environment.
    pub fn paths(&self) -> Vec<PathBuf> {
        if self.no_references { self.allow.allow_path.clone() } else { self.allow.paths() }
    }
}

/// The options for a tool that reads only metadata. If changes that a killed server acknowledged
/// are missing, a warning is printed.
pub fn of_metadata(options: ImageOptions) -> ImageOptions {
    let state = match options.state {
        StateUse::Replay(dir) => StateUse::Look(dir),
        other => other,
    };
    ImageOptions { state, ..options }
}

/// The lock of an image that a tool only reads: none, because the image may be in use. Under the
/// name qemu-img a file is locked unless the caller shares it. Reason: the failure tells callers
/// that the image is in use.
pub fn look_locking(path: &Path, is_shared: bool) -> Locking {
    let is_file = matches!(Location::of(path), Ok(Location::File(_)));
    if called_as::is_qemu_img() && is_file && !is_shared { Locking::Held } else { Locking::None }
}

/// The keys of encrypted images.
#[derive(clap::Args, Clone, Debug)]
pub struct KeyArgs {
    /// A file whose whole content is the key of an encrypted image, up to 64 KiB. May be repeated.
    ///
    /// Each key is tried on each encrypted image that is opened, its backing files included.
    #[arg(long, value_name = "FILE")]
    pub key_file: Vec<PathBuf>,
    /// A file whose first line is the passphrase of an encrypted image, without its line feed. May
    /// be repeated.
    ///
    /// It may be a pipe, such as /dev/stdin or /dev/fd/3.
    #[arg(long, value_name = "FILE")]
    pub passphrase_file: Vec<PathBuf>,
    /// A key file in QEMU's syntax: secret,id=ID,file=FILE. May be repeated.
    #[arg(long, hide = true, value_name = "secret,id=ID,file=FILE", value_parser = secret_object::parse)]
    object: Vec<Object>,
    /// The keys and passphrases, once they were read. Reason: a pipe can be read only once.
    #[arg(skip)]
    secrets: Arc<OnceLock<Secrets>>,
}

impl KeyArgs {
    /// The files of the keys and passphrases that were named.
    pub fn files(&self) -> KeyFiles {
        let named = self.named().map(|object| object.file.clone());
        let keys = self.key_file.iter().cloned().chain(named).collect();
        KeyFiles { keys, passphrases: self.passphrase_file.clone() }
    }

    fn named(&self) -> impl Iterator<Item = &SecretObject> {
        self.object.iter().filter_map(|object| match object {
            Object::Secret(secret) => Some(secret),
            Object::Tls => None,
        })
    }

    /// A LUKS header for a new image. The key of this name, or without a name the first key, opens
    /// it in about `time`.
    ///
    /// # Errors
    /// No key has this name, or there is no key at all; as [`KeyFiles::read`].
    pub fn create_header(&self, name: Option<&str>, time: Duration) -> Result<Vec<u8>> {
        let index = name.map_or(Ok(0), |name| self.index_of(name))?;
        Ok(self.secrets()?.create_header(index, time)?)
    }

    /// The encryption of a new qcow2 image, with the key of this name, or without a name the first
    /// key.
    ///
    /// # Errors
    /// As [`create_header`](Self::create_header).
    pub fn new_encryption(
        &self,
        chosen: Option<ChosenEncryption>,
        name: Option<&str>,
    ) -> Result<Option<NewEncryption>> {
        let Some(chosen) = chosen else { return Ok(None) };
        Ok(Some(match chosen {
            ChosenEncryption::Luks(time) => NewEncryption::Luks(self.create_header(name, time)?),
            ChosenEncryption::Aes => {
                let index = name.map_or(Ok(0), |name| self.index_of(name))?;
                self.secrets()?.check_is_there(index)?;
                NewEncryption::Aes
            }
        }))
    }

    /// The index of the key with this name.
    ///
    /// # Errors
    /// No key has this name.
    pub fn index_of(&self, name: &str) -> Result<usize> {
        let index = self.named().position(|object| object.id == name);
        let missing = || {
            if called_as::is_qemu_img() {
                format!("No secret with id '{name}'")
            } else {
                format!("there is no secret '{name}'; say --object secret,id={name},file=FILE")
            }
        };
        Ok(self.key_file.len() + index.with_context(missing)?)
    }

    /// The keys.
    ///
    /// # Errors
    /// As [`KeyFiles::read`].
    pub fn secrets(&self) -> blockhouse_core::Result<Secrets> {
        match self.secrets.get() {
            Some(secrets) => Ok(secrets.clone()),
            None => {
                let secrets = self.files().read()?;
                Ok(self.secrets.get_or_init(|| secrets).clone())
            }
        }
    }
}

/// The options of all commands that open images, `serve` excepted, which has a `--state` of its
/// own.
#[derive(clap::Args, Clone)]
pub struct OpenArgs {
    #[command(flatten)]
    references: ReferenceArgs,
    #[command(flatten)]
    keys: KeyArgs,
    /// The directory of the state files of the image's server (its --state). If the server was
    /// killed, commands that change the image first apply the changes it acknowledged, commands
    /// that read data fail, and commands that read only metadata warn. Left out: the default
    /// directory of servers; off: none.
    #[arg(long, value_name = "DIR|off")]
    state: Option<PathBuf>,
}

impl OpenArgs {
    /// As [`read_only`](Self::read_only), for the image at `path`, or in `part` of that file. If
    /// neither the caller nor the image's name gives the format, the format is probed. Then the
    /// image may name only files whose paths the user has allowed. Reason: a guest may have written
    /// the whole image.
    ///
    /// # Errors
    /// As [`read_only`](Self::read_only); also if the file cannot be read.
    pub fn read_image(
        &self,
        path: &Path,
        format: Option<ImageFormat>,
        part: Option<FilePart>,
    ) -> Result<ImageOptions> {
        let is_tool = called_as::tool().is_some();
        let how = if is_tool { Probing::ToRead } else { Probing::Nameless };
        self.probed(path, format, part, how)
    }

    /// As [`read_image`](Self::read_image), for an image that options may name: locked against
    /// writers, unless the options or the caller share it.
    ///
    /// # Errors
    /// As [`read_image`](Self::read_image).
    pub fn read_named(&self, named: Named, force_share: bool) -> Result<(PathBuf, ImageOptions)> {
        let Named { path, format, part, is_shared, backing_use, data_file, .. } = named;
        let locking = if is_shared || force_share { Locking::None } else { Locking::Held };
        let options = self.read_image(&path, format, part)?;
        Ok((path, ImageOptions { locking, backing_use, data_file, ..options }))
    }

    /// As [`read_write`](Self::read_write), for an image that options may name.
    ///
    /// # Errors
    /// As [`read_write`](Self::read_write).
    pub fn change_named(&self, named: &Named) -> Result<ImageOptions> {
        let options = self.read_write(&named.path, named.format)?;
        Ok(ImageOptions { data_file: named.data_file.clone(), ..options })
    }

    fn probed(
        &self,
        path: &Path,
        format: Option<ImageFormat>,
        part: Option<FilePart>,
        how: Probing,
    ) -> Result<ImageOptions> {
        let by_content = how != Probing::Nameless;
        let found = if format.is_none() { probe_nameless(path, part, how)? } else { None };
        let options = self.read_only(format.or(found))?;
        let remote_backing = self.remote_backing(format);
        let options = ImageOptions { part, probes_exports: by_content, remote_backing, ..options };
        let Some(found) = found else { return Ok(options) };
        if !output::is_quiet() && called_as::tool().is_none() {
            output::tell(&format!(
                "blockhouse: {}: its name says no format; it looks like {} and is read as that",
                path.display(),
                found.as_str()
            ));
        }
        let allowed_paths = AllowedPaths::only(&self.references.paths_of_probed())?;
        Ok(ImageOptions { allowed_paths, ..options })
    }

    /// Options to open an image that a tool reads. The open fails if changes that a killed server
    /// acknowledged are missing.
    ///
    /// # Errors
    /// A directory that was named cannot be used.
    pub fn read_only(&self, format: Option<ImageFormat>) -> Result<ImageOptions> {
        let allowed_paths = self.references.allowed_paths()?;
        let remote_backing = self.remote_backing(format);
        let secrets = self.secrets()?;
        let options = read_only(format, self.state_use()?);
        Ok(ImageOptions { allowed_paths, remote_backing, secrets, ..options })
    }

    /// Options to open the image at `path`, which a tool changes. The changes that a killed server
    /// acknowledged are applied first. Under the name of a QEMU tool the format is probed if
    /// neither the caller nor the image's name gives it, as in [`read_image`](Self::read_image).
    ///
    /// # Errors
    /// As [`read_image`](Self::read_image).
    pub fn read_write(&self, path: &Path, format: Option<ImageFormat>) -> Result<ImageOptions> {
        let options = match called_as::tool() {
            None => self.read_only(format)?,
            Some(_) => self.probed(path, format, None, Probing::ByContent)?,
        };
        Ok(ImageOptions { access: Access::ReadWrite, ..options })
    }

    /// The keys that were named, for a new image.
    pub fn keys(&self) -> &KeyArgs {
        &self.keys
    }

    /// The keys that were named.
    ///
    /// # Errors
    /// As [`KeyFiles::read`].
    pub fn secrets(&self) -> blockhouse_core::Result<Secrets> {
        self.keys.secrets()
    }

    /// The files that images may name, and the file `named`, which the user named in another way.
    ///
    /// # Errors
    /// A path is missing; the error names it.
    pub fn allowed_paths(
        &self,
        named: impl Iterator<Item = PathBuf>,
    ) -> blockhouse_core::Result<AllowedPaths> {
        let paths: Vec<_> = self.references.paths().into_iter().chain(named).collect();
        AllowedPaths::new(&paths)
    }

    /// Whether an image may name other servers: by the option, or under the name qemu-img by the
    /// environment if the caller gave `format`. Reason: a guest can choose a format that is probed.
    pub fn remote_backing(&self, format: Option<ImageFormat>) -> RemoteBacking {
        let ReferenceArgs { allow, no_references } = &self.references;
        let may_ask = called_as::is_qemu_img() && format.is_some() && !no_references;
        let is_set = || std::env::var_os(ALLOW_REMOTE).is_some_and(|value| value == "1");
        if allow.allow_remote || (may_ask && is_set()) {
            RemoteBacking::Allowed
        } else {
            RemoteBacking::Refused
        }
    }

    /// The use of the state files of killed servers.
    ///
    /// # Errors
    /// The directory that was named cannot be used.
    pub fn state_use(&self) -> Result<StateUse> {
        Ok(match StateSetup::at(self.state.as_deref()) {
            StateSetup::Off => StateUse::Off,
            StateSetup::Dir(path) => StateUse::Replay(Some(StateDir::open(&path)?)),
            StateSetup::Usual => StateUse::Replay(StateDir::find_default()),
        })
    }
}

/// The error of opening an image whose format the user gives by `option`. The hints of the error
/// name `--format`, which is the format of another image there. Under the name of a QEMU tool the
/// error stays as it is, because that tool's words replace it.
pub fn name_format_option(error: impl Into<anyhow::Error>, option: &str) -> anyhow::Error {
    let error = error.into();
    let text = error.to_string();
    if called_as::tool().is_none() && text.contains("say --format ") {
        anyhow!(text.replace("say --format ", &format!("say {option} ")))
    } else {
        error
    }
}

/// Options to open an image that a tool only reads, with defaults for keys and for the files that
/// the image may name.
pub fn read_only(format: Option<ImageFormat>, state: StateUse) -> ImageOptions {
    ImageOptions {
        format,
        access: Access::ReadOnly,
        cache: CacheMode::Writeback,
        state,
        ..ImageOptions::default()
    }
}

/// The use of the page cache for an image that is changed: an option of qemu-img.
#[derive(clap::Args, Clone, Copy)]
pub struct TargetCacheArgs {
    /// The cache mode of writes. The writes are durable in the end in each mode.
    #[arg(short = 't', hide = true, value_name = "MODE")]
    #[arg(value_parser = clap::builder::ValueParser::new(str::parse::<CacheMode>))]
    target_cache: Option<CacheMode>,
}

/// The use of the page cache for an image that is only read: an option of qemu-img.
#[derive(clap::Args, Clone, Copy)]
pub struct SourceCacheArgs {
    /// The cache mode of reads.
    #[arg(short = 'T', hide = true, value_name = "MODE")]
    #[arg(value_parser = clap::builder::ValueParser::new(str::parse::<CacheMode>))]
    source_cache: Option<CacheMode>,
}

impl TargetCacheArgs {
    /// The options with this mode.
    pub fn apply(self, options: ImageOptions) -> ImageOptions {
        with_cache(options, self.target_cache)
    }
}

impl SourceCacheArgs {
    /// The options with this mode.
    pub fn apply(self, options: ImageOptions) -> ImageOptions {
        with_cache(options, self.source_cache)
    }
}

fn with_cache(options: ImageOptions, mode: Option<CacheMode>) -> ImageOptions {
    let cache = match mode {
        // Tools flush their writes even in this mode.
        Some(CacheMode::Unsafe) => CacheMode::Writeback,
        Some(mode) => mode,
        None => options.cache,
    };
    ImageOptions { cache, ..options }
}
