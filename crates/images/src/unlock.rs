//! The keys of encrypted images.
//!
//! Key derivation takes seconds, so it runs on a thread of its own, and does not block the event
//! loop that opens the image.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{Error, ErrorKind, Result, Storage};
use blockhouse_crypt::{KeyWork, Secret, aes_of_password, create_header, unlock};
use futures_channel::oneshot;

use blockhouse_disk::{DataEncryption, Image, ImageDisk, StoredImage};

/// The key derivation work of a new overlay, if no layer has PBKDF2 in all its key slots.
const USUAL_WORK: KeyWork = KeyWork::Time(Duration::from_secs(2));

/// The secrets for encrypted images: each is tried on each encrypted image of a chain.
#[derive(Clone, Debug, Default)]
pub struct Secrets(Vec<Arc<Secret>>);

impl FromIterator<Secret> for Secrets {
    fn from_iter<T: IntoIterator<Item = Secret>>(secrets: T) -> Self {
        Self(secrets.into_iter().map(Arc::new).collect())
    }
}

impl Secrets {
    /// The secrets that opened the images of this disk, that of the highest encrypted image first.
    pub fn of(disk: &ImageDisk) -> Self {
        Self(disk.image().encryptions().filter_map(DataEncryption::secret).cloned().collect())
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All secrets.
    pub(crate) fn all(&self) -> &[Arc<Secret>] {
        &self.0
    }

    /// The only secret, for an image without LUKS, which cannot verify a secret.
    ///
    /// # Errors
    /// The number of secrets is not one.
    fn only(&self, image: &str) -> Result<&Arc<Secret>> {
        match &self.0[..] {
            [secret] => Ok(secret),
            _ => {
                let what =
                    "is encrypted without LUKS, and does not tell which of several keys it has";
                Err(Error::new(ErrorKind::InvalidInput, what).on(image).hint("name its key alone"))
            }
        }
    }

    /// The LUKS header of a new image. The secret of this index unlocks it, which takes about
    /// `time` for the key derivation: see [`create_header`].
    ///
    /// # Errors
    /// As [`create_header`]; `InvalidInput` if there is no such secret.
    pub fn create_header(&self, index: usize, time: Duration) -> Result<Vec<u8>> {
        create_header(self.get(index)?, KeyWork::Time(time))
    }

    /// The LUKS header of a new overlay over `image`. The first secret unlocks it. Does not block
    /// the event loop of the current thread.
    ///
    /// A trial of a secret takes as many iterations as with the highest image of the chain that has
    /// PBKDF2 in all slots. Reason: the secret is the same, so more iterations protect nothing, and
    /// each fork takes longer than the user has chosen.
    pub(crate) async fn create_overlay_header<S: Storage>(
        &self,
        name: &str,
        image: &Image<S>,
    ) -> Result<Vec<u8>> {
        let secret = Arc::clone(self.get(0)?);
        let work = image
            .encryptions()
            .find_map(DataEncryption::iterations)
            .map_or(USUAL_WORK, KeyWork::Iterations);
        derived(move || create_header(&secret, work), name).await?
    }

    /// Checks that the secret of this index exists, for a new image that would be encrypted with
    /// it.
    ///
    /// # Errors
    /// `InvalidInput` if there is no such secret.
    pub fn check_is_there(&self, index: usize) -> Result<()> {
        self.get(index).map(drop)
    }

    fn get(&self, index: usize) -> Result<&Arc<Secret>> {
        self.0.get(index).ok_or_else(|| {
            let what = "an encrypted image needs a key";
            let error = Error::new(ErrorKind::InvalidInput, what);
            error.hint("name it: --key-file FILE, or --passphrase-file FILE")
        })
    }
}

/// The files with the keys of encrypted images, as a user names them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyFiles {
    /// Files whose whole content is a key.
    pub keys: Vec<PathBuf>,
    /// Files whose first line is a passphrase.
    pub passphrases: Vec<PathBuf>,
}

impl KeyFiles {
    /// Reads all files. Blocks while a pipe among them has no data.
    ///
    /// # Errors
    /// As [`Secret::from_key_file`].
    pub fn read(&self) -> Result<Secrets> {
        let keys = self.keys.iter().map(|path| Secret::from_key_file(path));
        let lines = self.passphrases.iter().map(|path| Secret::from_passphrase_file(path));
        keys.chain(lines).collect()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.paths().next().is_none()
    }

    /// The paths of all files.
    pub fn paths(&self) -> impl Iterator<Item = &PathBuf> {
        self.keys.iter().chain(&self.passphrases)
    }
}

/// The treatment of an encrypted image for which there is no secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WithoutKey {
    /// The image is not opened.
    Refuse,
    /// The image is opened, and only its metadata can be read.
    StayLocked,
}

/// Gives an encrypted disk the key of its data.
///
/// # Errors
/// The error names the image: no secret opens it, or its header is damaged, or needs too much
/// memory or time.
pub(crate) async fn unlocked(
    disk: StoredImage,
    secrets: &Secrets,
    without: WithoutKey,
) -> Result<StoredImage> {
    if !disk.is_encrypted() || secrets.is_empty() && without == WithoutKey::StayLocked {
        return Ok(disk);
    }
    if secrets.is_empty() {
        let what = "the image is encrypted, and no key was named";
        let error = Error::new(ErrorKind::Unsupported, what).on(disk.name());
        return Err(error.hint("name it: --key-file FILE, or --passphrase-file FILE"));
    }
    let Some(encryption) = disk.read_encryption().await? else { return Ok(disk) };
    let Some(keys) = encryption.luks() else {
        let secret = Arc::clone(secrets.only(disk.name())?);
        let cipher = aes_of_password(&secret).map_err(|error| error.on(disk.name()))?;
        return disk.with_cipher(encryption, cipher, Some(secret));
    };
    let areas = keys.read_areas(disk.format().storage()).await?;
    let (header, secrets) = (keys.header().clone(), secrets.0.clone());
    let unlock = move || {
        let tried: Vec<&Secret> = secrets.iter().map(AsRef::as_ref).collect();
        let (cipher, index) = unlock(&header, &areas, &tried)?;
        Ok((cipher, Arc::clone(&secrets[index])))
    };
    let unlocked: Result<_> = derived(unlock, disk.name()).await?;
    let (cipher, secret) = unlocked.map_err(|error| error.on(disk.name()))?;
    disk.with_cipher(encryption, cipher, Some(secret))
}

/// The result of `derive`, which runs on a thread of its own, for the image of this name.
async fn derived<T: Send + 'static>(
    derive: impl FnOnce() -> T + Send + 'static,
    name: &str,
) -> Result<T> {
    let (send, receive) = oneshot::channel();
    let run = move || {
        // The future may have been dropped.
        let _ = send.send(derive());
    };
    let host = |error| Error::host("cannot derive its key", error).on(name);
    std::thread::Builder::new().name("blockhouse-key".into()).spawn(run).map_err(host)?;
    receive.await.map_err(|_| host(std::io::ErrorKind::Interrupted.into()))
}
