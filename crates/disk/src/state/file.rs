//! One mapped state file.
//!
//! Guarantees:
//! - A file has its name only when its first page is complete.
//! - The memory of the first page and of the start of the log is allocated when the file is made.
//!   The memory of the rest of the log is allocated when the rest is reserved (`log_memory`). So no
//!   store fails with ENOSPC.
//! - A file that is found is checked before it is used: whether it is a state file, of this boot of
//!   the host and of this image.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use blockhouse_core::{Result, StateMemory};
use blockhouse_engine::{FaultDomain, SharedMemory, VolatileSlice};
use blockhouse_format::redo_log_len;
use rustix::fs::{
    AtFlags, Mode, OFlags, RenameFlags, Uid, fchown, fstat, ftruncate, openat, renameat,
    renameat_with, unlinkat,
};
use rustix::io::Errno;

use super::dir::{ELSEWHERE, StateDir, is_own_file};
use super::identity::ImageIdentity;
use super::log_memory::LogMemory;
use super::page::{Owner, PAGE_BYTES, StatePage, TrackedFile};

/// The maximum bytes of a state file. A longer file is not mapped.
const MAX_BYTES: u64 = 1 << 28;

/// The suffix of the name of a file that no longer fits its image.
const REFUSED_SUFFIX: &str = ".refused";
/// Maximum number of refused files of an image, because each takes memory.
const MAX_ASIDE: usize = 8;
/// The suffix of the name of a file that is being made.
const NEW_SUFFIX: &str = ".new";

/// A state file, mapped. The file stays when this is dropped.
pub struct StateFile {
    dir: StateDir,
    name: String,
    page: StatePage,
    log: LogMemory,
}

/// The result of a search for the state file of an image.
pub enum FoundState {
    /// No file.
    Nothing,
    /// A file of another boot of the host: its content is void.
    OtherBoot(StateFile),
    /// A file of this boot and of another image: an image that had the same device and inode
    /// number, or a block device that was attached again since.
    OtherImage(StateFile),
    /// The file of a process that had this image open in this boot of the host.
    Usable(StateFile),
    /// A file that has the name of the state file, but is no usable state file.
    Foreign {
        /// The reason why it cannot be used.
        why: &'static str,
    },
}

impl StateFile {
    /// Makes the file of an image, replacing any other one, with a redo log of `log_words` words.
    /// `fill` completes the page before the file gets its name.
    ///
    /// # Errors
    /// Host errors, with the file's name. After an error, a former file of that name still exists.
    pub fn create(
        dir: &StateDir,
        owner: &Owner,
        log_words: usize,
        fill: impl FnOnce(&StatePage),
    ) -> Result<Self> {
        let name = owner.image.file_name();
        let new = format!("{name}{NEW_SUFFIX}");
        let make = || {
            let (page, log) = create_memory(dir, &new, log_words)?;
            let page = StatePage::create(Arc::new(page), owner);
            fill(&page);
            renameat(dir.directory(), &new, dir.directory(), &name)?;
            Ok((page, log))
        };
        match make() {
            Ok((page, log)) => Ok(Self { dir: dir.clone(), name, page, log }),
            Err(error) => {
                // The caller gets the first error.
                let _ = unlinkat(dir.directory(), &new, AtFlags::empty());
                Err(dir.failed("cannot make the state file", &name, error).hint(ELSEWHERE))
            }
        }
    }

    /// Looks for the state file of an image, and checks its boot of the host and its image.
    ///
    /// # Errors
    /// The host's, with the file's name.
    pub fn find(dir: &StateDir, image: ImageIdentity) -> Result<FoundState> {
        let name = image.file_name();
        let found = find_memory(dir, &name);
        let found = found.map_err(|error| dir.failed("cannot open the state file", &name, error));
        let (page, log) = match found? {
            FoundMemory::Nothing => return Ok(FoundState::Nothing),
            FoundMemory::Foreign { why } => return Ok(FoundState::Foreign { why }),
            FoundMemory::Mapped { page, log } => (page, log),
        };
        let Some(page) = StatePage::load(Arc::new(page)) else {
            return Ok(FoundState::Foreign { why: "it is no state file of this version" });
        };
        let file = Self { dir: dir.clone(), name, page, log };
        let owner = file.page.owner();
        Ok(match (owner.boot == dir.boot(), owner.image == image) {
            (true, true) => FoundState::Usable(file),
            (true, false) => FoundState::OtherImage(file),
            (false, _) => FoundState::OtherBoot(file),
        })
    }

    /// The first page.
    pub fn page(&self) -> &StatePage {
        &self.page
    }

    /// The memory of the redo log.
    pub fn log(&self) -> Arc<dyn StateMemory> {
        Arc::new(self.log.clone())
    }

    /// The number of changes in the redo log that the disk may lack.
    pub fn changes(&self) -> u64 {
        redo_log_len(&self.log)
    }

    /// Whether the file has no changes that the disk may lack, and no failure of a flush.
    pub fn is_empty(&self) -> bool {
        let has_failed = |file| self.page.failure(file).is_some();
        self.changes() == 0 && ![TrackedFile::Image, TrackedFile::Data].into_iter().any(has_failed)
    }

    /// The file's path, for messages.
    pub fn path(&self) -> String {
        self.dir.path_of(&self.name)
    }

    /// Removes the file after an orderly close of the image. A file with changes that could not be
    /// written to the image is kept.
    pub(crate) fn close(&self) {
        self.page.clear_failures();
        let changes = self.changes();
        if changes > 0 {
            self.page.set_clean();
            tracing::warn!(
                "{}: keeps {changes} answered changes that could not be written to {}: the image has them when it \
                 is opened for writing again before the host restarts",
                self.path(),
                self.page.owner().path.display()
            );
            return;
        }
        if let Err(error) = self.remove() {
            tracing::warn!("{error}");
        }
    }

    /// Removes the file. Later stores of a process that has the file mapped have no effect.
    ///
    /// # Errors
    /// The host's, with the file's name.
    pub fn remove(&self) -> Result<()> {
        match unlinkat(self.dir.directory(), &self.name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => {
                Err(self.dir.failed("cannot remove the state file", &self.name, error.into()))
            }
        }
    }

    /// Renames an image's state file to a free name, so that each refused file can be examined. If
    /// `MAX_ASIDE` names are in use, the last one is replaced. Returns the path, for messages.
    ///
    /// # Errors
    /// The host's, with the file's name.
    pub fn set_aside(dir: &StateDir, image: ImageIdentity) -> Result<String> {
        let name = image.file_name();
        let failed = |error: Errno| {
            let failed = dir.failed("cannot set the state file aside", &name, error.into());
            failed.hint("remove it, and what has its name with .refused")
        };
        let mut number = 1;
        loop {
            let aside = match number {
                1 => format!("{name}{REFUSED_SUFFIX}"),
                _ => format!("{name}{REFUSED_SUFFIX}-{number}"),
            };
            let flags = RenameFlags::NOREPLACE;
            match renameat_with(dir.directory(), &name, dir.directory(), &aside, flags) {
                Err(Errno::EXIST) if number < MAX_ASIDE => number += 1,
                Err(Errno::EXIST) => {
                    replace(dir, &name, &aside).map_err(failed)?;
                    return Ok(dir.path_of(&aside));
                }
                renamed => {
                    renamed.map_err(failed)?;
                    return Ok(dir.path_of(&aside));
                }
            }
        }
    }
}

/// Renames a file, replacing any file of the new name.
fn replace(dir: &StateDir, name: &str, other: &str) -> rustix::io::Result<()> {
    let rename = || renameat(dir.directory(), name, dir.directory(), other);
    rename().or_else(|_| {
        // `rename` replaces neither a directory by a file nor a file by a directory.
        let _ = unlinkat(dir.directory(), other, AtFlags::empty());
        let _ = unlinkat(dir.directory(), other, AtFlags::REMOVEDIR);
        rename()
    })
}

/// A new file's page and log.
fn create_memory(
    dir: &StateDir,
    name: &str,
    log_words: usize,
) -> io::Result<(VolatileSlice, LogMemory)> {
    // A file of this name was left by a process that was killed while it made the file. No other
    // process makes it now, because this process holds the image's lock.
    match unlinkat(dir.directory(), name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = openat(dir.directory(), name, flags, Mode::RUSR | Mode::WUSR)?;
    if !is_own_file(&file, dir.user())? {
        fchown(&file, Some(Uid::from_raw(dir.user())), None)?;
    }
    let length = PAGE_BYTES + log_words * size_of::<u64>();
    ftruncate(&file, length as u64)?;
    LogMemory::reserve_first(&file, log_words)?;
    map(file, length)
}

/// The file that has the name of a state file.
enum FoundMemory {
    Nothing,
    Foreign { why: &'static str },
    Mapped { page: VolatileSlice, log: LogMemory },
}

fn find_memory(dir: &StateDir, name: &str) -> io::Result<FoundMemory> {
    let foreign = |why| Ok(FoundMemory::Foreign { why });
    // `NONBLOCK`, because the open must not wait if the name belongs to a pipe.
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match openat(dir.directory(), name, flags, Mode::empty()) {
        Ok(file) => file,
        Err(Errno::NOENT) => return Ok(FoundMemory::Nothing),
        Err(Errno::LOOP | Errno::ISDIR | Errno::NXIO) => return foreign("it is no regular file"),
        Err(error) => return Err(error.into()),
    };
    if !is_own_file(&file, dir.user())? {
        return foreign("it is no regular file of this user");
    }
    let length = fstat(&file)?.st_size as u64;
    if length < PAGE_BYTES as u64 {
        return foreign("it was cut short");
    }
    if length > MAX_BYTES {
        return foreign("it is too long");
    }
    let (page, log) = map(file, length as usize)?;
    Ok(FoundMemory::Mapped { page, log })
}

/// Maps a file of `length` bytes. Returns its page and its log.
fn map(file: OwnedFd, length: usize) -> io::Result<(VolatileSlice, LogMemory)> {
    let memory = Arc::new(SharedMemory::map(&file, 0, length, &FaultDomain::unconnected())?);
    let slice = |start, length| VolatileSlice::new(Arc::clone(&memory), start, length);
    let parts = slice(0, PAGE_BYTES).zip(slice(PAGE_BYTES, length - PAGE_BYTES));
    let parts = parts.ok_or_else(|| io::Error::other("the memory is shorter than the file"));
    parts.map(|(page, log)| (page, LogMemory::new(log, file)))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, symlink};
    use std::path::PathBuf;

    use blockhouse_core::RESERVED_WORDS;
    use tempfile::TempDir;

    use super::super::TrackedFile;
    use super::super::page::tests::owner;
    use super::*;

    /// A directory with the file of [`owner`]'s image.
    struct Scratch {
        _folder: TempDir,
        dir: StateDir,
        file: PathBuf,
    }

    impl Scratch {
        fn new() -> Self {
            let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
            let path = folder.path().join("state");
            let dir = StateDir::create(&path).expect("it can be made");
            Self { _folder: folder, dir, file: path.join(owner().image.file_name()) }
        }

        fn create(&self) -> StateFile {
            self.create_for(&owner())
        }

        fn create_for(&self, owner: &Owner) -> StateFile {
            let owner = Owner { boot: self.dir.boot(), ..owner.clone() };
            StateFile::create(&self.dir, &owner, 100, |_| {}).expect("there is room")
        }

        fn find(&self) -> FoundState {
            StateFile::find(&self.dir, owner().image).expect("no failure")
        }

        fn aside(&self, number: usize) -> PathBuf {
            match number {
                1 => self.file.with_extension("refused"),
                _ => self.file.with_extension(format!("refused-{number}")),
            }
        }
    }

    #[test]
    fn a_file_is_found_with_all_that_was_stored_when_its_process_is_gone() {
        let scratch = Scratch::new();
        assert!(matches!(scratch.find(), FoundState::Nothing));
        let owner = Owner { boot: scratch.dir.boot(), ..owner() };
        let file = StateFile::create(&scratch.dir, &owner, 100, |page| {
            page.set_failure(TrackedFile::Image, 5);
        });
        file.expect("there is room").log().store(99, 7);
        assert_eq!(fs::read_dir(scratch.dir.path()).expect("a directory").count(), 1);
        let FoundState::Usable(file) = scratch.find() else { panic!("it is usable") };
        assert_eq!((file.log().words(), file.log().load(99), file.log().load(98)), (100, 7, 0));
        assert_eq!(file.page().failure(TrackedFile::Image), Some(5));
        file.remove().expect("it is there");
        file.remove().expect("once more does no harm");
        assert!(matches!(scratch.find(), FoundState::Nothing));
    }

    #[test]
    fn a_log_takes_memory_of_the_host_as_it_is_reserved() {
        let scratch = Scratch::new();
        let owner = Owner { boot: scratch.dir.boot(), ..owner() };
        let words = 1 << 18;
        let file = StateFile::create(&scratch.dir, &owner, words, |_| {}).expect("there is room");
        let kibibytes = || {
            let status = fs::metadata(&scratch.file).expect("the file");
            assert_eq!(status.len(), (PAGE_BYTES + words * 8) as u64);
            status.blocks() / 2
        };
        assert_eq!(kibibytes(), 36, "of an image at rest");
        let log = file.log();
        log.store(RESERVED_WORDS - 1, 7);
        assert!(log.reserve(words));
        log.store(words - 1, 8);
        assert!(kibibytes() >= 2048);
        log.release(RESERVED_WORDS);
        assert_eq!((kibibytes(), log.load(RESERVED_WORDS - 1)), (36, 7));
        assert_eq!(log.words(), words);
    }

    #[test]
    fn a_new_file_takes_the_place_of_the_old_one() {
        let scratch = Scratch::new();
        scratch.create().log().store(3, 7);
        fs::write(scratch.file.with_extension("new"), "of a process that died").expect("a file");
        assert_eq!(scratch.create().log().load(3), 0);
    }

    #[test]
    fn a_file_of_another_boot_or_image_is_known() {
        let scratch = Scratch::new();
        let image = owner().image;
        scratch.create_for(&Owner { image: ImageIdentity { birth: 1, ..image }, ..owner() });
        assert!(matches!(scratch.find(), FoundState::OtherImage(_)));
        // The tests' owner has a boot id that this host never had.
        StateFile::create(&scratch.dir, &owner(), 100, |_| {}).expect("there is room");
        let FoundState::OtherBoot(void) = scratch.find() else { panic!("it is of another boot") };
        void.remove().expect("it is there");
        assert!(!scratch.file.exists());
    }

    #[test]
    fn what_is_no_state_file_is_found_as_foreign_and_set_aside() {
        let scratch = Scratch::new();
        scratch.create();
        let target = scratch.file.with_extension("target");
        fs::rename(&scratch.file, &target).expect("it is there");
        let link = || symlink(&target, &scratch.file);
        let cut = || {
            fs::copy(&target, &scratch.file)
                .and_then(|_| fs::File::options().write(true).open(&scratch.file)?.set_len(4095))
        };
        let long = || fs::File::create(&scratch.file).and_then(|file| file.set_len(MAX_BYTES + 8));
        let pipe = || Ok(rustix::fs::mkfifoat(rustix::fs::CWD, &scratch.file, Mode::RUSR)?);
        let makers: [(&str, &dyn Fn() -> io::Result<()>); 6] = [
            ("a link", &link),
            ("a truncated file", &cut),
            ("a long file", &long),
            ("a pipe", &pipe),
            ("another magic", &|| fs::write(&scratch.file, [7; 8192])),
            ("a directory", &|| fs::create_dir(&scratch.file)),
        ];
        for (number, (what, make)) in (1..).zip(makers) {
            make().expect(what);
            assert!(matches!(scratch.find(), FoundState::Foreign { .. }), "{what}");
            let aside = StateFile::set_aside(&scratch.dir, owner().image).expect(what);
            assert_eq!(PathBuf::from(aside), scratch.aside(number), "all of them are kept");
            assert!(matches!(scratch.find(), FoundState::Nothing), "{what}");
        }
        assert!(target.exists(), "what the link named is as it was");
        // The last refused file is replaced if all names are in use.
        for number in [7, 8, 8] {
            scratch.create();
            let aside = StateFile::set_aside(&scratch.dir, owner().image).expect("it can be moved");
            assert_eq!(PathBuf::from(aside), scratch.aside(number));
        }
        assert_eq!(fs::read_dir(scratch.dir.path()).expect("a directory").count(), MAX_ASIDE + 1);
        // A directory that is not empty is not replaced.
        fs::remove_file(scratch.aside(8)).expect("it is there");
        fs::create_dir(scratch.aside(8)).expect("a directory");
        fs::write(scratch.aside(8).join("file"), "").expect("a directory");
        scratch.create();
        let error = StateFile::set_aside(&scratch.dir, owner().image).expect_err("no room there");
        assert!(error.to_string().contains("remove it"), "{error}");
    }

    #[test]
    fn a_file_of_a_page_alone_has_no_log() {
        let scratch = Scratch::new();
        let owner = Owner { boot: scratch.dir.boot(), ..owner() };
        let file = StateFile::create(&scratch.dir, &owner, 0, |_| {}).expect("there is room");
        assert_eq!(file.log().words(), 0);
        assert!(matches!(scratch.find(), FoundState::Usable(_)));
    }
}
