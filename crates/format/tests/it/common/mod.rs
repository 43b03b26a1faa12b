//! A storage over a host file, QEMU's tools, and a small I/O path for tests of formats.

pub mod foreign;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use blockhouse_core::{
    Allocation, Buffer, ByteRange, Capabilities, Durability, Error, ErrorKind, Extent, ExtentState,
    IoVector, Result, Storage, SyncMode, Unmap,
};
use blockhouse_format::qcow2::{self, Qcow2};
use blockhouse_format::{Abort, Intent, qcow2::Access};
use blockhouse_sim::{PLAIN_CAPABILITIES, SimDisk};

/// A host file, used at once.
pub struct FileStorage {
    name: String,
    file: File,
}

impl FileStorage {
    pub fn create(path: &Path) -> SimDisk {
        Self::with(path, OpenOptions::new().create(true).truncate(true))
    }

    pub fn open(path: &Path) -> SimDisk {
        Self::with(path, &mut OpenOptions::new())
    }

    fn with(path: &Path, options: &mut OpenOptions) -> SimDisk {
        let file = options.read(true).write(true).open(path).unwrap();
        SimDisk::wrapping(Self { name: path.display().to_string(), file })
    }
}

impl Storage for FileStorage {
    fn name(&self) -> &str {
        &self.name
    }

    fn capabilities(&self) -> Capabilities {
        PLAIN_CAPABILITIES
    }

    fn size(&self) -> u64 {
        self.file.metadata().unwrap().len()
    }

    async fn read(&self, offset: u64, mut into: IoVector) -> Result<()> {
        let mut bytes = vec![0; into.len()];
        let mut done = 0;
        while done < bytes.len() {
            match self.file.read_at(&mut bytes[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(error) => return Err(Error::host("cannot read", error)),
            }
        }
        into.copy_from(&bytes);
        Ok(())
    }

    async fn write(&self, offset: u64, from: IoVector, _durability: Durability) -> Result<()> {
        let mut bytes = vec![0; from.len()];
        from.copy_to(&mut bytes);
        let written = self.file.write_all_at(&bytes, offset);
        written.map_err(|error| Error::host("cannot write", error))
    }

    async fn write_zeroes(&self, _range: ByteRange, _unmap: Unmap) -> Result<()> {
        Err(Error::new(ErrorKind::Unsupported, "no zero writes"))
    }

    async fn discard(&self, _range: ByteRange) -> Result<()> {
        Err(Error::new(ErrorKind::Unsupported, "no discards"))
    }

    async fn flush(&self, _sync: SyncMode) -> Result<()> {
        Ok(())
    }

    async fn resize(&self, size: u64) -> Result<()> {
        self.file.set_len(size).map_err(|error| Error::host("cannot resize", error))
    }

    async fn block_status(&self, range: ByteRange) -> Result<(Allocation, u64)> {
        Ok((Allocation::Data, range.length()))
    }

    async fn prefetch(&self, _range: ByteRange) -> Result<()> {
        Ok(())
    }
}

/// Whether QEMU's tools are here; says so when they are not.
pub fn has_qemu() -> bool {
    let found = Command::new("qemu-img").arg("--version").output().is_ok();
    if !found {
        eprintln!("SKIPPED: qemu-img is not installed");
    }
    found
}

/// Runs a program of QEMU's and answers what it prints.
///
/// # Panics
/// When it fails.
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().expect(program);
    let (out, err) = (output.stdout, String::from_utf8_lossy(&output.stderr).into_owned());
    let out = String::from_utf8_lossy(&out).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {out}{err}");
    out
}

/// Carries out commands of qemu-io on an image.
pub fn qemu_io(path: &Path, commands: &[String]) {
    let path = path.display().to_string();
    let mut arguments = vec!["-f", "qcow2"];
    for command in commands {
        arguments.extend(["-c", command]);
    }
    arguments.push(&path);
    let out = run("qemu-io", &arguments);
    assert!(!out.contains("failed") && !out.contains("error"), "{commands:?}: {out}");
}

/// Lets qemu-img check the image.
///
/// # Panics
/// When it finds anything.
pub fn qemu_check(path: &Path) {
    let path = path.display().to_string();
    let output = Command::new("qemu-img").args(["check", "-f", "qcow2", &path]).output().unwrap();
    let words = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "qemu-img check {path}: {:?}: {words}", output.status);
}

/// Opens an image for reading.
pub async fn open_for_reading(path: &Path) -> Result<Qcow2<SimDisk>> {
    let options = qcow2::OpenOptions { access: Access::ReadOnly, ..Default::default() };
    Qcow2::open(FileStorage::open(path), options).await
}

/// The bytes of a range of the guest's disk; what is left to a backing file is `behind`.
pub async fn read(image: &Qcow2<SimDisk>, range: ByteRange, behind: u8) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut rest = range;
    while !rest.is_empty() {
        let extent = image.map(rest, Intent::Read).await?;
        assert!(extent.guest.offset() == rest.offset() && extent.guest.end() <= rest.end());
        let length = extent.guest.length() as usize;
        assert!(length > 0);
        match extent.state {
            ExtentState::Mapped { host } => {
                bytes.extend(read_host(image.storage(), host, length).await?)
            }
            ExtentState::Zero | ExtentState::Hole => bytes.resize(bytes.len() + length, 0),
            ExtentState::Backing => bytes.resize(bytes.len() + length, behind),
            ExtentState::Compressed { host, length: packed } => {
                let packed = read_host(image.storage(), host, packed as usize).await?;
                let mut cluster = vec![0; extent.alloc_range.length() as usize];
                qcow2::decompress(image.facts().compression, &packed, &mut cluster)
                    .map_err(|what| Error::new(ErrorKind::Corrupt, what).on("image").at(host))?;
                let start = (extent.guest.offset() - extent.alloc_range.offset()) as usize;
                bytes.extend_from_slice(&cluster[start..start + length]);
            }
        }
        rest = rest.skip(extent.guest.length());
    }
    Ok(bytes)
}

/// Bytes of a storage at any offset, whatever its alignment.
pub async fn read_host(storage: &SimDisk, offset: u64, length: usize) -> Result<Vec<u8>> {
    let block = u64::from(storage.capabilities().alignment.offset);
    let outer = ByteRange::between(offset, offset + length as u64).align_outward(block);
    let mut buffer = Buffer::new(outer.length() as usize);
    storage.read(outer.offset(), buffer.lend()).await?;
    let start = (offset - outer.offset()) as usize;
    Ok(buffer.bytes()[start..start + length].to_vec())
}

/// Writes `bytes` to the guest's disk as an I/O path would: what becomes visible together is
/// written together.
pub async fn write(image: &Qcow2<SimDisk>, offset: u64, bytes: &[u8], behind: u8) -> Result<()> {
    let mut rest = ByteRange::between(offset, offset + bytes.len() as u64);
    while !rest.is_empty() {
        let extent = image.map(rest, Intent::Write).await?;
        let start = (extent.guest.offset() - offset) as usize;
        let part = &bytes[start..][..extent.guest.length() as usize];
        store(image, extent, part, behind).await?;
        rest = rest.skip(extent.guest.length());
    }
    Ok(())
}

/// Stores the data of a prepared extent and commits it, or gives it back.
pub async fn store(image: &Qcow2<SimDisk>, extent: Extent, bytes: &[u8], behind: u8) -> Result<()> {
    let filled = fill(image, extent, bytes, behind).await;
    if filled.is_err() {
        image.abort(extent, Abort::Ended);
        return filled;
    }
    image.link(extent, Durability::None).await
}

async fn fill(image: &Qcow2<SimDisk>, extent: Extent, bytes: &[u8], behind: u8) -> Result<()> {
    let ExtentState::Mapped { host } = extent.state else {
        panic!("a place for data: {extent:?}");
    };
    let (guest, whole) = (extent.guest, extent.alloc_range);
    let head = ByteRange::between(whole.offset(), guest.offset());
    let tail = ByteRange::between(guest.end(), whole.end());
    let mut all = read(image, head, behind).await?;
    all.extend_from_slice(bytes);
    all.extend(read(image, tail, behind).await?);
    let mut buffer = Buffer::new(all.len());
    buffer.bytes_mut().copy_from_slice(&all);
    image.storage().write(host - head.length(), buffer.lend(), Durability::None).await
}

/// Makes a range zeros, or gives it back.
pub async fn unmap(
    image: &Qcow2<SimDisk>,
    range: ByteRange,
    intent: Intent,
    behind: u8,
) -> Result<()> {
    let mut rest = range;
    while !rest.is_empty() {
        let extent = image.map(rest, intent).await?;
        match extent.state {
            ExtentState::Mapped { .. } if intent != Intent::Discard => {
                let zeros = vec![0; extent.guest.length() as usize];
                store(image, extent, &zeros, behind).await?;
            }
            _ => image.link(extent, Durability::Data).await?,
        }
        rest = rest.skip(extent.guest.length());
    }
    Ok(())
}
