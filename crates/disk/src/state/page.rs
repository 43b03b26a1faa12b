//! The first page of a state file.
//!
//! Guarantees: a page that [`StatePage::load`] accepts has a known layout. Readers check the values
//! in the page, because another program of this user may have stored any words.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockhouse_core::StateMemory;

use super::identity::{BootId, ImageIdentity};

/// Bytes of the page. The redo log follows it.
pub(super) const PAGE_BYTES: usize = 4096;
/// Words of the page.
const PAGE_WORDS: usize = PAGE_BYTES / size_of::<u64>();

/// "BHState", and the version of the layout.
const MAGIC: u64 = 0x4248_5374_6174_6501;

// The words of the page.
const MAGIC_WORD: usize = 0;
const BOOT_ID_WORDS: [usize; 2] = [1, 2];
const DEVICE_WORD: usize = 3;
const INODE_WORD: usize = 4;
const BIRTH_WORD: usize = 5;
const PROCESS_WORD: usize = 6;
const LAST_WRITE_WORD: usize = 7;
/// The errno of a failed flush of the image, and of its data file.
const FAILURE_WORDS: [usize; 2] = [8, 9];
const CLEAN_WORD: usize = 10;
const LAST_DATA_WRITE_WORD: usize = 11;
const DEVICE_WRITES_WORD: usize = 12;
const MODIFIED_BEFORE_WORD: usize = 13;
const OPENED_WORD: usize = 14;
const PATH_LENGTH_WORD: usize = 15;
const PATH_WORDS: std::ops::Range<usize> = 16..PAGE_WORDS;

/// The largest errno of Linux (`MAX_ERRNO`).
const MAX_ERRNO: u64 = 4095;

/// The file of an image that a flush tracker tracks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrackedFile {
    /// The file with the metadata, and with the data if there is no external data file.
    Image = 0,
    /// The external data file.
    Data = 1,
}

/// The owner of a state file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The boot of the host in which the state file was made.
    pub boot: BootId,
    /// The image.
    pub image: ImageIdentity,
    /// The image's path, for people.
    pub path: PathBuf,
    /// The process that made the file, for people.
    pub process: u32,
}

/// The first page of a state file. Clones share the page.
#[derive(Clone)]
pub struct StatePage {
    memory: Arc<dyn StateMemory>,
}

impl StatePage {
    /// A new page in `memory`, which has at least `PAGE_BYTES` bytes, all of them zero.
    pub fn create(memory: Arc<dyn StateMemory>, owner: &Owner) -> Self {
        let page = Self { memory };
        let [low, high] = owner.boot.words();
        for (word, value) in [
            (BOOT_ID_WORDS[0], low),
            (BOOT_ID_WORDS[1], high),
            (DEVICE_WORD, owner.image.device),
            (INODE_WORD, owner.image.inode),
            (BIRTH_WORD, owner.image.birth),
            (PROCESS_WORD, owner.process.into()),
        ] {
            page.memory.store(word, value);
        }
        page.store_path(&owner.path);
        page.memory.store(MAGIC_WORD, MAGIC);
        page
    }

    /// The page of an existing file; `None` if this version does not know its format.
    pub(crate) fn load(memory: Arc<dyn StateMemory>) -> Option<Self> {
        let is_known = memory.words() >= PAGE_WORDS && memory.load(MAGIC_WORD) == MAGIC;
        is_known.then_some(Self { memory })
    }

    /// The file's owner.
    pub fn owner(&self) -> Owner {
        let word = |index| self.memory.load(index);
        Owner {
            boot: BootId::of_words(BOOT_ID_WORDS.map(word)),
            image: ImageIdentity {
                device: word(DEVICE_WORD),
                inode: word(INODE_WORD),
                birth: word(BIRTH_WORD),
            },
            path: self.load_path(),
            process: word(PROCESS_WORD) as u32,
        }
    }

    /// The time of the last write to the image, or of its opening: nanoseconds since the Unix
    /// epoch.
    pub fn last_write(&self) -> u64 {
        self.memory.load(LAST_WRITE_WORD)
    }

    /// The time of the last write to the data file, or of its last change before the opening; 0 if
    /// unknown.
    pub fn last_data_write(&self) -> u64 {
        self.memory.load(LAST_DATA_WRITE_WORD)
    }

    /// The time of the last write to a file.
    pub(super) fn last_write_to(&self, file: TrackedFile) -> u64 {
        match file {
            TrackedFile::Image => self.last_write(),
            TrackedFile::Data => self.last_data_write(),
        }
    }

    /// Notes the time of a write to a file.
    pub(super) fn set_last_write_to(&self, file: TrackedFile, nanoseconds: u64) {
        let word = match file {
            TrackedFile::Image => LAST_WRITE_WORD,
            TrackedFile::Data => LAST_DATA_WRITE_WORD,
        };
        self.memory.store(word, nanoseconds);
    }

    /// Notes that the data file had its present content at this time.
    pub fn raise_last_data_write(&self, nanoseconds: u64) {
        let last = self.last_data_write().max(nanoseconds);
        self.set_last_write_to(TrackedFile::Data, last);
    }

    /// Upper limit of the kernel's count of sectors written to the block device that is the data
    /// file. A higher count means that another program writes to the device. A word of
    /// [`DeviceWrites`](blockhouse_engine::DeviceWrites); 0 if sectors are not counted.
    pub fn device_writes(&self) -> u64 {
        self.memory.load(DEVICE_WRITES_WORD)
    }

    /// Sets [`device_writes`](Self::device_writes).
    pub fn set_device_writes(&self, word: u64) {
        self.memory.store(DEVICE_WRITES_WORD, word);
    }

    /// The modification time of the image's file before it was opened, by the clock of its file
    /// system; 0 if unknown. Nanoseconds since the Unix epoch, as [`opened`](Self::opened).
    pub fn modified_before(&self) -> u64 {
        self.memory.load(MODIFIED_BEFORE_WORD)
    }

    /// The time at which the image was opened.
    pub fn opened(&self) -> u64 {
        self.memory.load(OPENED_WORD)
    }

    /// Sets [`opened`](Self::opened) and [`modified_before`](Self::modified_before) in a new page.
    pub fn set_opened(&self, opened: u64, modified_before: u64) {
        self.memory.store(MODIFIED_BEFORE_WORD, modified_before);
        self.memory.store(OPENED_WORD, opened);
        self.raise_last_write(opened);
    }

    /// Notes that the image had its present content at this time.
    pub fn raise_last_write(&self, nanoseconds: u64) {
        let last = self.last_write().max(nanoseconds);
        self.set_last_write_to(TrackedFile::Image, last);
    }

    /// The errno of the first failed flush of a file.
    pub fn failure(&self, file: TrackedFile) -> Option<i32> {
        let errno = self.memory.load(FAILURE_WORDS[file as usize]);
        (1..=MAX_ERRNO).contains(&errno).then_some(errno as i32)
    }

    /// Keeps the errno of a failed flush, unless an errno is kept already.
    pub fn set_failure(&self, file: TrackedFile, errno: i32) {
        if self.failure(file).is_none() {
            self.memory.store(FAILURE_WORDS[file as usize], errno as u64);
        }
    }

    /// Forgets failures of flushes, after an orderly end.
    pub(crate) fn clear_failures(&self) {
        for word in FAILURE_WORDS {
            self.memory.store(word, 0);
        }
    }

    /// Whether the image was closed in order, but the changes in the redo log could not be written
    /// to the disk.
    pub fn is_clean(&self) -> bool {
        self.memory.load(CLEAN_WORD) != 0
    }

    pub(crate) fn set_clean(&self) {
        self.memory.store(CLEAN_WORD, 1);
    }

    /// Stores the path; a path that is too long is truncated.
    fn store_path(&self, path: &Path) {
        let bytes = path.as_os_str().as_bytes();
        let length = bytes.len().min(PATH_WORDS.len() * size_of::<u64>());
        for (word, chunk) in PATH_WORDS.zip(bytes[..length].chunks(size_of::<u64>())) {
            let mut value = [0; size_of::<u64>()];
            value[..chunk.len()].copy_from_slice(chunk);
            self.memory.store(word, u64::from_le_bytes(value));
        }
        self.memory.store(PATH_LENGTH_WORD, length as u64);
    }

    fn load_path(&self) -> PathBuf {
        let length = self.memory.load(PATH_LENGTH_WORD);
        let length = length.min((PATH_WORDS.len() * size_of::<u64>()) as u64) as usize;
        let words = PATH_WORDS.take(length.div_ceil(size_of::<u64>()));
        let mut bytes: Vec<u8> =
            words.flat_map(|word| self.memory.load(word).to_le_bytes()).collect();
        bytes.truncate(length);
        OsStr::from_bytes(&bytes).into()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    pub(crate) fn memory(words: usize) -> Arc<Vec<AtomicU64>> {
        Arc::new(std::iter::repeat_with(AtomicU64::default).take(words).collect())
    }

    pub(crate) fn owner() -> Owner {
        Owner {
            boot: BootId::of_words([1, u64::MAX]),
            image: ImageIdentity { device: 0xfe00, inode: 77, birth: 1_700_000_000_000_000_001 },
            path: "/images/disk.qcow2".into(),
            process: 4321,
        }
    }

    #[test]
    fn a_page_says_whose_it_is_after_its_process_died() {
        let memory = memory(PAGE_WORDS);
        assert!(StatePage::load(memory.clone()).is_none(), "zeros are no page");
        let page = StatePage::create(memory.clone(), &owner());
        page.set_last_write_to(TrackedFile::Image, 55);
        page.set_clean();
        drop(page);
        let page = StatePage::load(memory).expect("the page");
        assert_eq!((page.owner(), page.last_write(), page.is_clean()), (owner(), 55, true));
    }

    #[test]
    fn the_first_failure_of_each_file_is_kept_until_it_is_cleared() {
        let page = StatePage::create(memory(PAGE_WORDS), &owner());
        page.set_failure(TrackedFile::Data, 28);
        page.set_failure(TrackedFile::Data, 5);
        assert_eq!(page.failure(TrackedFile::Image), None);
        assert_eq!(page.failure(TrackedFile::Data), Some(28));
        page.clear_failures();
        assert_eq!(page.failure(TrackedFile::Data), None);
    }

    #[test]
    fn long_paths_lose_their_end() {
        let path = PathBuf::from(format!("/{}", "x".repeat(PAGE_BYTES)));
        let page = StatePage::create(memory(PAGE_WORDS), &Owner { path, ..owner() });
        let kept = page.owner().path;
        assert_eq!(kept.as_os_str().len(), (PAGE_WORDS - 16) * 8);
        assert!(kept.as_os_str().as_bytes()[1..].iter().all(|&byte| byte == b'x'));
    }

    #[test]
    fn pages_of_any_words_are_read_without_a_panic() {
        let short = memory(PAGE_WORDS - 1);
        short.store(MAGIC_WORD, MAGIC);
        assert!(StatePage::load(short).is_none(), "a truncated page");
        let hostile = memory(PAGE_WORDS);
        (0..PAGE_WORDS).for_each(|word| hostile.store(word, u64::MAX));
        assert!(StatePage::load(hostile.clone()).is_none(), "another magic");
        hostile.store(MAGIC_WORD, MAGIC);
        let page = StatePage::load(hostile).expect("its magic is right");
        assert_eq!(page.owner().path.as_os_str().len(), (PAGE_WORDS - 16) * 8);
        assert_eq!(page.failure(TrackedFile::Image), None, "no errno of Linux");
    }
}
