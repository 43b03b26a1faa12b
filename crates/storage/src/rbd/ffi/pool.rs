//! Creates, clones, removes and renames images by name. No client may have them open.

use std::ffi::c_int;
use std::io;
use std::ptr;

use super::cluster::Cluster;
use super::{c_string, check};

/// `RBD_IMAGE_OPTION_CLONE_FORMAT`.
const CLONE_FORMAT: c_int = 12;
/// The format of clones (version 2) whose parent snapshot needs no protection: the cluster keeps a
/// deleted snapshot until its last clone is removed.
const UNPROTECTED: u64 = 2;

impl Cluster {
    /// Makes an image with the features that the configuration sets.
    ///
    /// # Errors
    /// EEXIST if there is an image of this name.
    pub(crate) fn create_image(&self, name: &str, size: u64) -> io::Result<()> {
        let rbd = &self.ceph().rbd;
        let name = c_string(name)?;
        let mut options = ptr::null_mut();
        // SAFETY: the options are given back after their only use.
        let code = unsafe {
            (rbd.rbd_image_options_create)(&raw mut options);
            let code = (rbd.rbd_create4)(self.pool(), name.as_ptr(), size, options);
            (rbd.rbd_image_options_destroy)(options);
            code
        };
        check(code).map(drop)
    }

    /// Makes an image with the content of a snapshot of another image in the same pool. The new
    /// image shares the snapshot's objects.
    ///
    /// # Errors
    /// EEXIST if there is an image of this name.
    pub(crate) fn clone_image(&self, image: &str, snapshot: &str, name: &str) -> io::Result<()> {
        let rbd = &self.ceph().rbd;
        let (image, snapshot, name) = (c_string(image)?, c_string(snapshot)?, c_string(name)?);
        let mut options = ptr::null_mut();
        // SAFETY: as in `create_image`; the pool is that of both images.
        let code = unsafe {
            (rbd.rbd_image_options_create)(&raw mut options);
            let mut code = (rbd.rbd_image_options_set_uint64)(options, CLONE_FORMAT, UNPROTECTED);
            if code == 0 {
                let (from, snapshot, to) = (image.as_ptr(), snapshot.as_ptr(), name.as_ptr());
                code = (rbd.rbd_clone3)(self.pool(), from, snapshot, self.pool(), to, options);
            }
            (rbd.rbd_image_options_destroy)(options);
            code
        };
        check(code).map(drop)
    }

    /// Removes an image, object by object.
    ///
    /// # Errors
    /// EBUSY if a client has the image open; ENOTEMPTY if the image has snapshots.
    pub(crate) fn remove_image(&self, name: &str) -> io::Result<()> {
        let name = c_string(name)?;
        // SAFETY: the pool is open as long as this lives.
        check(unsafe { (self.ceph().rbd.rbd_remove)(self.pool(), name.as_ptr()) }).map(drop)
    }

    /// Gives an image another name in its pool.
    ///
    /// # Errors
    /// EEXIST if there is an image of the new name.
    pub(crate) fn rename_image(&self, name: &str, new_name: &str) -> io::Result<()> {
        let (name, new_name) = (c_string(name)?, c_string(new_name)?);
        let rename = self.ceph().rbd.rbd_rename;
        // SAFETY: as above.
        check(unsafe { rename(self.pool(), name.as_ptr(), new_name.as_ptr()) }).map(drop)
    }
}
