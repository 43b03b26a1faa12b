//! Switches the process to another user.

use std::io;

/// Switches to another user for good, on all threads: real, effective and saved ids, and no
/// supplementary groups. A process that already has this user and group is unchanged. The kernel's
/// io_uring workers keep their ids, and carry out a thread's requests with the rights of that
/// thread.
///
/// # Errors
/// Errors of the kernel: EPERM if the process may not switch. The switch may then be partly done,
/// and the process must end.
pub fn become_user(user: u32, group: u32) -> io::Result<()> {
    let is_so = |ids: [libc::uid_t; 3], wanted| ids == [wanted; 3];
    let (mut users, mut groups) = ([0; 3], [0; 3]);
    // SAFETY: each call stores three ids in variables of our own.
    unsafe {
        libc::getresuid(&raw mut users[0], &raw mut users[1], &raw mut users[2]);
        libc::getresgid(&raw mut groups[0], &raw mut groups[1], &raw mut groups[2]);
    }
    if is_so(users, user) && is_so(groups, group) {
        return Ok(());
    }
    // The functions of the C library change all threads; a system call changes only its own thread.
    // SAFETY: no groups are read from the null pointer, and the other calls use no memory.
    let result = unsafe {
        match libc::setgroups(0, std::ptr::null()) {
            0 => match libc::setresgid(group, group, group) {
                0 => libc::setresuid(user, user, user),
                failed => failed,
            },
            failed => failed,
        }
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
