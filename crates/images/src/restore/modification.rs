//! Checks by the mtime whether an image's file is unchanged since its server died.
//!
//! A redo log is valid only if the file is unchanged. Another program can modify the file after the
//! server's death, or replace it by an older copy. The session bits of a qcow2 image detect most
//! such changes (`format/qcow2/transaction/replay`). But a copy made while the server ran has the
//! same bits, so the file's mtime is compared as well:
//!
//! - with the mtime when the server opened the file: always, because both times are of the file
//!   system's clock; if that clock is this host's and the mtime was in the future, with the time of
//!   the opening instead, because a write sets an earlier mtime then;
//! - with the time of the server's last write: only if the file system uses this host's clock (NFS
//!   does not). The tolerance is large, because a write may hang in the kernel and complete after
//!   the server's death. The tolerance is small only for a later mtime without a session. An image
//!   without a session has no redo log on a file system with another clock (`keep`).

use std::time::Duration;

use blockhouse_core::{Error, Result, Storage};
use blockhouse_disk::StatePage;
use blockhouse_engine::HostFile;
use rustix::fs::{FileType, Stat, fstatfs};

use super::examine::status_of;

/// Tolerance between two times of one event. File system clocks have ticks, and a write is stamped
/// slightly before or after it is done.
const TICKS: Duration = Duration::from_secs(2);

/// The longest time that a write may hang in the kernel.
const HANG: Duration = Duration::from_secs(60);

/// File systems whose files only this host modifies, by their magic numbers (`statfs(2)`): ext4,
/// XFS, Btrfs, tmpfs, F2FS, ZFS, bcachefs, and overlayfs, whose upper file system is one of these.
const LOCAL_FILE_SYSTEMS: [u64; 8] = [
    0xef53,
    0x5846_5342,
    0x9123_683e,
    0x0102_1994,
    0xf2f5_2010,
    0x2fc1_2fc1,
    0xca45_1a4e,
    0x794c_7630,
];

/// The mtime of a regular file, and the data that it is compared with.
#[derive(Clone, Copy)]
pub(crate) struct Modification {
    /// Since the Unix epoch.
    at: Duration,
    clock: Clock,
    /// The times that its server recorded.
    noted: Noted,
}

/// The clock that a file system stamps its files with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Clock {
    /// The clock of this host.
    ThisHost,
    /// Perhaps the clock of another host.
    Unknown,
}

/// The times that a server recorded in the state file, each since the Unix epoch.
#[derive(Clone, Copy)]
struct Noted {
    /// The file's mtime when the server opened it; zero if unknown.
    modified_before: Duration,
    /// The time when the server opened it.
    opened: Duration,
    /// The time of the server's last write; without any write, `opened`.
    last_write: Duration,
}

impl Modification {
    /// Reads the mtime of an image's file, and the times that its last server recorded. `None` for
    /// a block device, which has no mtime.
    ///
    /// # Errors
    /// The host's.
    pub(crate) fn of(file: &HostFile, page: &StatePage) -> Result<Option<Self>> {
        let status = status_of(file)?;
        if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
            return Ok(None);
        }
        let Some(at) = modification_time(&status) else { return Ok(None) };
        let clock = clock_of(file)?;
        let time = Duration::from_nanos;
        let noted = Noted {
            modified_before: time(page.modified_before()),
            opened: time(page.opened()),
            last_write: time(page.last_write()),
        };
        Ok(Some(Self { at, clock, noted }))
    }

    /// The reason why the file must have been changed or replaced since its server's last write, if
    /// any. `has_session`: the image itself shows whether another program opened it for writing.
    pub(crate) fn contradiction(&self, has_session: bool) -> Option<String> {
        let Self { at, clock, noted } = *self;
        let is_before = |time: Duration, slack| at + slack < time;
        let earliest = match clock {
            Clock::ThisHost => noted.modified_before.min(noted.opened),
            Clock::Unknown => noted.modified_before,
        };
        if is_before(earliest, TICKS)
            || noted.has_written() && clock == Clock::ThisHost && is_before(noted.last_write, HANG)
        {
            let earlier = noted.last_write.saturating_sub(at).as_secs();
            return Some(format!(
                "an older copy is in the image's place (modified {earlier} s before its server's last write)"
            ));
        }
        let slack = match (has_session, clock) {
            (false, Clock::ThisHost) => TICKS,
            (true, Clock::ThisHost) => HANG,
            (_, Clock::Unknown) => return None,
        };
        let later = at.saturating_sub(noted.last_write);
        let is_unwritten = at == noted.modified_before && !noted.has_written();
        (later > slack && !is_unwritten).then(|| {
            let later = later.as_secs();
            format!("another program has modified the image since ({later} s after its server's last write)")
        })
    }
}

/// The clock of the file's file system.
///
/// # Errors
/// The host's.
pub(crate) fn clock_of(file: &HostFile) -> Result<Clock> {
    let system = fstatfs(file.descriptor())
        .map_err(|error| Error::host("cannot examine", error.into()).on(file.name()))?;
    Ok(if LOCAL_FILE_SYSTEMS.contains(&(system.f_type as u64)) {
        Clock::ThisHost
    } else {
        Clock::Unknown
    })
}

impl Noted {
    /// Whether the server has written to the file at all.
    fn has_written(&self) -> bool {
        self.last_write > self.opened
    }
}

/// The mtime since the Unix epoch; `None` for a time before it.
pub(crate) fn modification_time(status: &Stat) -> Option<Duration> {
    Some(Duration::new(status.st_mtime.try_into().ok()?, status.st_mtime_nsec as u32))
}

/// The ctime since the Unix epoch: the last change of the file's data, owner or mode.
pub(crate) fn change_time(status: &Stat) -> Duration {
    Duration::new(status.st_ctime.try_into().unwrap_or(0), status.st_ctime_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: u64 = 3600;

    /// A file that its server opened an hour after it was modified, and wrote to for two hours.
    fn contradiction(at: u64, clock: Clock, has_session: bool) -> Option<String> {
        let time = Duration::from_secs;
        let noted = Noted {
            modified_before: time(10 * HOUR),
            opened: time(11 * HOUR),
            last_write: time(13 * HOUR),
        };
        Modification { at: time(at), clock, noted }.contradiction(has_session)
    }

    #[test]
    fn a_log_fits_a_file_that_was_modified_when_its_server_wrote() {
        use Clock::{ThisHost, Unknown};
        let last = 13 * HOUR;
        for (at, clock, has_session, fits) in [
            (last, ThisHost, false, true),
            (last + 2, ThisHost, false, true),
            (last + 3, ThisHost, false, false),
            (last + 3, ThisHost, true, true),
            (last + 60, ThisHost, true, true),
            (last + 61, ThisHost, true, false),
            (last + HOUR, Unknown, true, true),
            (last + HOUR, Unknown, false, true),
            (last - 60, ThisHost, true, true),
            (last - 61, ThisHost, true, false),
            (last - 61, ThisHost, false, false),
            (last - 61, Unknown, true, true),
            (10 * HOUR, Unknown, true, true),
            (10 * HOUR - 3, Unknown, true, false),
            (10 * HOUR - 3, Unknown, false, false),
        ] {
            let why = contradiction(at, clock, has_session);
            let late = at as i64 - last as i64;
            assert_eq!(why.is_none(), fits, "{late} s late, {clock:?}, {has_session}: {why:?}");
            if let Some(why) = why {
                assert_eq!(why.contains("older copy"), late < 0, "{why}");
            }
        }
    }

    #[test]
    fn a_file_that_its_server_never_wrote_to_may_be_old() {
        let [day, hour] = [24 * HOUR, HOUR].map(Duration::from_secs);
        let noted = Noted { modified_before: hour, opened: day, last_write: day };
        let file = Modification { at: hour, clock: Clock::ThisHost, noted };
        assert_eq!(file.contradiction(false), None);
    }

    #[test]
    fn a_file_whose_mtime_was_in_the_future_may_have_it_still_or_that_of_a_write() {
        let time = |hours: u64| Duration::from_secs(hours * HOUR);
        for (at, last_write, fits) in [
            (20, 11, true),
            (12, 12, true),
            (20, 12, false),
            (21, 11, false),
            (10, 11, false),
            (11, 12, false),
        ] {
            let (modified_before, opened) = (time(20), time(11));
            let noted = Noted { modified_before, opened, last_write: time(last_write) };
            let file = Modification { at: time(at), clock: Clock::ThisHost, noted };
            let why = file.contradiction(false);
            assert_eq!(why.is_none(), fits, "{at}, written at {last_write}: {why:?}");
        }
    }

    #[test]
    fn nothing_that_is_noted_makes_it_panic() {
        let times = [Duration::ZERO, Duration::from_nanos(u64::MAX)];
        for at in times {
            for modified_before in times {
                for last_write in times {
                    let noted = Noted { modified_before, opened: Duration::ZERO, last_write };
                    for has_session in [false, true] {
                        let clock = Clock::ThisHost;
                        Modification { at, clock, noted }.contradiction(has_session);
                    }
                }
            }
        }
    }
}
