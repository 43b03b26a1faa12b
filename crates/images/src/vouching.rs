//! Whether the last change of a raw image before a host crash was its server's own. Used where no
//! state file decides.
//!
//! A server that records the changes of a raw image holds the image's lock. The server vouches for
//! these changes: it durably writes a time to the side file, and all changes until that time are
//! its own (`Voucher`). It writes this voucher before the first change, and renews it every
//! [`RENEWAL`] while it records changes. After a host crash the image is as that server left it, if
//! the time of the image's last change
//!
//! - is before this boot: a program of this boot would have left a later time;
//! - and is not later than the voucher.
//!
//! Two changes by other programs are not detected. First, the voucher of a killed server covers up
//! to [`TERM`] after its end. If another program changes the image in that time, and the host
//! crashes before the image is reopened, the change counts as the server's. Without a host crash
//! the state file decides. Second, another program may change the image right after a reboot while
//! the host's clock is slow, and the clock may be corrected before the image is reopened.

use std::sync::OnceLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blockhouse_disk::{Access, BootId, StoredImage};
use blockhouse_format::qcow2::Voucher;

use crate::image_options::{CacheMode, ImageOptions, Locking, Purpose};

/// The interval at which a server renews its voucher.
pub const RENEWAL: Duration = Duration::from_secs(5);
/// The time for which a voucher is valid. A renewal may be late by `TERM` minus `RENEWAL`.
const TERM: Duration = Duration::from_secs(15);

/// The host's boot id, read before the sandbox forbids it. The value is `None` if it could not be
/// read.
static BOOT: OnceLock<Option<[u8; 16]>> = OnceLock::new();

/// Starts to vouch for the changes in a raw image's side file. This has an effect only on a
/// disk's locked, writable image whose cache mode is not `unsafe`. The caller then calls
/// [`renew_voucher`](StoredImage::renew_voucher) every [`RENEWAL`].
pub(crate) fn begin_vouching(image: &StoredImage, options: &ImageOptions) {
    let is_alone = options.purpose == Purpose::Disk && options.locking == Locking::Held;
    // Without flushes a bitmap may lack changes after a host crash.
    let is_durable = options.cache != CacheMode::Unsafe;
    if is_alone
        && is_durable
        && image.access() == Access::ReadWrite
        && this_boot().is_some()
        && let Some(side_file) = image.format().side_file()
    {
        side_file.bitmaps().vouch_by(voucher);
    }
}

fn this_boot() -> Option<[u8; 16]> {
    *BOOT.get_or_init(|| BootId::current().ok().map(BootId::to_bytes))
}

fn voucher() -> Option<Voucher> {
    let until = SystemTime::now().duration_since(UNIX_EPOCH).ok()? + TERM;
    Some(Voucher { boot: this_boot()?, until: until.as_nanos().try_into().ok()? })
}

/// The time of the host's boot, by the present setting of its clock.
fn boot_time() -> Option<Duration> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    let up = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.checked_sub(Duration::new(up.tv_sec as u64, up.tv_nsec as u32))
}

/// Whether the last change of a file, at `changed`, was made by the process that vouched, in an
/// earlier boot of the host.
pub(crate) fn is_vouched_for(changed: Duration, voucher: Option<Voucher>) -> bool {
    let (Some(voucher), Some(boot), Some(booted)) = (voucher, this_boot(), boot_time()) else {
        return false;
    };
    holds(changed, voucher, boot, booted)
}

fn holds(changed: Duration, voucher: Voucher, boot: [u8; 16], booted: Duration) -> bool {
    voucher.boot != boot && changed < booted && changed <= Duration::from_nanos(voucher.until)
}

#[cfg(test)]
mod tests {
    use blockhouse_core::{Buffer, Durability, Request};
    use blockhouse_engine::{EngineChoice, EventLoop, HostFile, OpenMode, PageCache};
    use blockhouse_format::qcow2::SideFileHeader;
    use blockhouse_format::{ImageFormat, NewBitmap};

    use super::*;
    use crate::image_options::side_file_of;
    use crate::{ImageOptions, create, make_side_file, open};

    /// The voucher is on disk before the first change, and removed at the session's end.
    #[test]
    fn a_session_of_a_raw_image_is_vouched_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.img");
        EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
            create(&path, 1 << 20, ImageFormat::Raw).await.unwrap();
            for (cache, vouches) in [(CacheMode::Writeback, true), (CacheMode::Unsafe, false)] {
                let options = ImageOptions { cache, ..ImageOptions::default() };
                make_side_file(&path, &options).await.unwrap();
                let found = async || {
                    let path = side_file_of(&path);
                    let file = HostFile::open(&path, OpenMode::ReadOnly, PageCache::Used).unwrap();
                    SideFileHeader::read(&file).await.unwrap().expect("a side file").voucher
                };
                let disk = open(&path, options).await.unwrap();
                let (name, granularity) = (cache.as_str().to_owned(), None);
                let new = NewBitmap { name, granularity, is_enabled: true };
                disk.bitmaps().add(&new).await.unwrap();
                disk.image().renew_voucher().await;
                assert_eq!(found().await, None, "nothing is recorded yet");
                let (from, durability) = (Buffer::new(4096).lend(), Durability::None);
                disk.submit(Request::Write { offset: 0, from, durability }).await.unwrap();
                let first = found().await;
                assert_eq!(first.map(|voucher| voucher.boot), this_boot().filter(|_| vouches));
                disk.image().renew_voucher().await;
                let second = found().await;
                assert_eq!(second.map(|it| it.until) > first.map(|it| it.until), vouches);
                disk.close().await.unwrap();
                disk.image().renew_voucher().await;
                assert_eq!(found().await, None, "the session has ended");
            }
        });
    }

    const SECOND: u64 = 1_000_000_000;

    /// A host crashes and reboots. Its server renewed a voucher; another program may change the
    /// unlocked image at any time. The side file is accepted only if all changes are the server's.
    #[test]
    fn what_a_stranger_has_changed_is_not_vouched_for() {
        let mut random = fastrand::Rng::with_seed(7);
        let (mut taken, mut refused) = (0, 0);
        for _ in 0..20_000 {
            let start = 1_000 * SECOND;
            let lived = random.u64(1..100) * SECOND / 2;
            let last_renewal =
                start + lived / RENEWAL.as_nanos() as u64 * RENEWAL.as_nanos() as u64;
            let until = last_renewal + TERM.as_nanos() as u64;
            let killed = start + lived;
            let mut changed = start + random.u64(0..=lived);
            // The other program changes the image after the server's end: before the host crashes,
            // or after its restart.
            let host_dies = killed + random.u64(0..60) * SECOND;
            let booted = host_dies + random.u64(1..60) * SECOND;
            let asked = booted + random.u64(1..60) * SECOND;
            let (in_first, in_second) = (random.bool(), random.bool());
            let mut is_unnoticed = false;
            if in_first && host_dies > killed {
                changed = random.u64(killed..host_dies);
                is_unnoticed = changed <= killed + TERM.as_nanos() as u64;
            }
            if in_second {
                changed = random.u64(booted..asked);
                is_unnoticed = false;
            }
            let is_strange = in_second || in_first && host_dies > killed;
            let voucher = Voucher { boot: [1; 16], until };
            let is_taken = holds(
                Duration::from_nanos(changed),
                voucher,
                [2; 16],
                Duration::from_nanos(booted),
            );
            assert!(!is_taken || !is_strange || is_unnoticed);
            assert!(is_taken || is_strange, "a server's own changes are vouched for");
            // In the same boot only the state file decides.
            assert!(!holds(Duration::from_nanos(changed), voucher, [1; 16], Duration::MAX));
            taken += u32::from(is_taken);
            refused += u32::from(!is_taken);
        }
        assert!(taken > 1_000 && refused > 1_000, "{taken} {refused}");
    }

    #[test]
    fn the_host_tells_when_it_was_started() {
        let voucher = voucher().expect("a host with /proc");
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
        assert!(boot_time().expect("a clock") < now);
        assert!(Duration::from_nanos(voucher.until) > now);
        assert!(!is_vouched_for(Duration::ZERO, Some(voucher)), "of this boot");
        let earlier = Voucher { boot: [0; 16], ..voucher };
        assert!(is_vouched_for(Duration::ZERO, Some(earlier)));
        assert!(!is_vouched_for(now, Some(earlier)), "changed in this boot");
        assert!(!is_vouched_for(Duration::ZERO, None));
    }
}
