//! The functions of librados and librbd. Both libraries are loaded when the first image in Ceph is
//! opened.
//!
//! Guarantees: a process that opens no such image loads neither library. If a library is not
//! installed, opening such an image fails with an error that names the package to install. A loaded
//! library is never unloaded, because its threads and destructors may still run.
//!
//! The declarations are those of `rados/librados.h` and `rbd/librbd.h` (Ceph 16).

use std::ffi::{c_char, c_int, c_void};
use std::io;
use std::sync::OnceLock;

use blockhouse_core::Segment;
use libloading::Library;

/// The opaque types `rados_t`, `rados_ioctx_t`, `rbd_image_t` and `rbd_completion_t`, and the
/// argument that a callback gets.
pub(super) type Handle = *mut c_void;

/// `rbd_diff_iterate2` calls it for each extent. Parameters: offset, length, whether the extent has
/// data, argument. A negative result ends the iteration.
pub(super) type ExtentCallback = unsafe extern "C" fn(u64, usize, c_int, Handle) -> c_int;

/// Called with the progress of a long operation. Parameters: amount done, total, argument. A
/// negative result stops the operation.
pub(super) type ProgressCallback = unsafe extern "C" fn(u64, u64, Handle) -> c_int;

/// Called when an operation completes, with its completion and argument. `None` if the caller needs
/// no callback.
pub(super) type CompletionCallback = Option<unsafe extern "C" fn(Handle, Handle)>;

/// `rbd_snap_info_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct SnapshotRecord {
    pub(super) id: u64,
    pub(super) size: u64,
    pub(super) name: *const c_char,
}

/// `struct timespec` (POSIX, `<time.h>`) as 64-bit machines lay it out.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Time {
    pub(super) seconds: i64,
    pub(super) nanoseconds: i64,
}

/// `rbd_image_watcher_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct WatcherRecord {
    pub(super) address: *mut c_char,
    pub(super) id: i64,
    pub(super) cookie: u64,
}

/// `rbd_config_option_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct OptionRecord {
    pub(super) name: *mut c_char,
    pub(super) value: *mut c_char,
    pub(super) source: c_int,
}

/// Defines a table of functions of one library, and how it is loaded.
macro_rules! functions {
    ($table:ident of $file:literal: $(fn $name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        pub(super) struct $table {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl $table {
            fn load() -> Result<Self, String> {
                let library = load($file)?;
                Ok(Self {
                    $($name: {
                        // SAFETY: the type is that of the function's declaration in the library's
                        // header, which the soname keeps compatible (upheld by Ceph).
                        let symbol = unsafe { library.get(stringify!($name).as_bytes()) };
                        *symbol.map_err(|_| too_old($file, stringify!($name)))?
                    },)*
                })
            }
        }
    };
}

functions! { Rados of "librados.so.2":
    fn rados_create(*mut Handle, *const c_char) -> c_int;
    fn rados_conf_read_file(Handle, *const c_char) -> c_int;
    fn rados_conf_parse_env(Handle, *const c_char) -> c_int;
    fn rados_conf_get(Handle, *const c_char, *mut c_char, usize) -> c_int;
    fn rados_conf_set(Handle, *const c_char, *const c_char) -> c_int;
    fn rados_connect(Handle) -> c_int;
    fn rados_shutdown(Handle);
    fn rados_ioctx_create(Handle, *const c_char, *mut Handle) -> c_int;
    fn rados_ioctx_set_namespace(Handle, *const c_char);
    fn rados_ioctx_destroy(Handle);
}

functions! { Rbd of "librbd.so.1":
    fn rbd_image_options_create(*mut Handle);
    fn rbd_image_options_set_uint64(Handle, c_int, u64) -> c_int;
    fn rbd_image_options_destroy(Handle);
    fn rbd_create4(Handle, *const c_char, u64, Handle) -> c_int;
    fn rbd_clone3(
        Handle, *const c_char, *const c_char, Handle, *const c_char, Handle
    ) -> c_int;
    fn rbd_remove(Handle, *const c_char) -> c_int;
    fn rbd_rename(Handle, *const c_char, *const c_char) -> c_int;
    fn rbd_open(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    fn rbd_open_read_only(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    fn rbd_close(Handle) -> c_int;
    fn rbd_get_size(Handle, *mut u64) -> c_int;
    fn rbd_get_id(Handle, *mut c_char, usize) -> c_int;
    fn rbd_resize2(Handle, u64, bool, ProgressCallback, Handle) -> c_int;
    fn rbd_config_image_list(Handle, *mut OptionRecord, *mut c_int) -> c_int;
    fn rbd_config_image_list_cleanup(*mut OptionRecord, c_int);
    fn rbd_lock_acquire(Handle, c_int) -> c_int;
    fn rbd_list_lockers(
        Handle, *mut c_int, *mut c_char, *mut usize, *mut c_char, *mut usize, *mut c_char, *mut usize,
        *mut c_char, *mut usize
    ) -> isize;
    fn rbd_watchers_list(Handle, *mut WatcherRecord, *mut usize) -> c_int;
    fn rbd_watchers_list_cleanup(*mut WatcherRecord, usize);
    fn rbd_diff_iterate2(
        Handle, *const c_char, u64, u64, u8, u8, ExtentCallback, Handle
    ) -> c_int;
    fn rbd_snap_list(Handle, *mut SnapshotRecord, *mut c_int) -> c_int;
    fn rbd_snap_list_end(*mut SnapshotRecord);
    fn rbd_snap_get_timestamp(Handle, u64, *mut Time) -> c_int;
    fn rbd_snap_create(Handle, *const c_char) -> c_int;
    fn rbd_snap_remove(Handle, *const c_char) -> c_int;
    fn rbd_snap_rename(Handle, *const c_char, *const c_char) -> c_int;
    fn rbd_snap_rollback(Handle, *const c_char) -> c_int;
    fn rbd_set_image_notification(Handle, c_int, c_int) -> c_int;
    fn rbd_poll_io_events(Handle, *mut Handle, c_int) -> c_int;
    fn rbd_aio_create_completion(Handle, CompletionCallback, *mut Handle) -> c_int;
    fn rbd_aio_get_arg(Handle) -> Handle;
    fn rbd_aio_get_return_value(Handle) -> isize;
    fn rbd_aio_release(Handle);
    fn rbd_aio_readv(Handle, *const Segment, c_int, u64, Handle) -> c_int;
    fn rbd_aio_writev(Handle, *const Segment, c_int, u64, Handle) -> c_int;
    fn rbd_aio_discard(Handle, u64, u64, Handle) -> c_int;
    fn rbd_aio_write_zeroes(Handle, u64, usize, Handle, c_int, c_int) -> c_int;
    fn rbd_aio_flush(Handle, Handle) -> c_int;
}

/// Both libraries.
pub(super) struct Ceph {
    pub(super) rados: Rados,
    pub(super) rbd: Rbd,
}

impl Ceph {
    /// The libraries. The first call in a process loads them.
    ///
    /// # Errors
    /// `Unsupported`: one line that names the missing library or function, and what to install.
    pub(super) fn get() -> io::Result<&'static Self> {
        static LOADED: OnceLock<Result<Ceph, String>> = OnceLock::new();
        let load = || Ok(Self { rados: Rados::load()?, rbd: Rbd::load()? });
        let loaded = LOADED.get_or_init(load).as_ref();
        loaded.map_err(|why| io::Error::new(io::ErrorKind::Unsupported, why.as_str()))
    }
}

/// Loads a library and never unloads it.
fn load(file: &str) -> Result<&'static Library, String> {
    if cfg!(target_feature = "crt-static") {
        return Err(format!(
            "this program is linked statically and cannot load {file}; use the package for your distribution"
        ));
    }
    // SAFETY: the initializers of Ceph's libraries have no demands on their caller, and the library
    // is never unloaded.
    let library = unsafe { Library::new(file) };
    let install = "install Ceph's client library (Debian: librbd1, Fedora: librbd1)";
    // The loader's error for a file that the sandbox hides is the same as for a missing file.
    // `no_new_privs` is set in the sandbox. A process that cannot query it is taken to be in the
    // sandbox.
    let confined = if rustix::thread::no_new_privs().unwrap_or(true) {
        "; a server in its sandbox cannot load it: start it with an image in Ceph, or with --sandbox off"
    } else {
        ""
    };
    let library =
        library.map_err(|error| format!("cannot load {file}: {error}; {install}{confined}"))?;
    Ok(Box::leak(Box::new(library)))
}

fn too_old(file: &str, name: &str) -> String {
    format!("{file} has no function {name}; install Ceph's client library of version 16 or later")
}
