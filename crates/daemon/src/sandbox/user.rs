//! Switches to another user after everything is open.

use std::path::PathBuf;

use anyhow::{Context, Result};
use blockhouse_config::user_options::UserIds;
use blockhouse_engine::become_user;
use rustix::fs::{AtFlags, CWD, Gid, Uid, chownat, lstat};

/// Becomes this user, and gives it the Unix sockets that were bound, so that the owner permissions
/// in the sockets' modes apply to this user.
///
/// # Errors
/// This process is not permitted to do so.
pub(super) fn become_owner(ids: UserIds, sockets: &[PathBuf]) -> Result<()> {
    let UserIds { user, group } = ids;
    let own = rustix::process::getegid().as_raw();
    for socket in sockets {
        let cannot = || format!("{}: cannot give the socket to user {user}", socket.display());
        let found = lstat(socket).with_context(cannot)?;
        // A group that was chosen for the socket stays.
        let group = (found.st_gid == own).then(|| Gid::from_raw(group));
        if found.st_uid != user {
            let user = Some(Uid::from_raw(user));
            chownat(CWD, socket, user, group, AtFlags::SYMLINK_NOFOLLOW).with_context(cannot)?;
        }
    }
    become_user(user, group).with_context(|| {
        format!("cannot become user {user} and group {group}; only root may become another user")
    })
}
