//! A connection to a cluster, and the pool of one image.

use std::ffi::{CStr, CString};
use std::io;
use std::ptr;

use super::super::location::RbdLocation;
use super::library::{Ceph, Handle};
use super::{CallError, c_string, check};

/// Size of the buffer for the value of a numeric option, in bytes.
const OPTION_LENGTH: usize = 64;

/// A client of a cluster, with one pool. Each client has an identity of its own, so fencing it does
/// not affect other clients of this process.
pub(crate) struct Cluster {
    ceph: &'static Ceph,
    client: Handle,
    pool: Handle,
}

// SAFETY: handles of librados are not bound to a thread, and its functions may be called by several
// at a time (`librados.h`; upheld by Ceph).
unsafe impl Send for Cluster {}
// SAFETY: as above.
unsafe impl Sync for Cluster {}

impl Cluster {
    /// Connects to the location's cluster; blocks. `options` are set after the configuration file
    /// was read. An option in `defaults` is set if the configuration leaves it 0.
    ///
    /// # Errors
    /// The failure, and the errno of librados.
    pub(crate) fn connect(
        location: &RbdLocation,
        options: &[(&CStr, &CStr)],
        defaults: &[(&CStr, &CStr)],
    ) -> Result<Self, CallError> {
        let failed = |what| move |source| CallError { what, source };
        let ceph = Ceph::get().map_err(failed("cannot be opened"))?;
        let mut client = ptr::null_mut();
        let user = location
            .user()
            .map(c_string)
            .transpose()
            .map_err(failed("cannot use the name of the user"))?;
        let user = user.as_ref().map_or(ptr::null(), |user| user.as_ptr());
        // SAFETY: the strings end with a zero byte and outlive the call, as in all calls here.
        let created = check(unsafe { (ceph.rados.rados_create)(&raw mut client, user) });
        created.map_err(failed("cannot become a client of Ceph"))?;
        // From here on, dropping `cluster` shuts the client down on every return.
        let mut cluster = Self { ceph, client, pool: ptr::null_mut() };
        let configured = cluster.configure(location.configuration(), options, defaults);
        configured.map_err(failed("cannot read the configuration of Ceph"))?;
        // SAFETY: the client was created and is not connected.
        let connected = check(unsafe { (ceph.rados.rados_connect)(client) });
        connected.map_err(failed("cannot connect to the cluster"))?;
        let opened = cluster.open_pool(location.pool(), location.namespace());
        opened.map_err(failed("cannot use the pool"))?;
        Ok(cluster)
    }

    fn configure(
        &self,
        file: Option<&str>,
        options: &[(&CStr, &CStr)],
        defaults: &[(&CStr, &CStr)],
    ) -> io::Result<()> {
        let file = file.map(c_string).transpose()?;
        let path = file.as_ref().map_or(ptr::null(), |file| file.as_ptr());
        let rados = &self.ceph.rados;
        // SAFETY: a null path stands for the usual places, and so does a null name of a variable.
        unsafe {
            check((rados.rados_conf_read_file)(self.client, path))?;
            check((rados.rados_conf_parse_env)(self.client, ptr::null()))?;
        }
        let unset = defaults.iter().filter(|(name, _)| self.is_zero(name));
        for (name, value) in options.iter().chain(unset) {
            // SAFETY: as above.
            check(unsafe { (rados.rados_conf_set)(self.client, name.as_ptr(), value.as_ptr()) })?;
        }
        Ok(())
    }

    /// Whether a numeric option is 0, or cannot be read.
    fn is_zero(&self, name: &CStr) -> bool {
        let mut value = [0_u8; OPTION_LENGTH];
        // One byte less than the buffer, so that the value always ends with a zero byte.
        let (room, length) = (value.as_mut_ptr(), OPTION_LENGTH - 1);
        // SAFETY: there are as many bytes.
        let got = unsafe {
            (self.ceph.rados.rados_conf_get)(self.client, name.as_ptr(), room.cast(), length)
        };
        let text = CStr::from_bytes_until_nul(&value).unwrap_or_default().to_string_lossy();
        got < 0 || text.parse::<f64>().is_ok_and(|number| number == 0.0)
    }

    fn open_pool(&mut self, name: &str, namespace: Option<&str>) -> io::Result<()> {
        let rados = &self.ceph.rados;
        let name = c_string(name)?;
        // SAFETY: the client is connected.
        check(unsafe {
            (rados.rados_ioctx_create)(self.client, name.as_ptr(), &raw mut self.pool)
        })?;
        if let Some(namespace) = namespace {
            let namespace: CString = c_string(namespace)?;
            // SAFETY: the pool was opened the step before.
            unsafe { (rados.rados_ioctx_set_namespace)(self.pool, namespace.as_ptr()) };
        }
        Ok(())
    }

    pub(super) fn ceph(&self) -> &'static Ceph {
        self.ceph
    }

    /// The pool's `rados_ioctx_t`, valid while `self` exists.
    pub(super) fn pool(&self) -> Handle {
        self.pool
    }
}

impl Drop for Cluster {
    /// Ends the connection; blocks.
    fn drop(&mut self) {
        // SAFETY: each handle is released once, the pool before its client. An image owns its
        // cluster, so none is open.
        unsafe {
            if !self.pool.is_null() {
                (self.ceph.rados.rados_ioctx_destroy)(self.pool);
            }
            (self.ceph.rados.rados_shutdown)(self.client);
        }
    }
}
