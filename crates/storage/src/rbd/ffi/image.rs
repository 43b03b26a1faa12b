//! The blocking calls of an open image. Asynchronous operations are in `operation`.

use std::ffi::{CStr, c_char, c_int};
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::AtomicUsize;

use blockhouse_core::ByteRange;
use rustix::event::{EventfdFlags, eventfd};

use super::super::location::RbdLocation;
use super::cluster::Cluster;
use super::library::{Handle, OptionRecord, Rbd, WatcherRecord};
use super::waiter::Waiter;
use super::{CallError, c_string, check};

/// `EVENT_TYPE_EVENTFD`.
const EVENT_TYPE_EVENTFD: c_int = 2;
/// `RBD_LOCK_MODE_EXCLUSIVE`.
const LOCK_MODE_EXCLUSIVE: c_int = 0;
/// The most watchers of an image that are queried.
const MAX_WATCHERS: usize = 64;
/// Size of the buffer for an image's id, with the zero byte at its end.
const MAX_ID: usize = 256;
/// Size of the buffer for each text about the holder of a lock, in bytes.
const MAX_TEXT: usize = 1024;

/// A client that holds the lock of an image.
pub(crate) struct LockHolder {
    /// Ceph's name of the client, such as `client.4123`.
    pub(crate) client: String,
    /// The client's IP address, port and nonce.
    pub(crate) address: String,
}

/// The first extent of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// Bytes in objects that exist.
    Data(u64),
    /// Bytes in no object, which read as zeros.
    Hole(u64),
}

/// An open image, whose operations each have a waiter `W`.
///
/// Every method outside of `operation` blocks, usually for one round trip to the cluster.
pub(crate) struct Image<W: Waiter> {
    cluster: Cluster,
    pub(super) handle: Handle,
    /// The number of operations whose completion was not yet fetched from librbd.
    pub(super) in_flight: AtomicUsize,
    /// The eventfd that librbd signals for each completion. It need not be read.
    pub(super) notifier: OwnedFd,
    waiters: PhantomData<fn(W) -> W>,
}

// SAFETY: an image of librbd is not bound to a thread, and its functions may be called by several
// at a time (upheld by Ceph); waiters move between threads, which `Waiter: Send` allows.
unsafe impl<W: Waiter> Send for Image<W> {}
// SAFETY: as above; a waiter is never shared, only given in and taken out.
unsafe impl<W: Waiter> Sync for Image<W> {}

impl<W: Waiter> Image<W> {
    /// Connects to the cluster and opens the image, or the snapshot that the location names. Only
    /// an image that is opened for writing is known to other clients.
    ///
    /// # Errors
    /// Errors of the cluster; ENOENT if there is no such image.
    pub(crate) fn open(
        location: &RbdLocation,
        is_writable: bool,
        options: &[(&CStr, &CStr)],
        defaults: &[(&CStr, &CStr)],
    ) -> Result<Self, CallError> {
        let cluster = Cluster::connect(location, options, defaults)?;
        Self::open_in(cluster, location, is_writable)
            .map_err(|source| CallError { what: "cannot open the image", source })
    }

    fn open_in(cluster: Cluster, location: &RbdLocation, is_writable: bool) -> io::Result<Self> {
        let notifier = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let name = c_string(location.image())?;
        let snapshot = location.snapshot().map(c_string).transpose()?;
        let snapshot = snapshot.as_ref().map_or(ptr::null(), |name| name.as_ptr());
        let rbd = &cluster.ceph().rbd;
        let open = if is_writable { rbd.rbd_open } else { rbd.rbd_open_read_only };
        let mut handle = ptr::null_mut();
        // SAFETY: the pool lives as long as the cluster, which the image keeps; null means no
        // snapshot.
        check(unsafe { open(cluster.pool(), name.as_ptr(), &raw mut handle, snapshot) })?;
        // From here on, dropping `image` closes it on every return.
        let in_flight = AtomicUsize::new(0);
        let image = Self { cluster, handle, in_flight, notifier, waiters: PhantomData };
        let descriptor = image.notifier.as_raw_fd();
        // SAFETY: the eventfd is closed after the image (`Drop`).
        check(unsafe {
            (image.rbd().rbd_set_image_notification)(handle, descriptor, EVENT_TYPE_EVENTFD)
        })?;
        Ok(image)
    }

    pub(super) fn rbd(&self) -> &'static Rbd {
        &self.cluster.ceph().rbd
    }

    /// The id that the pool gives the image. It does not depend on the image's name, and is never
    /// reused in the pool.
    pub(crate) fn id(&self) -> io::Result<String> {
        let mut id: [c_char; MAX_ID] = [0; MAX_ID];
        // SAFETY: the image is open, and the last byte stays zero.
        check(unsafe { (self.rbd().rbd_get_id)(self.handle, id.as_mut_ptr(), MAX_ID - 1) })?;
        // SAFETY: the id ends with a zero, at the last byte at the latest.
        Ok(unsafe { text(id.as_ptr()) })
    }

    /// The size in bytes that the cluster has last reported.
    pub(crate) fn size(&self) -> io::Result<u64> {
        let mut size = 0;
        // SAFETY: the image is open.
        check(unsafe { (self.rbd().rbd_get_size)(self.handle, &raw mut size) })?;
        Ok(size)
    }

    /// Sets the size of the image. Fails if that makes the image shorter, unless `may_shrink`.
    pub(crate) fn resize(&self, size: u64, may_shrink: bool) -> io::Result<()> {
        unsafe extern "C" fn go_on(_done: u64, _total: u64, _argument: Handle) -> c_int {
            0
        }
        // SAFETY: the callback needs no argument.
        let code = unsafe {
            (self.rbd().rbd_resize2)(self.handle, size, may_shrink, go_on, ptr::null_mut())
        };
        check(code).map(drop)
    }

    /// The value of one of librbd's options for this image, which its pool or its own metadata may
    /// set. `None` if the library has no such option.
    pub(crate) fn option(&self, name: &str) -> io::Result<Option<String>> {
        let empty = OptionRecord {
            name: ptr::null_mut(),
            value: ptr::null_mut(),
            source: Default::default(),
        };
        let mut records = Vec::new();
        let list = self.rbd().rbd_config_image_list;
        loop {
            let mut count = c_int::try_from(records.len()).unwrap_or(c_int::MAX);
            // SAFETY: `count` is the number of records in memory.
            let code = unsafe { list(self.handle, records.as_mut_ptr(), &raw mut count) };
            let listed = usize::try_from(count).unwrap_or(0);
            if code == -rustix::io::Errno::RANGE.raw_os_error() && listed > records.len() {
                records.resize(listed, empty);
                continue;
            }
            check(code)?;
            records.truncate(listed);
            break;
        }
        // SAFETY: librbd has filled the records with strings, which are given back below.
        let found = records.iter().find(|record| unsafe { text(record.name) } == name);
        // SAFETY: as above.
        let value = found.map(|record| unsafe { text(record.value) });
        let count = c_int::try_from(records.len()).unwrap_or(0);
        // SAFETY: they are the records of the list, and none is used afterwards.
        unsafe { (self.rbd().rbd_config_image_list_cleanup)(records.as_mut_ptr(), count) };
        Ok(value)
    }

    /// Acquires the image's exclusive lock and keeps it. If a former holder has died, waits until
    /// the cluster detects that.
    ///
    /// # Errors
    /// EROFS if another client keeps the lock; EINVAL if the image does not support exclusive
    /// locks.
    pub(crate) fn lock(&self) -> io::Result<()> {
        // SAFETY: the image is open.
        check(unsafe { (self.rbd().rbd_lock_acquire)(self.handle, LOCK_MODE_EXCLUSIVE) }).map(drop)
    }

    /// The holder of the exclusive lock; the holder may have disconnected.
    pub(crate) fn lock_holder(&self) -> io::Result<Option<LockHolder>> {
        let mut exclusive = 0;
        let mut texts = [[0_u8; MAX_TEXT]; 4];
        let mut lengths = [MAX_TEXT; 4];
        let [tag, clients, cookies, addresses] =
            texts.each_mut().map(|text| text.as_mut_ptr().cast());
        let [tag_length, clients_length, cookies_length, addresses_length] =
            lengths.each_mut().map(|length| length as *mut usize);
        // SAFETY: each text has as many bytes as its length says.
        let count = unsafe {
            (self.rbd().rbd_list_lockers)(
                self.handle,
                &raw mut exclusive,
                tag,
                tag_length,
                clients,
                clients_length,
                cookies,
                cookies_length,
                addresses,
                addresses_length,
            )
        };
        if count < 0 {
            return Err(io::Error::from_raw_os_error(-(count as i32)));
        }
        let [_, clients, _, addresses] = texts;
        // Each text ends with a zero byte. Only the first text is used, because an exclusive lock
        // has one holder.
        let first = |text: &[u8]| {
            let text = CStr::from_bytes_until_nul(text).unwrap_or_default();
            text.to_string_lossy().into_owned()
        };
        let holder = LockHolder { client: first(&clients), address: first(&addresses) };
        Ok((count > 0).then_some(holder))
    }

    /// The numbers of the clients that have the image open for writing, at most [`MAX_WATCHERS`].
    pub(crate) fn watchers(&self) -> io::Result<Vec<i64>> {
        let none = WatcherRecord { address: ptr::null_mut(), id: 0, cookie: 0 };
        let (mut records, mut count) = ([none; MAX_WATCHERS], MAX_WATCHERS);
        let list = self.rbd().rbd_watchers_list;
        // SAFETY: there is memory for that many records.
        check(unsafe { list(self.handle, records.as_mut_ptr(), &raw mut count) })?;
        let watchers = records[..count].iter().map(|record| record.id).collect();
        // SAFETY: they are the records that librbd has filled, and none is used afterwards.
        unsafe { (self.rbd().rbd_watchers_list_cleanup)(records.as_mut_ptr(), count) };
        Ok(watchers)
    }

    /// The first extent of `range`. The range is not empty, and inside of the image.
    pub(crate) fn first_extent(&self, range: ByteRange) -> io::Result<Extent> {
        let mut scan = Scan { range, data_end: range.offset(), hole_end: range.end() };
        let (whole_objects, with_parent) = (1, 1);
        // SAFETY: the callback is called during the call only, and gets the scan, which has no
        // other user during it.
        let code = unsafe {
            (self.rbd().rbd_diff_iterate2)(
                self.handle,
                ptr::null(),
                range.offset(),
                range.length(),
                with_parent,
                whole_objects,
                on_extent,
                (&raw mut scan).cast(),
            )
        };
        if code != STOP {
            check(code)?;
        }
        Ok(scan.first())
    }
}

/// The return value of a diff's callback that ends the scan.
const STOP: c_int = -rustix::io::Errno::CANCELED.raw_os_error();

/// The state of the scan of a range's first extent.
struct Scan {
    range: ByteRange,
    /// End of the data at the start of the range.
    data_end: u64,
    /// End of the hole at the start of the range, if the range does not start with data.
    hole_end: u64,
}

impl Scan {
    /// Adds the next extent with data. `false` if the scan can end.
    fn add(&mut self, offset: u64, length: u64) -> bool {
        if offset > self.data_end {
            if self.data_end == self.range.offset() {
                self.hole_end = offset.min(self.range.end());
            }
            return false;
        }
        self.data_end = self.data_end.max(offset.saturating_add(length));
        self.data_end < self.range.end()
    }

    fn first(&self) -> Extent {
        let start = self.range.offset();
        if self.data_end > start {
            Extent::Data(self.data_end.min(self.range.end()) - start)
        } else {
            Extent::Hole(self.hole_end - start)
        }
    }
}

/// # Safety
/// `scan` is a [`Scan`] that no other code uses during the call.
unsafe extern "C" fn on_extent(offset: u64, length: usize, exists: c_int, scan: Handle) -> c_int {
    // SAFETY: the caller guarantees it.
    let scan = unsafe { &mut *scan.cast::<Scan>() };
    if exists != 0 && !scan.add(offset, length as u64) {
        return STOP;
    }
    0
}

/// # Safety
/// The address is null or that of a string that ends with a zero byte.
pub(super) unsafe fn text(address: *const c_char) -> String {
    if address.is_null() {
        return String::new();
    }
    // SAFETY: the caller guarantees it.
    unsafe { CStr::from_ptr(address) }.to_string_lossy().into_owned()
}

impl<W: Waiter> Image<W> {
    /// Waits for the operations in flight, completes them, releases the lock and closes the image.
    ///
    /// # Errors
    /// Errors of the cluster; the image is closed nevertheless.
    pub(crate) fn close(mut self) -> io::Result<()> {
        self.close_once()
    }

    fn close_once(&mut self) -> io::Result<()> {
        if self.handle.is_null() {
            return Ok(());
        }
        self.drain();
        let handle = std::mem::replace(&mut self.handle, ptr::null_mut());
        // SAFETY: no operation is in flight, so librbd has no memory of ours. The eventfd is closed
        // afterwards, and the handle is not used again: both callers own the image.
        check(unsafe { (self.rbd().rbd_close)(handle) }).map(drop)
    }
}

impl<W: Waiter> Drop for Image<W> {
    /// As [`close`](Self::close).
    fn drop(&mut self) {
        let _ = self.close_once();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(extents: &[(u64, u64)]) -> Extent {
        let range = ByteRange::between(100, 200);
        let mut scan = Scan { range, data_end: 100, hole_end: 200 };
        for &(offset, length) in extents {
            if !scan.add(offset, length) {
                break;
            }
        }
        scan.first()
    }

    #[test]
    fn the_first_extent_is_data_up_to_a_gap_or_a_hole_up_to_data() {
        assert_eq!(first(&[]), Extent::Hole(100));
        assert_eq!(first(&[(150, 10), (170, 5)]), Extent::Hole(50));
        assert_eq!(first(&[(100, 10), (170, 5)]), Extent::Data(10));
        assert_eq!(first(&[(100, 10), (110, 20), (140, 1)]), Extent::Data(30));
        assert_eq!(first(&[(64, 64), (128, 64), (192, 64)]), Extent::Data(100));
        assert_eq!(first(&[(300, 64)]), Extent::Hole(100));
        assert_eq!(first(&[(100, u64::MAX)]), Extent::Data(100));
    }
}
