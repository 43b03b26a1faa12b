//! Units of our package in the guest, and the sockets and images of services.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::client::{Change, Client};
use super::system::tool;

/// The longest time of an operation under emulation on a busy host.
const TIMEOUT: Duration = Duration::from_secs(300);
const RETRY_DELAY: Duration = Duration::from_millis(200);
/// The folder of the images of the service of all disks.
pub const IMAGES: &str = "/var/lib/blockhouse";
/// The folder with a folder for each service of one image, which has the image's name.
pub const OWN_IMAGES: &str = "/var/lib/blockhouse-images";
/// The folder with the sockets of each service of one image, in a folder with the image's name.
const RUNTIME: &str = "/run/blockhouse-images";

/// A unit of ours.
#[derive(Clone, Copy)]
pub struct Unit(pub &'static str);

impl Unit {
    /// A property, as systemctl shows it.
    pub fn property(self, name: &str) -> Result<String> {
        tool("systemctl", &["show", "--value", "--property", name, self.0])
    }

    /// Waits until a property has this value.
    pub fn wait_for(self, name: &str, value: &str) -> Result<()> {
        let is_it = || Ok((self.property(name)? == value).then_some(()));
        until(&format!("{name}={value} of {}", self.0), is_it)
    }

    /// The process of a service that runs.
    pub fn process(self) -> Result<i32> {
        let id: i32 = self.property("MainPID")?.parse()?;
        ensure!(id != 0, "{} does not run", self.0);
        Ok(id)
    }

    /// Kills its process.
    pub fn kill(self) -> Result<()> {
        self.signal("KILL")
    }

    /// Sends its process a signal.
    pub fn signal(self, signal: &str) -> Result<()> {
        tool("systemctl", &["kill", "--kill-whom=main", "--signal", signal, self.0]).map(drop)
    }

    /// Overrides settings of the unit in the package, until the package is removed.
    pub fn override_with(self, text: &str) -> Result<()> {
        let folder = Path::new("/run/systemd/system").join(format!("{}.d", self.0));
        std::fs::create_dir_all(&folder)?;
        std::fs::write(folder.join("scene.conf"), text)?;
        tool("systemctl", &["daemon-reload"]).map(drop)
    }
}

/// Waits until `found` returns a value, and returns it.
pub fn until<T>(what: &str, mut found: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let end = Instant::now() + TIMEOUT;
    loop {
        if let Some(found) = found()? {
            return Ok(found);
        }
        ensure!(Instant::now() < end, "{what} did not come within {} s", TIMEOUT.as_secs());
        std::thread::sleep(RETRY_DELAY);
    }
}

/// Makes the image of a service of one image, as root: the service manager changes its owner to the
/// service's user.
pub fn make_own_image(name: &str) -> Result<PathBuf> {
    let folder = Path::new(OWN_IMAGES).join(name);
    std::fs::create_dir_all(&folder)?;
    let path = folder.join(name);
    tool("blockhouse", &["create", path.to_str().unwrap_or_default(), "64M"])?;
    Ok(path)
}

/// Makes an image as the user of the service of all disks.
pub fn make_image(name: &str) -> Result<PathBuf> {
    let path = Path::new(IMAGES).join(name);
    let words =
        ["-u", "blockhouse", "--", "blockhouse", "create", path.to_str().unwrap_or_default()];
    tool("runuser", &[&words[..], &["64M"]].concat())?;
    Ok(path)
}

/// The path of a socket of the service of an image.
pub fn socket(image: &str, name: &str) -> PathBuf {
    Path::new(RUNTIME).join(image).join(name)
}

/// The output of `blockhouse ctl SOCKET`.
pub fn ctl(socket: &Path, words: &[&str]) -> Result<String> {
    tool("blockhouse", &[&["ctl", socket.to_str().unwrap_or_default()], words].concat())
}

/// Writes a block without making it durable.
pub fn write(client: &mut Client, offset: u64, byte: u8) -> Result<()> {
    client.change(&Change::Write { offset, data: vec![byte; 4096] })
}

/// Fails unless a block is full of this byte.
pub fn has(client: &mut Client, offset: u64, byte: u8) -> Result<()> {
    let found = client.read(offset, 4096)?;
    ensure!(found == vec![byte; 4096], "{byte} was written at {offset}, {} is there", found[0]);
    Ok(())
}
